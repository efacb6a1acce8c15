"""Files of results, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file beside `path`, in folders that are made where they lack, and then gives it that name.

    What was there stays where that fails, with an OSError. A device such as /dev/stdout is written to.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    path = path.resolve()  # of a link, what it leads to
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
