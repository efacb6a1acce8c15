"""A model of the time that XLA takes for a matmul: with cuBLAS or Triton, whichever its autotuner finds the faster.

Before that XLA may split k into parts, a batch of products whose results it adds up (`SplitkRewriter` in openxla/xla). Parts
are powers of two and begin at multiples of 16 bytes. Where k cannot be divided so, XLA copies both operands to arrays with a
longer k first, and that takes three times as long as the product itself. The kernel needs no such copy.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from mgpu_ops.core import gemm
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import DTYPES, LINE, itemsize_of
from mgpu_ops.matmul import algorithms, quantities
from mgpu_ops.matmul.model import alignments, slowdown
from mgpu_ops.matmul.problem import Problem
from mgpu_ops.matmul.quantities import bytes_moved

# Fitted to 1493 times on an H200 and an H100, of drawn problems, the suites and stored ones (docs/kernels/matmul.md).
_LAUNCH = 3.706e-6  # s
_SHORTER, _SHORT_K = 0.29e-6, 215  # s less, where k is short: few steps fill and drain a pipeline
# With fewer multiplications, one kernel without a pipeline: s, and more for each of k, up to as many as were timed. Of several
# rows a k of such multiples is faster; reductions of a batch are as they were. Fitted with the next to 224 drawn problems
# (results/2026-11-30-h200-matmul-small.jsonl.gz).
_TINY, _TINY_SECONDS, _TINY_OF_K, _TINY_K, _TINY_MOST_K, _TINY_REDUCTION = 2**20, 2e-6, 1.67e-9, 512, 4096, 2.4e-6
# s less, where there are few multiplications and bytes, and k is short: less still with one step of 64, and of more
# multiplications where steps are whole
_SMALL_SECONDS, _SMALL, _SMALL_BYTES, _SMALL_K = 1e-6, 12e6, 4e6, 400
_SMALL_STEP, _SMALL_ONE_STEP, _SMALL_WHOLE, _SMALL_WHOLE_SECONDS = 64, 0.5e-6, 15e7, 0.8e-6
# One row by B's rows is a reduction: s, and of HBM's rate. With a long k and so many bytes it is no fast one.
_REDUCTION_LAUNCH, _REDUCTION_MEMORY = 1.4e-6, 0.875
_REDUCTION_LONG_K, _REDUCTION_LONG_BYTES = 4096, 17e6
_RATE = 0.8464  # of the datasheet's FLOP/s
# With operands of 8 bits: s more, and of the datasheet's FLOP/s. Fitted to 34 problems of FP8 and 25 of int8 on an H200.
_LAUNCH_FP8, _RATE_FP8 = 4.63e-6, 0.77
_LAUNCH_INT8, _RATE_INT8, _RATE_INT8_SCALED = 0.65e-6, 0.726, 0.56
# cuBLAS takes FP8 in multiples of 16 rows: XLA pads A with rows of zeros and cuts the result, in so many times HBM's time.
_FP8_ROWS, _FP8_PADDED = 16, 1.945
_LAUNCH_PARTS = 28e-6  # s more where Triton multiplies parts of float32,
_TILES_PARTS = ((256, 128, 1.0), (128, 128, 0.7))
_RATES = {  # of the datasheet's FLOP/s of 16 bits, by the algorithm of float32; fitted to five sizes (docs/kernels/matmul.md)
    "tf32": 0.435,
    "tf32_x3": 0.11,
    "bf16": 0.87,
    "bf16_x3": 0.207,
    "float32": 0.054,
}
_RATE_OF_BLOCKS = 0.5  # and of that of 16 bits where blocks have scales: each by one product (docs/kernels/matmul.md)
_MEMORY = 0.9683  # of HBM's rate,
_ACROSS_LINES = 1.091  # and times as long for an operand whose rows do not all begin at lines
_STORE = 0.436e-6  # s for the first loads and the store of a tile of 128 x 128,
# and times as much for one of a further wave, whose loads run beside the store before: where rows of C begin at lines, or not
_STORE_ALIGNED, _STORE_OTHERS = 1.0, 1.93
_NORM = 4.315  # arithmetic and HBM overlap (`gemm.together`)
_SIDES = range(64, 257, 16)  # of tiles of 16 bits, one of them a multiple of 64
_SMALLER = 0.0585  # times as much less than 128 x 128 a tile multiplies for each element that it loads, it is slower
_ODD = 0.939  # of the rate is left where one of them is not
_TILES = tuple(  # rows, columns, and what is left of the rate
    (rows, columns, (_ODD if rows % 64 or columns % 64 else 1.0) / (1.0 + _SMALLER * (128 / rows + 128 / columns - 2.0)))
    for rows, columns in itertools.product(_SIDES, _SIDES)
    if rows * columns <= 256 * 192 and (rows % 64 == 0 or columns % 64 == 0)
)
_TILES_OTHERS = ((128, 128, 1.0), (64, 128, 1.0), (64, 64, 0.95))  # of other dtypes
_SUM_LAUNCH = 0.2e-6  # s of the kernel that adds up the parts of k, and the residual, after the product
_OF_PARTS = {"n": 0.847, "t": 0.971}  # times as long takes the arithmetic of parts of k, where B is stored [k, n] or [n, k]
_SUM_BYTES_PER_CLOCK = 16.6  # of each SM, at which float32 parts are written to L2 and read
# Where k has one part: the residual's bytes at HBM's rate, times as long, and s of a kernel that adds it to few rows
_ADD_READ, _ADD_LAUNCH, _ADD_ROWS = 1.25, 2.5e-6, 64
# s of a kernel that reads the product and writes its activation, of HBM's rate, and clocks of an SM for an element, of those
# that take longer; of few elements the product's own kernel computes it
_ACTIVATE_LAUNCH, _ACTIVATE_RATE = 3.4e-6, 0.71
_ACTIVATE_CLOCKS = {"gelu": 0.35, "gelu_erf": 0.67}
_ACTIVATE_APART = 2**20
_NORMALISED, _NORMALISED_RATE = 2.5e-6, 0.47  # s of the kernels that normalise rows, and of HBM's rate at which they do
_PAD_LAUNCH = 1.17e-6  # s of a kernel that copies an operand to an array with a longer k,
_PAD_TIMES = 1.04  # times the operand's bytes at HBM's rate,
_PAD_BYTES_PER_CLOCK = 9.0  # and of each SM, at which it goes to L2 and from there to the product

# When XLA splits k: the costs that its heuristic has for Hopper, in units of its own (`ChooseSplitK` in openxla/xla). Of 457
# problems compiled by jax 0.11.2 for an H200, it predicts the parts of all.
_SPLIT_TILE = 128  # rows and columns
_SPLIT_FLOP, _SPLIT_BYTE = 100.0, 0.194136  # of a tile's arithmetic, of a wave; and of what is read and written
_SPLIT_SUM, _SPLIT_SUM_BYTE = 4.36e7, 193.1384  # of a kernel that adds up parts, and of each byte that it reads and writes
_SPLIT_FLOPS = {"tf32_x3": 12, "bf16_x3": 12, "bf16_x6": 20, "bf16_x9": 28}  # for each element, by algorithm; else 2
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
_ALIGNED = 8  # elements of 16 bits in 16 bytes


def cost(problem: Problem, gpu: Gpu) -> float:
    """Modelled time of XLA in seconds, |...| as in `model.cost`.

    time = launch + |waves * tile, HBM bytes / HBM rate| of the best tile, + sum of the parts of k, + activation, + residual;
    with a k that must be padded, + the copies of both operands. Of a tiny product 2 us and more for each of k, of one row by
    B's rows 1.4 us and B's bytes.
    """
    if _is_fast_reduction(problem):
        return _REDUCTION_LAUNCH + bytes_moved(problem) / (_REDUCTION_MEMORY * gpu.memory_bytes_per_s)
    if problem.dtype in DTYPES and problem.batch * problem.m * problem.n * problem.k < _TINY:
        if _is_reduction(problem):
            return _TINY_REDUCTION
        slow = problem.m == 1 or problem.k % _TINY_K
        return _TINY_SECONDS + (_TINY_OF_K * min(problem.k, _TINY_MOST_K) if slow else 0.0)
    p, parts, algorithm = problem, split_k(problem, gpu), algorithms.of_xla(problem.algorithm, problem.m, problem.n)
    added = 0.0 if parts > 1 else _activated(p, gpu)
    if p.residual:
        if parts == 1:  # the product's kernel reads it, or that of the activation; of few rows a kernel of its own
            added += _ADD_READ * p.batch * p.m * p.n * itemsize_of(p.out_dtype) / gpu.memory_bytes_per_s
            added += _ADD_LAUNCH * (p.batch * p.m < _ADD_ROWS)
        p = replace(p, residual=False)
    aligned = _ALIGNED if p.dtype != "float32" else _ALIGNED // 2
    padded = p.k % (aligned * parts) and not _is_reduction(p)
    memory = bytes_moved(p) / gpu.memory_bytes_per_s if padded else _memory(p, gpu)
    clocks = gpu.sms * gpu.clock_hz  # of all SMs, in a second
    if parts > 1:
        added += _SUM_LAUNCH + 2 * 4 * parts * p.batch * p.m * p.n / (_SUM_BYTES_PER_CLOCK * clocks)
    tiles = _TILES_PARTS if algorithm == "bf16_x3" else _TILES if p.dtype in DTYPES else _TILES_OTHERS
    arithmetic = min(_arithmetic(p, parts, rows, columns, left, gpu) for rows, columns, left in tiles)
    arithmetic = slowdown(arithmetic) * (_OF_PARTS[p.layout[1]] if parts > 1 else 1.0)
    seconds = gemm.together(_NORM, arithmetic, memory / _MEMORY) + _widening(p, gpu)
    if padded:
        operands = p.batch * (p.m + p.n) * p.k * itemsize_of(p.dtype)
        seconds += 2 * _PAD_LAUNCH + operands * (_PAD_TIMES / gpu.memory_bytes_per_s + 1 / (_PAD_BYTES_PER_CLOCK * clocks))
    if p.normalised:
        read_and_written = 2 * p.batch * p.m * p.k * itemsize_of(p.dtype)
        seconds += _NORMALISED + read_and_written / (_NORMALISED_RATE * gpu.memory_bytes_per_s)
    launch = _LAUNCH - _SHORTER * math.exp(-p.k / _SHORT_K)
    if itemsize_of(p.dtype) == 1 and p.scales != "block":
        launch += _LAUNCH_INT8 if p.dtype == "int8" else _LAUNCH_FP8 + _padding_rows(p, gpu)
    if p.dtype in DTYPES and bytes_moved(p) < _SMALL_BYTES and p.k < _SMALL_K:
        launch -= _saved(p)
    return launch + _LAUNCH_PARTS * (algorithm == "bf16_x3") + seconds + added


def _is_reduction(p: Problem) -> bool:
    """Whether XLA has a reduction of B's rows for it, no product."""
    return p.m == 1 and p.layout[1] == "t"


def _is_fast_reduction(p: Problem) -> bool:
    """Whether it is one that reads B nearly at HBM's rate. Epilogues were not timed: XLA fuses them with a reduction."""
    alone = p.batch == 1 and not p.normalised
    slow = p.k > _REDUCTION_LONG_K and bytes_moved(p) >= _REDUCTION_LONG_BYTES
    return _is_reduction(p) and alone and p.dtype in DTYPES and not slow


def _saved(p: Problem) -> float:
    """Seconds that a small product with a short k takes less than the others of its kind."""
    multiplied = p.batch * p.m * p.n * p.k
    less = _SMALL_ONE_STEP if p.k <= _SMALL_STEP else 0.0
    if multiplied < _SMALL:
        return _SMALL_SECONDS + less
    whole = p.k % _SMALL_STEP == 0 and multiplied < _SMALL_WHOLE
    return _SMALL_WHOLE_SECONDS + less if whole else 0.0


def _activated(p: Problem, gpu: Gpu) -> float:
    """Seconds of the kernel that computes the activation of a product: 0 where the product's own does."""
    elements = p.batch * p.m * p.n
    if p.activation == "none" or elements < _ACTIVATE_APART:
        return 0.0
    moved = 2 * elements * itemsize_of(p.out_dtype) / (_ACTIVATE_RATE * gpu.memory_bytes_per_s)
    computed = _ACTIVATE_CLOCKS.get(p.activation, 0.0) * elements / (gpu.sms * gpu.clock_hz)
    return _ACTIVATE_LAUNCH + max(moved, computed)


# Operations, and the shortest of all sides, of a large product: of 142 measured ones the models' ratio of kernel to XLA is
# wrong by more than 6.7 % one in twenty times (results/2026-11-27-matmul-large-ratios.txt).
# With a long k, and of the output's sides: of 89 measured ones the models give 13 to the kernel with the margin of these, at
# worst at 0.982x of XLA. With a k of 2048 to 2560 five were at 0.953 to 1.036x; with an activation one was at 1.144x.
_LARGE, _LARGE_SIDE = 50e9, 512
_LONG_K, _LONG_K_ACTIVATED, _LARGE_OF_LONG, _SIDE_OF_LONG = 2560, 2048, 5e9, 128
# With a residual and so many operations: of 40 measured products none that the kernel gets then was slower than 0.97x of XLA
# (results/2026-11-29-h200-matmul-residual-drawn.jsonl.gz, and those of `other-models`).
_LARGE_WITH_RESIDUAL, _MARGIN_OF_RESIDUAL = 1e10, 0.96
_MARGIN_INT8 = 0.96
_MARGIN_INT32 = 0.8  # of large products of int8 with sums as they are: XLA was 2 and 4 % faster in two of four
# A product of few tiles: of 128 x 128, half a wave of an H200 at most, where XLA leaves SMs idle; and a long k. With the kernel
# modelled 6 to 14 % ahead it was faster in all that were measured, which had these rows and columns (docs/kernels/matmul.md).
_HALF_A_WAVE, _K_OF_FEW_TILES, _ROWS_OF_FEW_TILES, _COLUMNS_OF_FEW_TILES = 66, 1024, range(17, 513), 256

# Few rows by matrices whose sides are multiples of 64, as models have them. Where these or k's parts are no powers of two, XLA
# takes up to 1.7 times as long as modelled. Of 96 drawn and chosen products the models give 68 to the kernel with these
# margins, at worst at 0.971x of XLA (results/2026-11-30-h200-matmul-decoding.jsonl.gz). With a short k, or 1 to 15 rows and
# more than half a wave of tiles, it was at down to 0.912x; XLA reduces one row by B's rows faster than modelled, once 0.712x.
_ROWS_OF_DECODING, _UNIT_OF_DECODING, _SIDE_OF_DECODING = 65, 64, 1024
_MANY_ROWS, _MARGIN_OF_SHORT_K, _K_OF_MANY_ROWS = 16, 0.97, 4096
_K_OF_FEW_ROWS, _MARGIN_OF_FEW_ROWS_BY_T = 2560, 0.94
# Few rows by small matrices [k, n], such as a router's. One row XLA reduces in two kernels: in 25 problems of 8 to 3712 columns
# and a k from 232 on the kernel was 1.10 to 3.91 times as fast, and is modelled to take 0.34 to 1.06 of XLA's time. Of more
# rows and the smallest matrices, with a k that is a multiple of `_TINY_K`, XLA takes 0.7 to 0.84 of what is modelled: with the
# usual margin 4 x 128 x 2048 was at 0.847x. With another k none of 16 that the kernel gets by it was below 1.1x
# (results/2026-11-30-h200-matmul-routers.jsonl, -small.jsonl.gz, -small-drawn.jsonl).
_COLUMNS_OF_A_ROW, _K_OF_A_ROW, _MARGIN_OF_A_ROW = 3712, range(232, 7297), 1.1
_SMALL_MATRIX, _MARGIN_OF_SMALL_MATRIX = 2**18, 0.7
# One row by B's rows, a reduction that is no fast one: in seven of 21 to 87 MB the kernel was 1.07 to 3.16 times as fast, and
# is modelled to take 0.92 to 1.02 of XLA's time.
_MARGIN_OF_SLOW_REDUCTION = 1.05
# A short k, many rows and few operations: stores take most of the time, and longer than modelled. Of eight, modelled 12 to 17 %
# ahead, the kernel was slower in seven, at worst 0.87x (-small.jsonl.gz, -small-drawn.jsonl).
_STORED_K, _STORED_ROWS, _STORED_COLUMNS, _STORED, _MARGIN_OF_STORES = 448, 1536, 200, 4e9, 0.78


def margin(problem: Problem) -> float:
    """How much of XLA's modelled time the kernel may take by its model to run.

    Of 16 bits the models are wrong by 3 and 4 % in the median, and one in twenty times by more than 15 %; of large products by
    less. Of 98 problems of 8 bits XLA was faster in two, of int8, by 2 and 4 %; with FP8 it took 11 % longer at least. XLA's
    model is wrong by more than that there, the kernel's is not.
    """
    p = problem
    if itemsize_of(p.dtype) == 1 and p.scales != "block":
        large_sums = p.out_dtype == "int32" and min(p.m, p.n, p.k) >= _LARGE_SIDE
        return (_MARGIN_INT32 if large_sums else _MARGIN_INT8) if p.dtype == "int8" else 1.0
    if p.dtype not in DTYPES:
        return 0.91
    if p.residual and min(p.m, p.n, p.k) >= _LARGE_SIDE and quantities.flops(p) >= _LARGE_WITH_RESIDUAL:
        # Sides that let stores be deferred are those of models, whose residual has other uses: there XLA adds it in a kernel
        # of its own, which this model of a product alone leaves out.
        return 1.0 if p.m % 8 == 0 and p.n % gemm.ROWS == 0 else _MARGIN_OF_RESIDUAL
    if _is_of_few_rows(p) and p.layout == "nn":
        if p.m == 1 and p.n <= _COLUMNS_OF_A_ROW and p.k in _K_OF_A_ROW and not (p.residual or p.bias):
            return _MARGIN_OF_A_ROW
        if p.m > 1 and p.n * p.k <= _SMALL_MATRIX and p.k % _TINY_K == 0:
            return _MARGIN_OF_SMALL_MATRIX
    if _is_reduction(p) and _is_of_few_rows(p) and not _is_fast_reduction(p) and not (p.residual or p.bias):
        return _MARGIN_OF_SLOW_REDUCTION
    if _is_decoding(p):
        if p.m >= _MANY_ROWS:
            return 1.0 if p.k >= _K_OF_MANY_ROWS else _MARGIN_OF_SHORT_K
        if math.ceil(p.n / 128) <= _HALF_A_WAVE and p.k >= _K_OF_FEW_ROWS and not _is_reduction(p):
            return 1.0 if p.layout[1] == "n" else _MARGIN_OF_FEW_ROWS_BY_T
    tall = p.m >= _STORED_ROWS and p.n >= _STORED_COLUMNS and p.batch == 1
    if tall and p.k <= _STORED_K and quantities.flops(p) <= _STORED:
        return _MARGIN_OF_STORES
    large = min(p.m, p.n, p.k) >= _LARGE_SIDE and quantities.flops(p) >= _LARGE
    long = p.k >= (_LONG_K if p.activation == "none" else _LONG_K_ACTIVATED)
    large_of_long = long and min(p.m, p.n) >= _SIDE_OF_LONG and quantities.flops(p) >= _LARGE_OF_LONG
    return 0.94 if large or large_of_long or _has_few_tiles(p) else 0.86


def _is_of_few_rows(p: Problem) -> bool:
    """What else was not measured is left out."""
    return p.batch == 1 and p.activation == "none" and not p.normalised and p.layout[0] == "n" and p.m < _ROWS_OF_DECODING


def _is_decoding(p: Problem) -> bool:
    """Few rows by a matrix of a model."""
    if not _is_of_few_rows(p):
        return False
    return min(p.n, p.k) >= _SIDE_OF_DECODING and p.n % _UNIT_OF_DECODING == p.k % _UNIT_OF_DECODING == 0


def _has_few_tiles(p: Problem) -> bool:
    if p.batch != 1 or p.activation != "none" or p.normalised:  # none was measured
        return False
    tiles = math.ceil(p.m / 128) * math.ceil(p.n / 128)
    sides = p.m in _ROWS_OF_FEW_TILES and p.n >= _COLUMNS_OF_FEW_TILES and p.k >= _K_OF_FEW_TILES
    return tiles <= _HALF_A_WAVE and sides


# Operations from which a product that runs for seconds is at the power cap. There, on an H200, the default took 0.975 to 1.012
# of XLA's time in 14 products with A along k and no residual, 0.991 in the mean, which the models have at 0.986 to 1.044; in
# nine others it took 0.994 to 1.017 (docs/kernels/matmul.md).
_AT_THE_CAP, _MARGIN_AT_THE_CAP = 2e11, 1.05


def sustained_margin(problem: Problem) -> float:
    """`margin`, but for products that a program multiplies at the power cap: the kernel takes less energy there."""
    p = problem
    at_the_cap = min(p.m, p.n, p.k) >= _LARGE_SIDE and quantities.flops(p) >= _AT_THE_CAP
    if at_the_cap and p.dtype in DTYPES and p.layout[0] == "n" and not p.residual:
        return _MARGIN_AT_THE_CAP
    return margin(p)


def _memory(p: Problem, gpu: Gpu) -> float:
    """The time of HBM at its whole rate. Of an operand whose rows do not all begin at lines it is longer."""
    operands = zip(alignments(p), (p.m, p.n))
    across = sum(rows * p.k for aligned, rows in operands if aligned < LINE)
    return (bytes_moved(p) + (_ACROSS_LINES - 1.0) * p.batch * across * itemsize_of(p.dtype)) / gpu.memory_bytes_per_s


def _arithmetic(p: Problem, parts: int, rows: int, columns: int, left: float, gpu: Gpu) -> float:
    """The time of all waves of output tiles of one size."""
    waves = math.ceil(p.batch * parts * math.ceil(p.m / rows) * math.ceil(p.n / columns) / gpu.sms)
    flops = 2 * rows * columns * 64 * math.ceil(math.ceil(p.k / 64) / parts)
    area = rows * columns / 128**2
    rate = _RATE * gpu.bf16_flops
    if itemsize_of(p.dtype) == 1:
        of_int8 = _RATE_INT8 if p.scales == "none" else _RATE_INT8_SCALED
        rate = (of_int8 if p.dtype == "int8" else _RATE_FP8) * gpu.flops(p.dtype)
    algorithm = algorithms.of_xla(p.algorithm, p.m, p.n)
    if algorithm in _RATES:
        rate = _RATES[algorithm] * gpu.bf16_flops
    if p.scales == "block":  # of float32 numbers, rounded to tf32
        rate = _RATE_OF_BLOCKS * gpu.bf16_flops
    further = _STORE_ALIGNED if p.n * itemsize_of(p.out_dtype) % LINE == 0 else _STORE_OTHERS
    return waves * flops * gpu.sms / (left * rate) + _STORE * area * (1 + further * (waves - 1))


def _padding_rows(p: Problem, gpu: Gpu) -> float:
    """Seconds in which XLA pads A of 8-bit floats, and cuts the result, to the rows that there are."""
    if p.m % _FP8_ROWS == 0:
        return 0.0
    moved = 2 * p.batch * p.m * (p.k + p.n * itemsize_of(p.out_dtype))
    return _FP8_PADDED * moved / gpu.memory_bytes_per_s


def _widening(p: Problem, gpu: Gpu) -> float:
    """The time of kernels that scale operands before the product: with scales of blocks, to float32 in memory and back."""
    if p.scales != "block":
        return 0.0
    return p.batch * (p.m + p.n) * p.k * (itemsize_of(p.dtype) + 2 * 4) / (_MEMORY * gpu.memory_bytes_per_s)


def split_k(problem: Problem, gpu: Gpu) -> int:
    """Into how many parts XLA splits k: it weighs a GPU full of shorter tiles against adding up the parts."""
    p = problem
    rows, columns = min(p.m, _SPLIT_TILE), min(p.n, _SPLIT_TILE)
    tiles = p.batch * math.ceil(p.m / _SPLIT_TILE) * math.ceil(p.n / _SPLIT_TILE)
    at_once = gpu.sms * _SPLIT_TILE**2 / (rows * columns)
    flops = _SPLIT_FLOPS.get(algorithms.of_xla(p.algorithm, p.m, p.n), 2)
    read, out = p.batch * (p.m + p.n) * p.k * itemsize_of(p.dtype), p.batch * p.m * p.n

    def seconds(parts: int) -> float:  # in units of its own
        k = math.ceil(p.k / parts)
        arithmetic = _SPLIT_FLOP * flops * rows * columns * k * max(1.0, tiles * parts / at_once)
        if parts == 1:
            return max(arithmetic, _SPLIT_BYTE * (read + out * itemsize_of(p.out_dtype)))
        added = _SPLIT_SUM_BYTE * out * (4 * parts + itemsize_of(p.out_dtype))
        return max(arithmetic, _SPLIT_BYTE * (read + 4 * parts * out)) + _SPLIT_SUM + added

    return min(_SPLITS, key=seconds)
