"""What stands in for `worker.serve` in a spawned process. Standard library only, so that a process starts at once.

The answers come pickled from the test: to send a `worker.Ready` of its own, the process would have to import JAX. For the same
reason what is mgpu_ops' own in a message is not looked at. Configs are words, and say what to do.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import time
from typing import Any

Answers = dict[str, bytes]  # ready, opened, ok, failed, final ...: pickled messages


class _Reader(pickle.Unpickler):
    """Of an object of mgpu_ops it keeps the class's name and the fields."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (), {}) if module.startswith("mgpu_ops") else super().find_class(module, name)


def receive(pipe: Any) -> Any:
    return _Reader(io.BytesIO(pipe.recv_bytes())).load()


def serve(answers: Answers, log: str, pipe: Any, visible: str | None = None) -> None:
    """Answers as a worker does; appends "start" and each request's name to the file `log`."""
    _note(log, "start")
    pipe.send_bytes(answers["ready"])
    while True:
        try:
            request = receive(pipe)
        except EOFError:
            return
        message = type(request).__name__.lower()
        _note(log, message)
        if message == "open":
            pipe.send_bytes(answers["opened"])
        elif message == "judge":
            _judge(answers, request.config, log, pipe)
        elif message == "sustain" and "die" not in [config for config, _ in request.candidates]:
            pipe.send_bytes(answers["sustained"])
        else:
            _finals(answers, [config for config, _ in request.candidates], log, pipe)


def _judge(answers: Answers, config: str, log: str, pipe: Any) -> None:
    if config == "hang":
        time.sleep(600)
    elif config == "die" or (config == "die once" and not _seen(log, "died")):
        _note(log, "died")
        os.kill(os.getpid(), signal.SIGKILL)
    elif config == "raise":
        pipe.send_bytes(answers["failed"])
    elif config == "ok, then die":
        pipe.send_bytes(answers["ok"])
        os._exit(3)
    elif config == "poison":
        pipe.send_bytes(answers["poison"])
        os._exit(0)
    else:
        if config == "note":
            pipe.send_bytes(answers["note"])
        pipe.send_bytes(answers["wrong" if config == "wrong" else "ok"])


def _finals(answers: Answers, configs: list[str], log: str, pipe: Any) -> None:
    if "hang" in configs or ("hang at last" in configs and not _seen(log, "hung")):
        _note(log, "hung")
        time.sleep(600)
    if "die" in configs:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send_bytes(answers["final"])


def _seen(log: str, text: str, times: int = 1) -> bool:
    with open(log) as stream:
        return stream.read().split().count(text) >= times


def exit_at_once(pipe: Any, visible: str | None = None) -> None:
    os._exit(3)


def say_nothing(pipe: Any, visible: str | None = None) -> None:
    time.sleep(600)


def refuse(answers: Answers, pipe: Any, visible: str | None = None) -> None:
    pipe.send_bytes(answers["failed"])


def refuse_to_open(answers: Answers, pipe: Any, visible: str | None = None) -> None:
    pipe.send_bytes(answers["ready"])
    while True:
        receive(pipe)
        pipe.send_bytes(answers["failed"])


def start_once(answers: Answers, log: str, pipe: Any, visible: str | None = None) -> None:
    """Serves the first time, and then never again, as where a GPU has gone."""
    try:
        os.close(os.open(log + ".started", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        os._exit(4)
    serve(answers, log, pipe)


def _note(log: str, text: str) -> None:
    with open(log, "a") as stream:
        stream.write(text + "\n")


def compile_words(answers: Answers, log: str, pipe: Any) -> None:
    """In place of `compile_pool.compile_jobs`: a task's config says what becomes of it."""
    _note(log, "start")
    pipe.send("ready")
    while True:
        try:
            task = receive(pipe)
        except EOFError:
            return
        if task.config == "hang":
            time.sleep(600)
        elif task.config == "die":
            os._exit(9)
        elif task.config == "meet":  # goes on once two processes are here
            _note(log, "met")
            while not _seen(log, "met", 2):
                time.sleep(0.01)
        pipe.send_bytes(answers[task.config if task.config in answers else "ok"])


def never_ready(pipe: Any) -> None:
    os._exit(5)


def keeping(pipe: Any) -> None:
    """Where a real child keeps the kernels that it lowers."""
    from mgpu_ops.core import kernel_cache
    from mgpu_ops.tuning.child import settle

    settle()
    pipe.send(kernel_cache.current())


def beget(path: str, pipe: Any) -> None:
    """A real child as to how it lives: follows its parent, and has a process of its own."""
    from mgpu_ops.tuning.child import settle

    settle()
    grandchild = subprocess.Popen(["sleep", "600"])
    with open(path + ".new", "w") as stream:
        stream.write(f"{os.getpid()} {grandchild.pid}")
    os.rename(path + ".new", path)
    pipe.send("ready")
    while True:  # as in a kernel that hangs
        time.sleep(600)
