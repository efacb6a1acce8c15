"""How the columns of a head lie in shared memory: in panels, whose rows are as wide as a swizzle.

TMA and wgmma take tiles with rows of 128, 64 or 32 bytes: 64, 32 or 16 columns of 16 bits, a *panel*. Where a product adds up a
head's columns (the scores), panels may differ in width, and wide ones take fewer copies: a head of 96 columns is a part of one
panel of 64 and a part of one of 32. Where they are a product's columns (weights times values, gradients), it is three panels of
32: a wgmma takes panels of one width, and two with fewer columns each would cost nearly as much as one. A head dim that is no
multiple of 16 is computed as the next in `HEAD_DIMS`, with zeros that TMA or XLA adds.
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
    def swizzle(self) -> int:
        """Bytes of a panel's row."""
        return 2 * self.panel

    @property
    def anywhere(self) -> bool:
        """Whether a head may begin elsewhere than at a multiple of a panel."""
        return self.head_dim % self.panel != 0

    def name(self, array: str) -> str:
        """Of the part's buffer: "k" of the first part, "k1" of the second."""
        return f"{array}{self.number}" if self.number else array

    def __getitem__(self, panel: int) -> slice:
        """The columns of one panel, within the part."""
        return slice(panel * self.panel, (panel + 1) * self.panel)

    def column(self, panel: int) -> int:
        """The first column of one panel, within the head."""
        return self.first + panel * self.panel


@functools.cache
def whole(head_dim: int) -> Part:
    """A whole head, a multiple of 16 columns, in panels of one width."""
    width = min(PANEL, head_dim & -head_dim)  # the largest power of two that divides it
    return Part(0, head_dim, 0, width, head_dim // width)


@functools.cache
def parts(head_dim: int) -> tuple[Part, ...]:
    """Of queries and keys of the forward kernel: panels of 64, and the rest in panels of one width, where that was measured."""
    if head_dim not in (80, 96, 112, 160):
        return (whole(head_dim),)
    rest = head_dim % PANEL
    columns, width = head_dim - rest, rest & -rest
    return Part(0, head_dim, 0, PANEL, columns // PANEL), Part(1, head_dim, columns, width, rest // width)


def panels(found: tuple[Part, ...]) -> tuple[tuple[Part, int], ...]:
    """All panels of some parts, in order: (part, which panel of it)."""
    return tuple((part, panel) for part in found for panel in range(part.panels))


def has_room(heads: int, size: int) -> bool:
    """Whether the kernels' copies can end with heads of `size` columns, where they compute more.

    TMA takes heads of whole 16 bytes; and Pallas no block that is wider than a row.
    """
    return size % 8 == 0 and heads * size >= PANEL


def rounded(head_dim: int) -> int:
    """The head dim that the forward kernel computes with: the next of `HEAD_DIMS`. (A larger one is refused: the last.)"""
    return next((d for d in HEAD_DIMS if d >= head_dim), HEAD_DIMS[-1])


def rounded_values(head_dim: int, v_head_dim: int) -> int:
    """The head dim of the values that it computes with beside this one of queries and keys.

    128 beside 192, as multi-head latent attention has them; otherwise as many as keys have. The output leaves from the place of
    the queries, panel by panel.
    """
    d = rounded(head_dim)
    return 128 if d == 192 and v_head_dim <= 128 else d


def backward_dim(head_dim: int, dq_step: str = "same") -> int:
    """The head dim of queries and values that the backward kernels compute with; `dq_step` of their config.

    With dq in the next step 64 or 128, so that 80, 96 and 112 are padded. Values have as many columns as keys: the kernels
    without this padding are right when interpreted, but were not compared on a GPU.
    """
    d = rounded(head_dim)
    return 128 if dq_step == "next" and 64 < d < 128 else d
