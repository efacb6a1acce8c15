"""A page in headless Chromium, over its debugging pipe: no driver and no port."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page, and what it said: `errors` are exceptions, refused loads and messages of its console."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest = read, write, b""
        self._numbers, self._session = itertools.count(1), ""
        self.errors: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, page: Path, width: int, *, dark: bool = False, script: bool = True) -> None:
        """Shows a file in a window of this width, in pixels, and waits until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Emulation.setScriptExecutionDisabled", value=not script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._send("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, code: str) -> Any:
        """What an expression of JavaScript gives, as JSON has it."""
        found = self._send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def printed(self) -> None:
        """From now on the page is as on paper."""
        self._send("Emulation.setEmulatedMedia", media="print", features=[])

    def _send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
        while (message := self._next()).get("id") != number:
            pass
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], 120)
            more = os.read(self._read, 1 << 16) if ready else b""
            assert more, "the browser has ended, or says nothing"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("file:", "data:")):
                self.errors.append(f"loads {about['request']['url']}")
        return message


@contextlib.contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """A Chromium of its own, with its profile in this folder. Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    (from_us, write), (read, to_us) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    pipes = f'exec "$@" 3<&{from_us} 4>&{to_us}'  # the numbers that the browser expects
    process = subprocess.Popen(
        ["bash", "-c", pipes, "bash", CHROMIUM, *flags],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Browser(read, write)
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)
