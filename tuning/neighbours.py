"""Which GPUs there are, and who else uses one: times taken beside another process are not to be trusted, and are said so.

All of it is asked of `nvidia-smi`; where that is missing, nothing is known and nothing is said. In a container it may list no
process, or number processes otherwise than the container does; then one of those listed is taken to be ours.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Collection

_EVERY = 15.0  # seconds
_IDLE = 1024  # MiB in use on a GPU that nobody computes on; the driver's own is below


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    listed = asked("--query-gpu=index")
    if listed is not None:
        return listed
    files = pathlib.Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number, _ in enumerate(files)]


def others(gpu: str, mine: Collection[int]) -> list[str]:
    """Processes on a GPU, or on several ("0,1"), "python (pid 17)", that are none of `mine`."""
    listed = asked("-i", gpu, "--query-compute-apps=pid,process_name") or []
    found = [line.split(", ", 1) for line in dict.fromkeys(listed) if line.partition(",")[0].strip().isdigit()]
    foreign = [f"{name.rpartition('/')[2]} (pid {pid})" for pid, name in found if int(pid) not in mine]
    if len(foreign) == len(found) and mine:
        return foreign[1:]  # ours goes by another number
    return foreign


def memory_in_use(gpu: str) -> int:
    """MiB in use on a GPU, by whomever; 0 where that is what an idle one has, or not known."""
    listed = asked("-i", gpu, "--query-gpu=memory.used") or []
    used = max((int(line) for line in listed if line.isdigit()), default=0)
    return used if used > _IDLE else 0


class Watch:
    """Says, while it is open, who else uses a GPU. It is opened before a process of ours uses that."""

    def __init__(self, gpu: str, mine: Callable[[], Collection[int]], say: Callable[[str], None]):
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(gpu, mine, say), daemon=True, name=f"watch GPU {gpu}")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _look(self, gpu: str, mine: Callable[[], Collection[int]], say: Callable[[str], None]) -> None:
        # Before our own worker has a context. In a container it may be all there is to see.
        if taken := memory_in_use(gpu):
            say(f"another process holds {taken} MiB on GPU {gpu}; times may be off")
        while not self._closed.is_set():
            found = others(gpu, mine())
            if found:
                say(f"another process uses GPU {gpu}: {', '.join(found)}; times may be off")
            self._closed.wait(_EVERY)


def asked(*arguments: str) -> list[str] | None:
    """The lines that nvidia-smi answers; None where it cannot be asked."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
