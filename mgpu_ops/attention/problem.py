"""What attention is (`Problem`, `BackwardProblem`), and which configs can run it (`supports`, `check`).

Those of the backward kernels: `backward_check.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mgpu_ops import kv_cache
from mgpu_ops.attention.heads import HEAD_DIMS, PANEL, rounded, rounded_values
from mgpu_ops.core import limits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import MAX_SIZE, check_fields, itemsize_of, supports_dtypes, supports_sizes

# --- What is computed -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out = softmax(scale q k^T + bias, where visible) v for each head, of q[batch, q_tokens, q_heads, head_dim], k and v
    [batch, kv_tokens, kv_heads, head_dim]. Row t sees keys s with t + offset - window_left <= s <= t + offset + window_right.

    batch: sequences.
    q_tokens: queries of a sequence.
    kv_tokens: keys of a sequence.
    q_heads: heads of q, a multiple of kv_heads.
    kv_heads: heads of k and v.
    head_dim: numbers of a head of q and k, and of v without `v_head_dim`; up to 256 in the kernels.
    dtype: of q, k and v, "bfloat16" or "float16" in the kernels.
    kv_dtype: of k and v: "none", q's; or "float8_e4m3fn" or "int8", with a scale for each head.
    causal: whether a row sees no key after its own.
    window_left: keys before a row's own that it sees; -1: all.
    window_right: keys after a row's own that it sees; -1: all.
    align: the offset: "top_left", 0; or "bottom_right", kv_tokens - q_tokens: the last query sees the last key.
    lengths: whether each sequence has token counts of its own.
    segments: whether each token has an id, and sees its own segment only.
    bias: "none", or the dtype of an additive bias, "bfloat16", "float16" or "float32".
    soft_cap: whether scores go through cap tanh(score / cap), before the bias.
    soft_cap_after_bias: whether they do so after it; -inf in a bias still hides a key.
    sinks: whether each query head has a logit that counts in the sums of exponentials, as a key without a value.
    v_head_dim: numbers of a head of v and the output, where less than head_dim; 0: the same.
    page_size: tokens of a page of a paged cache, 16, 32, 64, 128 or 256; 0: no pages. k and v are then pools [pages, page_size,
      kv_heads, head_dim], and a table [batch, kv_tokens / page_size] says which of them hold a sequence's keys.
    """

    batch: int
    q_tokens: int
    kv_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    align: str = "bottom_right"
    lengths: bool = False
    segments: bool = False
    bias: str = "none"
    soft_cap: bool = False
    sinks: bool = False
    v_head_dim: int = 0
    page_size: int = 0
    soft_cap_after_bias: bool = False
    kv_dtype: str = "none"

    def __post_init__(self) -> None:
        check_fields(self, {"window_left": -1, "window_right": -1})
        if self.page_size and self.kv_tokens % self.page_size:
            whole = math.ceil(self.kv_tokens / self.page_size) * self.page_size
            raise ValueError(f"kv_tokens={self.kv_tokens} are no whole pages of page_size={self.page_size}: make them {whole}")

    @property
    def v_dim(self) -> int:
        """Columns of a head of v and of the output."""
        return self.v_head_dim or self.head_dim

    @property
    def eight_bits(self) -> bool:
        """Whether keys and values have 8 bits."""
        return self.kv_dtype != "none"

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a number of k and v."""
        return itemsize_of(self.kv_dtype if self.eight_bits else self.dtype)

    @property
    def left(self) -> int | None:
        """How many keys before its own position a row sees; None: all."""
        return None if self.window_left < 0 else self.window_left

    @property
    def right(self) -> int | None:
        """How many keys after its own position a row sees; None: all."""
        bounds = ([0] if self.causal else []) + ([] if self.window_right < 0 else [self.window_right])
        return min(bounds, default=None)

    @property
    def offset(self) -> int:
        """Row t is aligned with key t + offset, where lengths do not say otherwise."""
        return self.kv_tokens - self.q_tokens if self.align == "bottom_right" else 0

    def masks(self, tile_kv: int) -> bool:
        """Whether some row may not see all of some kv block, segments apart."""
        return self.left is not None or self.right is not None or self.lengths or self.kv_tokens % tile_kv != 0


@dataclasses.dataclass(frozen=True, order=True)
class BackwardProblem(Problem):
    """The gradients of a `Problem` with respect to q, k and v.

    deterministic: whether sums are taken in a fixed order, so that equal inputs give bitwise equal gradients.
    bias_grad: whether there is a gradient with respect to the bias too.
    """

    deterministic: bool = False
    bias_grad: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a thread block of the forward kernel works. Every field is tuned; none changes the answer.

    compute_warpgroups: consumer warpgroups, 1 to 3, with 64 query rows each; a producer warpgroup comes on top.
    tile_kv: keys of a kv block, which is one step of the loop: a multiple of 64 up to 256.
    max_concurrent_steps: stages of the pipelines of keys and of values, a kv block each, 2 to 16.
    q_slots: stages of the pipeline of queries: 1; 2, the next q block loads meanwhile; 3, it loads before, for few keys.
    section_waves: how often a section of heads fills the GPU, 1 to 1024. Sections run in turn, longest tiles first.
    memory_registers: registers of a producer thread, a multiple of 8 from 24 to 128; consumers share the rest.
    pv_wait: when weights times values are waited for: "late", after the softmax of the next kv block; "half", after half of its
      exponentials, and row sums are added up over a row's four threads once, at the end; or "early", where ptxas puts it.
    kv_splits: thread blocks that the keys of a head are split over, up to 256 (`decode.py`), for few query tokens; 0: no split.
      Only tile_kv, max_concurrent_steps (of keys; values have one less) and the next two can be chosen beside it.
    kv_cluster: how many of these blocks are a cluster and add up their outputs: 1, 2, 4, 8 or 16. A kernel adds the clusters'.
    kv_heads_per_tile: heads whose keys a block with `kv_splits` loads in one step: 1, or all of `Problem.kv_heads`, whose keys
      and values lie together in memory: a step then has tile_kv / kv_heads tokens. NaN or infinite values of one head then
      make NaN of all heads' outputs.
    turns: whether consumers take turns at starting the two products of a step: "products", or "none".
    rescale: when the output is multiplied by how much a row's weights shrink: "always", in each step; "conditional", by a warp,
      when the greatest score of one of its 16 rows has grown by more than a threshold (a factor of 256 in its weight).
    """

    compute_warpgroups: int
    tile_kv: int
    max_concurrent_steps: int
    q_slots: int
    section_waves: int
    memory_registers: int
    pv_wait: str
    kv_splits: int = 0
    kv_cluster: int = 1
    turns: str = "none"
    rescale: str = "always"
    kv_heads_per_tile: int = 1

    @property
    def tile_tokens(self) -> int:
        """Tokens of a kv block."""
        return self.tile_kv // self.kv_heads_per_tile


@dataclasses.dataclass(frozen=True, order=True)
class BackwardConfig:
    """How the backward kernels work. Every field is tuned; none changes the answer.

    mode: "fused", one kernel for all gradients, which adds to dq in global memory; or "split", one kernel for dk and dv and one
      for dq: seven matrix products instead of five, but no atomic sums.
    tile_q: query rows of a q block in the dk/dv kernel, 64 or 128. (The dq kernel keeps 128 rows.)
    tile_kv: keys of a kv block in the dk/dv kernel, which a block keeps while q blocks go by. (In the dq kernel 64 keys go by.)
    max_concurrent_steps: stages of the pipeline of q blocks and their gradients, 1 to 16.
    section_waves: as in `Config`.
    memory_registers: as in `Config`.
    dq_step: when dq and dk of a q block are computed: in the "same" step as its scores, or in the "next", while another q
      block's scores become weights. "next": mode "fused", head dims up to 128, computed as 64 or 128, no bias or soft cap.
      `deterministic` takes it in mode "fused": thread blocks take turns at adding to dq.
    q_order: with dq_step "next", how the blocks of a head go through its q blocks: "together", from the last one on; or
      "apart", so that they add to different rows of dq.
    dk_operand: with dq_step "next", where dk's product takes dS from: shared "memory", or "registers".
    group_splits: parts that the query heads of a head of keys are shared out in, 1 to their number, equal or one head apart; dk
      and dv of the parts, in the inputs' dtype, are added up afterwards.
    kv_slots: with dq_step "next", kv blocks in shared memory, 1 or 2: with 2, the next one's keys and values load while this
      one's gradients leave.
    """

    mode: str
    tile_q: int
    tile_kv: int
    max_concurrent_steps: int
    section_waves: int
    memory_registers: int
    dq_step: str = "same"
    q_order: str = "together"
    dk_operand: str = "memory"
    group_splits: int = 1
    kv_slots: int = 1


# --- What can run ---------------------------------------------------------------------------------------------------

ROWS = 64  # of a consumer warpgroup: one wgmma writes 64 rows
EIGHT_BIT_HEAD_DIMS = (64, 128, 256)  # of keys and values of 8 bits; of 16 bits: `heads.HEAD_DIMS`
MAX_WINDOW_COLUMNS = 2**25 - 256  # a window's first column is written 64-fold where heads are no whole panels
MAX_ROWS = 2**28 - 256  # a window's first row is written eightfold, in 32 bits (core/tma.py)
PAGE_SIZES = (16, 32, 64, 128, 256)  # tokens: whole swizzle tiles, and such as tiles of keys divide or are divided by
MAX_WINDOW = 2**30  # keys: beyond, and with an offset added, they are no longer counted in 32 bits
BIASES = ("none", "bfloat16", "float16", "float32")


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernels can run `problem` on `gpu`, or None."""
    p = problem
    reason = supports_dtypes(p.dtype, p.dtype, gpu)
    if reason is not None:
        return reason
    if p.head_dim > HEAD_DIMS[-1]:
        return f"head_dim={p.head_dim} is more than {HEAD_DIMS[-1]}: use backend='xla'"
    reason = supports_sizes(p, ("batch", "q_tokens", "kv_tokens", "q_heads", "kv_heads", "head_dim"))
    if reason is not None:
        return reason
    if p.q_heads % p.kv_heads:
        return f"q_heads={p.q_heads} is no multiple of kv_heads={p.kv_heads}: repeat the keys and values"
    if p.align not in ("bottom_right", "top_left"):
        return f"align {p.align!r} is neither 'bottom_right' nor 'top_left'"
    if p.bias not in BIASES:
        return f"bias {p.bias!r} is not one of {', '.join(BIASES)}: cast it, or use backend='xla'"
    if p.soft_cap_after_bias and not (p.soft_cap and p.bias != "none"):
        return f"soft_cap_after_bias is for a soft cap and a bias, not soft_cap={p.soft_cap} and bias={p.bias!r}: leave it out"
    if p.eight_bits and (reason := reads_eight_bits(p)):
        return reason
    if p.page_size and (reason := _supports_pages(p, gpu)):
        return reason
    rows = p.batch * max(p.q_tokens * (p.q_heads if p.bias != "none" else 1), 0 if p.page_size else p.kv_tokens)
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}: split the batch, or use backend='xla'"
    if p.v_head_dim >= p.head_dim:
        return f"v_head_dim={p.v_head_dim} must be less than head_dim={p.head_dim}, or 0 for the same: pad q and k"
    if p.q_heads * rounded(p.head_dim) > MAX_WINDOW_COLUMNS and rounded(p.head_dim) % PANEL:
        return f"q_heads={p.q_heads} of {rounded(p.head_dim)} are rows of more than {MAX_WINDOW_COLUMNS}: use backend='xla'"
    if p.q_heads * (columns := stored_columns(p.head_dim)) > MAX_SIZE:
        return f"q_heads={p.q_heads} of {columns} are rows of more than {MAX_SIZE}: split them, or use backend='xla'"
    if p.batch * p.q_heads * p.q_tokens > MAX_SIZE:
        return f"{p.batch * p.q_heads} heads of {p.q_tokens} rows are more than the kernels count in 32 bits: split the batch"
    if max(p.window_left, p.window_right) > MAX_WINDOW:
        return f"a window of {max(p.window_left, p.window_right)} keys is more than {MAX_WINDOW}: leave it out"
    return None


def reads_eight_bits(problem: Problem) -> str | None:
    """Why no config can run a problem with keys and values of 8 bits, which then become q's dtype first; or None."""
    p = problem
    if p.kv_dtype not in kv_cache.DTYPES:
        return f"kv_dtype {p.kv_dtype!r} is not one of none, {', '.join(kv_cache.DTYPES)}: cast keys and values"
    if p.head_dim not in EIGHT_BIT_HEAD_DIMS or p.v_head_dim:
        return (
            f"kv_dtype={p.kv_dtype} is for a head_dim of {', '.join(map(str, EIGHT_BIT_HEAD_DIMS))} of keys and of values, not "
            f"{p.head_dim} and {p.v_dim}, as padding would copy them at each call: pad them once"
        )
    return splits_keys(p)


def _supports_pages(p: Problem, gpu: Gpu) -> str | None:
    """Why no config can run a problem with pages, or None. Rows of a pool are counted where it is known: `Arguments`."""
    if p.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"page_size={p.page_size} is not one of {sizes}: make pages of such a size, or use backend='xla'"
    if p.head_dim not in HEAD_DIMS:
        return (
            f"head_dim={p.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}, and to pad it would copy all pages "
            f"at each call: make pages of {rounded(p.head_dim)} columns, zeros at the end, or use backend='xla'"
        )
    if p.v_head_dim:
        return f"v_head_dim={p.v_head_dim} must be 0 with pages, as padding would copy them: pad values to {p.head_dim} columns"
    if reason := splits_keys(p):
        return reason
    if least_splits(p, gpu) is None:
        return (
            f"kv_tokens={p.kv_tokens} in pages of page_size={p.page_size}: the table is more than thread blocks can keep in "
            "shared memory; make larger pages, gather them, or use backend='xla'"
        )
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the forward kernel cannot run `problem` with `config` on `gpu`, or None."""
    reason = supports(problem, gpu)
    if reason is not None:
        return reason
    p, c = problem, config
    if c.kv_splits:
        return _check_split(p, c, gpu)
    if p.page_size:
        return "kv_splits=0 reads no pages: use kv_splits of 1 or more"
    if p.eight_bits:
        return f"kv_splits=0 reads no keys of kv_dtype={p.kv_dtype}: use kv_splits of 1 or more"
    if c.kv_cluster != 1:
        return f"kv_cluster={c.kv_cluster} must be 1 with kv_splits=0"
    if c.kv_heads_per_tile != 1:
        return f"kv_heads_per_tile={c.kv_heads_per_tile} must be 1 with kv_splits=0"
    if c.compute_warpgroups not in (1, 2, 3):
        return f"compute_warpgroups={c.compute_warpgroups} is not 1, 2 or 3"
    if c.tile_kv % PANEL or not PANEL <= c.tile_kv <= 256:
        return f"tile_kv={c.tile_kv} must be a multiple of {PANEL} (a swizzle row of keys) up to 256 (wgmma's N)"
    if not 2 <= c.max_concurrent_steps <= 16:
        return f"max_concurrent_steps={c.max_concurrent_steps} must be from 2 to 16: keys are copied a step ahead of values"
    if c.q_slots not in (1, 2, 3):
        return f"q_slots={c.q_slots} is not 1, 2 or 3"
    if not 1 <= c.section_waves <= 1024:
        return f"section_waves={c.section_waves} must be from 1 to 1024"
    if reason := limits.check_producer_registers(c.memory_registers):
        return reason
    if c.pv_wait not in ("early", "half", "late"):
        return f"pv_wait={c.pv_wait!r} is not 'early', 'half' or 'late'"
    if c.turns not in ("none", "products"):
        return f"turns={c.turns!r} is neither 'none' nor 'products'"
    if c.turns != "none" and c.compute_warpgroups == 1:
        return f"turns={c.turns!r} is for 2 or 3 compute_warpgroups, not 1: use 'none'"
    if c.rescale not in ("always", "conditional"):
        return f"rescale={c.rescale!r} is neither 'always' nor 'conditional'"
    # Scores, output and weights, of each of 128 threads.
    needed = c.tile_kv // 2 + rounded_values(p.head_dim, p.v_dim) // 2 + c.tile_kv // 4
    limit = limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)
    if needed + 24 > limit:
        return (
            f"scores, weights and output take {needed} registers a thread and addresses about 24 more, but {limit} are left: "
            "use a smaller tile_kv or fewer consumer warpgroups"
        )
    return limits.check_smem(smem_bytes(p, c, gpu), gpu)


ONE_WARPGROUP: dict[str, Any] = {
    "compute_warpgroups": 1,
    "q_slots": 1,
    "section_waves": 1,
    "memory_registers": 24,
    "pv_wait": "early",
    "turns": "none",
    "rescale": "always",
}
MAX_SPLITS = 256  # each is a term of the kernel that adds them up
KV_CLUSTERS = (1, 2, 4, 8, 16)
SPLIT_TILES_KV = (64, 128)
PAGE_INDICES_COPIED = 256  # at a time: the most elements of a TMA copy along a dimension
PORTABLE_CLUSTER = 8  # thread blocks that any Hopper GPU lets a cluster have, however large they are
PACKED_ROWS = 256  # of a head of keys: beyond, there are tiles enough without splitting keys


def split_stages(config: Config) -> tuple[int, int]:
    """Stages of the keys and of the values of a thread block of the kernel with `kv_splits`."""
    return config.max_concurrent_steps, config.max_concurrent_steps - 1


_FEW_WHOLE = 2  # kv blocks


def masks_all(problem: Problem, config: Config) -> bool:
    """Whether the forward kernel masks every kv block of an output tile, and goes over them in one loop.

    So it is with a window of few keys more than a tile has rows: all rows see few of its kv blocks whole.
    """
    p, c = problem, config
    if p.left is None or p.right is None:
        return False
    return p.left + p.right < ROWS * c.compute_warpgroups + _FEW_WHOLE * c.tile_kv


DEALT = 16  # output tiles of an SM: where there are more, short ones lie on all SMs
_LONG, _FEW_TILES = 8, 2  # kv blocks, and tiles of an SM: beginnings and ends of more and shorter tiles weigh


def output_tiles(problem: Problem, config: Config) -> int:
    """Output tiles of all heads, `ROWS` rows of queries a compute warpgroup each."""
    return problem.batch * problem.q_heads * math.ceil(problem.q_tokens / (ROWS * config.compute_warpgroups))


def deals_tiles(problem: Problem, config: Config, tiles: int, gpu: Gpu) -> bool:
    """Whether the forward kernel has as many thread blocks as output tiles: the GPU gives an SM the next one when it is idle.

    With lengths, and with segments, which tiles are short is known on the device only. With three consumers a kernel of that
    kind spills, and its products wait for each other.
    """
    p, c = problem, config
    unknown = p.segments or (p.lengths and p.left is None and p.right is None)
    few = tiles <= DEALT * gpu.sms and (p.kv_tokens >= _LONG * c.tile_kv or tiles <= _FEW_TILES * gpu.sms)
    return unknown and few and c.compute_warpgroups < 3


def splits_keys(problem: Problem) -> str | None:
    """Why no config with `kv_splits` can run `problem`, or None."""
    p = problem
    what, way_out = "kv_splits", "use kv_splits=0"
    if p.eight_bits:
        what, way_out = f"the kernel with kv_dtype={p.kv_dtype}", "cast keys and values to q's dtype, or use backend='xla'"
    if p.page_size:
        what, way_out = "the kernel with pages", "gather the pages, or use backend='xla'"
    if p.bias != "none" and (p.eight_bits or p.page_size):  # what a mask hides could not be ignored, were it NaN
        return f"{what} takes no bias, mask or segments: {way_out}"
    if p.segments:
        return f"{what} takes no segments: {way_out}"
    if p.bias != "none" and (size := p.batch * p.q_heads * p.q_tokens * p.kv_tokens) > MAX_SIZE:
        return f"{what} counts the elements of a bias in 32 bits, and {size} are too many: {way_out}"
    rows = p.q_tokens * (p.q_heads // p.kv_heads)
    if rows > PACKED_ROWS:
        return f"{what} is for {PACKED_ROWS} query tokens times query heads of a head of keys, not {rows}: {way_out}"
    if p.batch * p.q_tokens * p.q_heads * stored_columns(p.head_dim) > MAX_SIZE:
        return f"the output of {p.batch} batch entries has more elements than {what} counts in 32 bits: {way_out}"
    return None


def least_splits(problem: Problem, gpu: Gpu) -> int | None:
    """Over how many thread blocks the keys of a head are split at least, a power of two; None where no config does.

    One, but where pages are so many that the table of a block's share does not fit into shared memory.
    """
    powers = (2**i for i in range(MAX_SPLITS.bit_length()))
    smallest = (Config(tile_kv=64, max_concurrent_steps=2, kv_splits=n, kv_cluster=min(n, 8), **ONE_WARPGROUP) for n in powers)
    return next((config.kv_splits for config in smallest if _check_split(problem, config, gpu) is None), None)


def as_loaded(problem: Problem, config: Config) -> Problem:
    """The problem as loads of the kernel with `kv_splits` see it: one head of all heads' keys, where a tile has those of all.

    A "token" is then a head of a token: its row of [kv_tokens, kv_heads, head_dim].
    """
    p, heads = problem, config.kv_heads_per_tile
    return p if heads == 1 else dataclasses.replace(p, kv_heads=1, kv_tokens=p.kv_tokens * heads)


def loads_heads_together(problem: Problem) -> str | None:
    """Why no tile can have the keys of all heads, or None."""
    p = problem
    if p.kv_heads == 1 or ROWS % p.kv_heads:
        return f"kv_heads={p.kv_heads} is no power of two from 2 to {ROWS}"
    if (rows := p.q_tokens * p.q_heads) > ROWS:
        return f"query tokens times query heads are {rows}, of {ROWS} at most"
    if p.bias != "none" or p.page_size or p.eight_bits:
        return "there is a bias, pages or keys of 8 bits"
    if (rows := p.batch * p.kv_tokens * p.kv_heads) > MAX_ROWS:
        return f"tokens times heads of keys are {rows}, of {MAX_ROWS} at most"
    return None


def page_indices(problem: Problem, config: Config) -> int:
    """How many entries of the table of pages a thread block keeps in shared memory at most; 0 without pages.

    Those of its share of the kv blocks, and up to three before (a copy begins at whole 16 bytes), in whole units of a copy.
    """
    p, c = problem, config
    if not p.page_size:
        return 0
    blocks = math.ceil(math.ceil(p.kv_tokens / c.tile_kv) / c.kv_splits)  # of a share, which may begin within a page
    most = math.ceil((blocks - 1) * c.tile_kv / p.page_size) + max(1, c.tile_kv // p.page_size) + 3
    unit = 4 if most <= PAGE_INDICES_COPIED else PAGE_INDICES_COPIED
    return -(-most // unit) * unit


def _check_split(p: Problem, c: Config, gpu: Gpu) -> str | None:
    """`check` of a config with `kv_splits`."""
    if reason := splits_keys(p):
        return reason
    if not 1 <= c.kv_splits <= MAX_SPLITS:
        return f"kv_splits={c.kv_splits} must be from 0 to {MAX_SPLITS}"
    if c.kv_cluster not in KV_CLUSTERS or c.kv_splits % c.kv_cluster:
        return f"kv_cluster={c.kv_cluster} must be 1, 2, 4, 8 or 16 and divide kv_splits={c.kv_splits}"
    if p.batch * p.q_tokens * p.q_heads * stored_columns(p.head_dim) * (c.kv_splits // c.kv_cluster) > MAX_SIZE:
        return f"kv_splits={c.kv_splits} makes outputs of more elements than are counted in 32 bits: use fewer, or clusters"
    values = rounded_values(p.head_dim, p.v_dim)
    if values // c.kv_cluster < 8:
        return f"kv_cluster={c.kv_cluster} leaves each block fewer than 8 columns of head_dim={p.head_dim}: use 8"
    for name, value in ONE_WARPGROUP.items():
        if getattr(c, name) != value:
            return f"{name}={getattr(c, name)!r} must be {value!r} with kv_splits={c.kv_splits}: a block is one warpgroup there"
    if c.tile_kv not in SPLIT_TILES_KV:
        return f"tile_kv={c.tile_kv} must be {' or '.join(map(str, SPLIT_TILES_KV))} with kv_splits={c.kv_splits}"
    if not 2 <= c.max_concurrent_steps <= 16:
        return f"max_concurrent_steps={c.max_concurrent_steps} must be from 2 to 16"
    if reason := _check_heads_of_a_tile(p, c):
        return reason
    if values // 2 + c.tile_kv * 3 // 4 > 200:
        return f"tile_kv={c.tile_kv} leaves no registers for the output of head_dim={p.head_dim}: use 64"
    if c.kv_cluster > PORTABLE_CLUSTER and blocks_of_an_sm(p, c, gpu) < 2:
        return f"kv_cluster={c.kv_cluster} needs blocks of which an SM holds two: use fewer steps, or a cluster of 8"
    reason = limits.check_smem(split_smem_bytes(p, c), gpu)
    if reason is not None and (indices := page_indices(p, c)):
        reason += f", of which the table of pages takes {4 * indices}: or split keys over more blocks"
    return reason


def _check_heads_of_a_tile(p: Problem, c: Config) -> str | None:
    """Why `kv_heads_per_tile` cannot be what it is, or None."""
    heads = c.kv_heads_per_tile
    if heads == 1:
        return None
    if heads != p.kv_heads:
        return f"kv_heads_per_tile={heads} must be 1 or kv_heads={p.kv_heads}"
    reason = loads_heads_together(p)
    return None if reason is None else f"kv_heads_per_tile={heads}: {reason}; use 1"


def blocks_of_an_sm(problem: Problem, config: Config, gpu: Gpu) -> int:
    """How many thread blocks with `kv_splits` an SM holds. Each takes a kilobyte of shared memory more than it asks for."""
    return (gpu.smem_per_block + 1024) // (split_smem_bytes(problem, config) + 1024)


def split_smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a thread block of the kernel with `kv_splits`. What a cluster receives lies where keys lay."""
    c, d, cluster = config, rounded(problem.head_dim), config.kv_cluster
    v_d = rounded_values(problem.head_dim, problem.v_dim)
    stored: list[limits.Buffer] = [
        ((stages, c.tile_kv, columns), problem.kv_itemsize) for stages, columns in zip(split_stages(c), (d, v_d), strict=True)
    ]
    if problem.eight_bits:
        stored.append(((c.tile_kv, d), 2))  # a tile as 16-bit floats
    keys = limits.block_bytes(stored, 0)
    columns = cluster * limits.columns_of_a_block(v_d, cluster)
    inbox = limits.block_bytes([((ROWS, columns), 4), ((cluster, ROWS), 4), ((2,), 4)], 0) if cluster > 1 else 0
    pages = page_indices(problem, c)
    buffers: list[limits.Buffer] = [((max(keys, inbox),), 1)]
    buffers += [((pages,), 4)] if pages else []
    buffers += [((ROWS, d), 2)]
    buffers += [((c.tile_kv,), 4)] if problem.bias != "none" else []  # seen
    buffers += [((limits.REDUCTIONS,), 1)]
    return limits.block_bytes(buffers, barriers=1 + sum(split_stages(c)) + (1 if pages else 0))


def stored_columns(head_dim: int) -> int:
    """Columns of a row of an output that the kernel with `kv_splits` leaves to another to add up: a power of two from 64 on."""
    return max(64, 1 << (head_dim - 1).bit_length())


def bias_steps(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Stages of the forward kernel's pipeline of the bias: as many as keys have, or one less where there is no room for that.

    Tiles of the bias are as large as those of keys, and are read half a step before the values of their block.
    """
    steps = config.max_concurrent_steps
    return steps if _smem_bytes(problem, config, steps) <= gpu.smem_per_block else steps - 1


def smem_bytes(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Bytes of shared memory of a thread block of the forward kernel."""
    return _smem_bytes(problem, config, bias_steps(problem, config, gpu))


def _smem_bytes(p: Problem, c: Config, bias_steps: int) -> int:
    """Buffers are listed by name, as Mosaic lays them out."""
    rows, d, steps = ROWS * c.compute_warpgroups, rounded(p.head_dim), c.max_concurrent_steps
    buffers: list[limits.Buffer] = [((bias_steps, rows, c.tile_kv), itemsize_of(p.bias))] if p.bias != "none" else []
    buffers += [((steps, c.tile_kv, d), 2), ((rows,), 4), ((c.compute_warpgroups, c.tile_kv), 4)]  # keys, lse, numbers
    buffers += [((c.q_slots, rows, d), 2)]
    buffers += [((steps, c.tile_kv), 4)] if p.segments else []
    buffers += [((steps, c.tile_kv, rounded_values(p.head_dim, p.v_dim)), 2)]  # values
    bias_barriers = c.compute_warpgroups if bias_steps == 1 else bias_steps
    return limits.block_bytes(buffers, barriers=2 * (c.q_slots + 2 * steps + (bias_barriers if p.bias != "none" else 0)))
