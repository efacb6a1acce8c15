"""What stands in for `worker.serve` in a spawned process. Standard library only, so that a process starts at once.

The answers come pickled from the test: to send a `worker.Ready` of its own, the process would have to import JAX.
Configs are words, and say what to do.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

Answers = dict[str, bytes]  # ready, opened, ok, failed, final: pickled messages


def serve(answers: Answers, log: str, pipe: Any) -> None:
    """Answers as a worker does; appends "start" and each message's name to the file `log`."""
    _note(log, "start")
    pipe.send_bytes(answers["ready"])
    while True:
        try:
            message, *arguments = pipe.recv()
        except EOFError:
            return
        _note(log, message)
        if message == "open":
            pipe.send_bytes(answers["opened"])
        elif message == "judge":
            for config in arguments[0]:
                _judge(answers, config, pipe)
        else:
            _finals(answers, arguments[0], pipe)


def _judge(answers: Answers, config: str, pipe: Any) -> None:
    if config == "hang":
        time.sleep(600)
    elif config == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif config == "raise":
        pipe.send_bytes(answers["failed"])
    elif config == "answer, then die":
        pipe.send_bytes(answers["ok"])
        os._exit(3)
    else:
        pipe.send_bytes(answers["ok" if config.startswith("ok") else config])


def _finals(answers: Answers, configs: list[str], pipe: Any) -> None:
    if "hang" in configs:
        time.sleep(600)
    pipe.send_bytes(answers["final"])


def exit_at_once(pipe: Any) -> None:
    os._exit(3)


def say_nothing(pipe: Any) -> None:
    time.sleep(600)


def refuse(answers: Answers, pipe: Any) -> None:
    pipe.send_bytes(answers["failed"])


def refuse_to_open(answers: Answers, pipe: Any) -> None:
    pipe.send_bytes(answers["ready"])
    while True:
        pipe.recv()
        pipe.send_bytes(answers["failed"])


def start_once(answers: Answers, log: str, pipe: Any) -> None:
    """Serves the first time, and then never again, as where a GPU has gone."""
    if os.path.exists(log):
        os._exit(4)
    serve(answers, log, pipe)


def _note(log: str, text: str) -> None:
    with open(log, "a") as stream:
        stream.write(text + "\n")
