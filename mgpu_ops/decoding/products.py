"""The products of decoding_layer: their sizes, how they are cut into units, and where their counters lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mgpu_ops.core import limits
from mgpu_ops.core.gpu import Gpu

COLUMNS = 64  # of a tile of weights: rows of wgmma, which computes the transposed product
MOST_ROWS = 64  # with more, the rows that each block loads are as many bytes as its weights
_MULTIPLE = 128  # of which all dimensions but rows are one
_MIN_BYTES = 1 << 16  # of a tile of a part of k


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the products are cut.

    rows: padded, as columns of wgmma. tiles: of weights in a step of the pipeline, each of which one consumer multiplies. step:
    of k. stages: of the pipeline.
    """

    rows: int
    tiles: int
    step: int
    stages: int

    @staticmethod
    def of(count: int, gpu: Gpu, tiles: int = 2) -> Cut:
        """For so many rows: as many stages as there is shared memory for."""
        rows, step = -(-count // 8) * 8, 256 // tiles
        stage = 2 * step * (tiles * COLUMNS + rows)
        fixed = 2 * tiles * rows * COLUMNS + 4352  # the buffers of results; tickets and barriers, with what aligns them
        return Cut(rows, tiles, step, (gpu.smem_per_block - fixed) // stage)


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the products. n: columns of its result; gated: of activation(gate) * up, whose weights have 2 n columns.

    parts: of k, which blocks compute apart.
    """

    cut: Cut
    k: int
    n: int
    parts: int = 1
    gated: bool = False
    normalised: bool = False

    @property
    def stored(self) -> int:
        """Tiles of the result, that the consumers of a unit store."""
        return self.cut.tiles // (2 if self.gated else 1)

    @property
    def columns(self) -> int:
        """Of the result, that a unit computes."""
        return self.stored * COLUMNS

    @property
    def groups(self) -> int:
        """Of so many columns."""
        return self.n // self.columns

    @property
    def units(self) -> int:
        """Groups of columns, in parts of k."""
        return self.groups * self.parts

    @property
    def steps(self) -> int:
        """Of the pipeline, of a unit."""
        return self.k // self.cut.step // self.parts


@dataclasses.dataclass(frozen=True)
class Counters:
    """Where a product's counters lie among all: of finished tiles in each chunk of the result, of which the next product reads
    one a part of k; of finished parts of each tile; of rows whose factor is found.
    """

    done: int
    chunks: int
    tickets: int
    normed: int
    end: int


def products_of(cut: Cut, attended: Any, weights: Sequence[Any], next_normalised: bool, blocks: int) -> tuple[Product, ...]:
    """Of arrays, or their shapes."""
    width, hidden = weights[0].shape[1], weights[2].shape[0]
    out = _in_parts(Product(cut, attended.shape[1], width), attended.shape[1] // COLUMNS, blocks)
    gate = Product(cut, width, hidden, gated=True, normalised=True)
    down = _in_parts(Product(cut, hidden, width), gate.groups, blocks)
    if len(weights) == 3:
        return out, gate, down
    after = Product(cut, width, weights[3].shape[1], normalised=next_normalised)
    return out, gate, down, _in_parts(after, down.groups, blocks)


def _in_parts(one: Product, groups: int, blocks: int) -> Product:
    """In as many parts of k as there are blocks for, each of which reads whole groups of the product before."""
    parts = 1
    while (
        one.groups * parts * 2 <= blocks
        and groups % (parts * 2) == 0
        and one.steps % (parts * 2) == 0
        and one.k // (parts * 2) * COLUMNS * 2 >= _MIN_BYTES
    ):
        parts *= 2
    return dataclasses.replace(one, parts=parts)


def counters_of(products: Sequence[Product]) -> list[Counters]:
    """Of each product."""
    found: list[Counters] = []
    for i, product in enumerate(products):
        start = found[-1].end if found else 0
        chunks = products[i + 1].parts if i + 1 < len(products) else 1
        tickets = start + chunks
        normed = tickets + product.cut.tiles * product.groups
        found.append(Counters(start, chunks, tickets, normed, normed + 1))
    return found


def supports(attended: Any, x: Any, weights: Sequence[Any], gpu: Gpu) -> str | None:
    """Why the kernel cannot run on `gpu`, or None."""
    if reason := limits.supports_dtypes(x.dtype.name, x.dtype.name, gpu):
        return reason
    if not 0 < len(x) <= MOST_ROWS:
        return f"{len(x)} rows: 1 to {MOST_ROWS}"
    for what, size in (("width", x.shape[1]), ("w_out's rows", attended.shape[1]), ("w_down's rows", weights[2].shape[0])):
        if size % _MULTIPLE or not size:
            return f"{what} are {size}: a multiple of {_MULTIPLE}"
    if len(weights) > 3 and (weights[3].shape[1] % _MULTIPLE or not weights[3].shape[1]):
        return f"w_next has {weights[3].shape[1]} columns: a multiple of {_MULTIPLE}"
    if max(weight.size for weight in weights) >= 2**31:
        return "a weight has 2^31 elements or more"
    return None
