"""How the columns of a head lie in shared memory: in parts, whose swizzle rows are as wide as they divide the head.

TMA and wgmma take tiles with rows of 128, 64 or 32 bytes: 64, 32 or 16 columns of 16 bits, a *panel*. A head of 96 columns is
one panel of 64 and one of 32; one of 160 is two of 64 and one of 32. Each product of a head then has as many wgmma as parts or
panels, and none of them multiplies zeros. A head dim that is no multiple of 16 is padded to the next in `HEAD_DIMS`.
"""

from __future__ import annotations

import dataclasses
import functools

PANEL = 64  # 16-bit elements of a row of a 128-byte swizzle
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256)  # that the kernels compute as they are


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns [first, first + panels * panel) of a head, in panels of one width: a buffer in shared memory."""

    number: int  # among the parts of the head
    head_dim: int  # columns of the whole head
    first: int
    panel: int  # 64, 32 or 16: 16-bit elements of a swizzle row
    panels: int

    @property
    def columns(self) -> int:
        return self.panel * self.panels

    @property
    def anywhere(self) -> bool:
        """Whether a head may begin elsewhere than at a multiple of PANEL."""
        return self.head_dim % PANEL != 0

    def name(self, array: str) -> str:
        """Of the part's buffer: "k" of the first part, "k1" of the second."""
        return f"{array}{self.number}" if self.number else array

    def __getitem__(self, panel: int) -> slice:
        """The columns of one panel, within the part."""
        return slice(panel * self.panel, (panel + 1) * self.panel)


@functools.cache
def parts(head_dim: int) -> tuple[Part, ...]:
    """Of a head dim, a multiple of 16: panels of 64, and what is left in panels as wide as divide it."""
    whole, rest = divmod(head_dim, PANEL)
    found = [Part(0, head_dim, 0, PANEL, whole)] if whole else []
    if rest:
        width = rest & -rest  # the largest power of two that divides it: 32 or 16
        found.append(Part(len(found), head_dim, whole * PANEL, width, rest // width))
    return tuple(found)


def rounded(head_dim: int) -> int:
    """The head dim that the forward kernel computes with: the next of `HEAD_DIMS`."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


def rounded_values(head_dim: int, v_head_dim: int) -> int:
    """The head dim of the values that it computes with beside this one of queries and keys.

    The output leaves from the place of the queries, panel by panel: it has their columns, or fewer, in panels of 64.
    """
    return min(rounded(head_dim), -(-v_head_dim // PANEL) * PANEL)
