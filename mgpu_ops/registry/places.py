"""Whether a file or a folder can be written, asked before the work whose results go there. Asking leaves nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def file_fault(path: Path) -> str | None:
    """Why a file cannot be written there, in a folder that is there or can be made; None where it can."""
    try:
        if path.is_dir():
            return os.strerror(errno.EISDIR)
        if path.is_file():
            path.open("ab").close()
            return None
        return None if path.exists() else folder_fault(path.parent)  # a pipe, /dev/stdout
    except OSError as error:
        return error.strerror or str(error)


def folder_fault(path: Path) -> str | None:
    """Why no file can be made in a folder that is there or can be made; None where one can."""
    try:
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            return f"{path}: {os.strerror(errno.ENOTDIR)}"
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
