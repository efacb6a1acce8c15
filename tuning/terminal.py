"""Text of others on a terminal, in a page or in a picture: names from files, the environment and storages, reasons of faults.

It is shown as it is: no part of it is markup, an escape sequence or a line of its own.
"""

from __future__ import annotations

import os
from typing import Any


def printable(text: object) -> str:
    r"""The text on one line. What does not print is escaped as Python does: ESC is \x1b, the end of a line \n."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int, one: str, several: str | None = None) -> str:
    """ "1 fault", "2 faults"; `several` is the plural that takes more than an s."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def brief(error: BaseException) -> str:
    """An exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:300]}".rstrip(": ")


def console(**options: Any) -> Any:
    """Rich's console, in which every text of a table is `printable` and none is markup; a `rich.text.Text` keeps its style."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(printable(text), **how | {"markup": False, "emoji": False, "highlight": False})

        def on_broken_pipe(self) -> None:
            """The reader has gone, as `head` does: what is left to do is done all the same, and rich would end the process."""
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    return Plain(**options)
