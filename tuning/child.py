"""A child process of the tuner, which may hang or die. It is killed if it is late, and ends with its parent."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gone:
    """In place of an answer: the process died, or (`late`) did not answer in time."""

    reason: str
    late: bool = False


class Child:
    """A spawned process that runs `serve(pipe)`. It is `busy` until it has answered, also if Ctrl-C ended the wait for that."""

    def __init__(self, serve: Callable[[Any], None]):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        with _no_ctrl_c():
            self._process.start()
        theirs.close()
        self.busy = True  # until it says that it is ready

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, message: Any) -> bool:
        """Sends a request. False if the process has ended: `receive` then gives the reason."""
        self.busy = True
        with contextlib.suppress(OSError):
            self._pipe.send(message)
            return True
        return False

    def receive(self, seconds: float, check: Callable[[], None] = lambda: None) -> Any:
        """The next message, or `Gone`. `check` is called now and then meanwhile, and may raise."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            check()
            with contextlib.suppress(EOFError, OSError):
                if self._pipe.poll(min(left, 0.5)):
                    message = self._pipe.recv()
                    self.busy = False
                    return message
                if self._process.is_alive():
                    continue
            self._process.join(5.0)
            return Gone(f"the process died (exit code {self._process.exitcode})")
        return Gone(f"no answer for {round(seconds, 1):g} s", late=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # its compilers too
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """A process started inside never hears of Ctrl-C: it is not settled before it has imported much."""
    multiprocessing.resource_tracker.ensure_running()  # else `start` does it, and lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle() -> None:
    """What a child process does first: it ignores Ctrl-C, which its parent handles, and ends with its parent.

    A kernel that hangs holds the GPU until its process is killed, so a child must not outlive a parent that is killed with -9.
    Its kernels are candidates, of which most never run again: none is kept on disk.
    """
    os.environ["MGPU_OPS_KERNEL_CACHE"] = "off"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        os.setsid()
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def first_line(error: BaseException) -> str:
    """An exception on one line of at most 200 characters."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:200]
