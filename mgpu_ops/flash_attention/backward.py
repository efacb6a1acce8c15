"""The backward kernel of attention, for NVIDIA Hopper: dq, dk and dv of softmax(scale q k^T + bias, where visible) v in one pass.

A block keeps a tile of keys and values in shared memory while the query rows that see them go by, and computes, transposed so
that keys are wgmma's rows: S = k q^T, P = 2^(S - lse), dP = v dO^T, dS = P (dP - delta); dv += P dO and dk += dS q stay in
registers, with P and dS as operands from registers, and dq = dS^T k, for which the warpgroups exchange dS through shared memory,
is added to dq in global memory by TMA. One warpgroup copies, two compute. Five products where two kernels, one for dq and one
for dk and dv, need seven; but the order of the sums in dq varies from run to run. Sources: FlashAttention-2 (arXiv 2307.08691)
and -3 (arXiv 2407.08608); PTX ISA (wgmma, cp.reduce.async.bulk.tensor).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops import core
from mgpu_ops.core import schedule
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.ring import Ring
from mgpu_ops.flash_attention.operands import (
    LOG2E,
    Inputs,
    Operands,
    as_blocks,
    as_rows,
    bias_rows,
    pad_head,
    pad_tokens,
    segment_tiles,
)
from mgpu_ops.flash_attention.problem import PANEL, ROWS, BackwardConfig, BackwardProblem, compute_registers, padded
from mgpu_ops.flash_attention.visible import Order, row_range

WARPGROUPS = 2  # that compute
TILE_COST = 4  # what a tile of keys takes beside its tiles of rows, in tiles of 64 rows


@functools.cache
def _schedule(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    """Which block works on which tiles of keys."""
    first, end = row_range(p, c.tile_kv)
    steps = np.maximum(1, -(-end // c.tile_q) - first // c.tile_q) * (p.q_heads // p.kv_heads) * (c.tile_q // 64)
    return schedule.deal_heads(steps + TILE_COST, p.batch * p.kv_heads, c.section_waves, blocks)


def _tile(p: BackwardProblem, c: BackwardConfig, number: Any) -> tuple[Any, Any, Any]:
    """Batch entry, head of keys and first key of a tile."""
    tiles = jnp.int32(math.ceil(p.kv_tokens / c.tile_kv))
    head, tile = lax.div(number, tiles), lax.rem(number, tiles)
    return lax.div(head, jnp.int32(p.kv_heads)), lax.rem(head, jnp.int32(p.kv_heads)), tile * c.tile_kv


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The tiles of query rows that a tile of keys meets, of all heads that share it: those to mask, and those that need none."""

    order: Order
    group: int

    @property
    def masked(self) -> Any:
        return self.order.masked * self.group

    @property
    def unmasked(self) -> Any:
        return self.order.unmasked * self.group

    def masked_tile(self, i: Any) -> tuple[Any, Any]:
        """Which head of the group, and which tile of rows, the i-th to be masked is."""
        return lax.div(i, self.order.masked), self.order.masked_tile(lax.rem(i, self.order.masked))

    def unmasked_tile(self, i: Any) -> tuple[Any, Any]:
        count = jnp.maximum(self.order.unmasked, 1)
        return lax.div(i, count), self.order.unmasked_tile(lax.rem(i, count))


def _load(
    x: Operands,
    of_rows: dict[str, Any],
    c: BackwardConfig,
    tiles: schedule.Turns,
    rows_ring: Ring,
    kv_ring: Ring,
    smem: dict[str, Any],
) -> None:
    """What the copying warpgroup does: for each tile of keys it and its values, then all rows that see some of them."""
    p, group = x.problem, x.problem.q_heads // x.problem.kv_heads

    def tile(i: Any, done: Any) -> Any:
        b, kv_head, key = _tile(p, c, tiles.number(i))

        def keys(slot: Any, filled: Any) -> None:
            del slot
            x.load_keys(x.k, b, kv_head, key, smem["k_smem"], filled)
            x.load_keys(x.v, b, kv_head, key, smem["v_smem"], filled)

        kv_ring.fill(i, keys)
        rows = _Rows(Order.of(*x.row_tiles(b, key, c.tile_kv, c.tile_q)), group)

        def step(member: Any, tile: Any, done: Any) -> Any:
            row, n = tile * c.tile_q, kv_head * group + member

            def copy(slot: Any, filled: Any) -> None:
                x.load_block(x.q, b, n, row, p.q_tokens, smem["q_smem"].at[slot], filled)
                x.load_block(of_rows["do"], b, n, row, p.q_tokens, smem["do_smem"].at[slot], filled)
                for name in ("lse", "delta"):
                    values = of_rows[name].at[b, n, core.ds(row, c.tile_q)]
                    core.copy_gmem_to_smem(values, smem[f"{name}_smem"].at[slot], filled)
                if p.segments:
                    ids = x.inputs.segments[0].at[b, core.ds(row, c.tile_q)]
                    core.copy_gmem_to_smem(ids, smem["segments_smem"].at[slot], filled)
                if p.bias != "none":
                    x.load_bias(b, n, key, row, smem["bias_smem"].at[slot], filled)

            rows_ring.fill(done, copy)
            return done + 1

        done = lax.fori_loop(0, rows.masked, lambda j, done: step(*rows.masked_tile(j), done), done)
        return lax.fori_loop(0, rows.unmasked, lambda j, done: step(*rows.unmasked_tile(j), done), done)

    count = tiles.count
    rows_ring.drain(lax.fori_loop(0, count, tile, jnp.int32(0)))
    kv_ring.drain(count)


def _kernel(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    bias_shape: tuple[int, int],
    fused: bool,
    *refs: Any,
    accumulators: Any,
    **scratch: Any,
) -> None:
    """One block: its tiles of keys, each a loop over tiles of query rows."""
    table_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest, dk_ref, dv_ref = refs
    dbias_ref = rest.pop() if p.bias_grad else None
    dq_ref = rest.pop() if fused else None
    sharing = rest.pop() if p.segments else None
    x = Operands(p, q_ref, k_ref, v_ref, Inputs.of(p, tuple(rest)), bias_shape, sharing)
    tiles = schedule.Turns(table_ref, lax.axis_index("block"))
    rows_ring = Ring(c.max_concurrent_steps, scratch.pop("rows_filled"), scratch.pop("rows_released"))
    kv_ring = Ring(1, scratch.pop("kv_filled"), scratch.pop("kv_released"))
    together = scratch.pop("together")
    smem, panels, parts = scratch, range(p.head_dim // PANEL), range(c.tile_q // ROWS)
    by_column, shape = core.Layout.WGMMA.reduce(0), (ROWS, ROWS)
    group = p.q_heads // p.kv_heads
    dtype = q_ref.dtype

    def along_column(values: Any) -> Any:
        return lax.broadcast_in_dim(values, shape, (1,))

    def meet() -> None:
        """Both compute warpgroups wait for each other, and see what the other wrote to shared memory before."""
        core.barrier_arrive(together)
        core.barrier_wait(together)

    def computing(s_acc: Any, dp_acc: Any, dk_acc: Any, dv_acc: Any, *dq_acc: Any) -> None:
        wg = lax.axis_index("wg")
        score_scale = x.inputs.options[0] * LOG2E
        # From shared memory, the numbers of a tile's rows take registers only while a tile is masked.
        smem["numbers_smem"][wg] = core.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_column)

        def rows_of(name: str, slot: Any, part: int) -> Any:
            return smem[name].at[slot, core.ds(part * ROWS, ROWS)]

        def transposed(acc: Any, own: str, rows: Any) -> None:
            """acc = this warpgroup's keys or values times rows^T: starts as many products as there are panels."""
            mine = core.ds(lax.optimization_barrier(lax.axis_index("wg")) * ROWS, ROWS)
            acc[...] = jnp.zeros(shape, jnp.float32)
            for panel in panels:
                columns = rows.at[:, core.ds(panel * PANEL, PANEL)]
                core.wgmma(acc, smem[own].at[panel, mine, :], core.transpose_ref(columns))

        def tile(i: Any, carry: Any) -> Any:
            number, done = carry
            b, kv_head, key = _tile(p, c, number)
            following = tiles.number(i + 1)
            rows = _Rows(Order.of(*x.row_tiles(b, key, c.tile_kv, c.tile_q)), group)
            core.barrier_wait(kv_ring.filled.at[0])
            tokens, first_key = x.tokens(b), key + wg * ROWS
            if p.segments:
                ids = x.inputs.segments[1].at[b, core.ds(first_key, ROWS)]
                kv_segments = core.load(ids, layout=core.Layout.WGMMA.reduce(1), optimized=False)

            def weights(slot: Any, part: int, row: Any, masked: bool) -> tuple[Any, Any]:
                """2^(scores - lse), 0 where not visible, and what to multiply the scores' gradient by for a soft cap."""
                own = core.ds(part * ROWS, ROWS)
                s, slope = core.accumulated(s_acc, len(panels)), None
                lse = core.load(smem["lse_smem"].at[slot, own], layout=by_column, optimized=False)
                if p.soft_cap:
                    t = x.capped(s)
                    s, slope = t * (x.inputs.options[1] * LOG2E), 1.0 - t * t
                else:
                    s = s * score_scale
                if p.bias != "none":
                    bias = core.load(smem["bias_smem"].at[slot, mine, own], layout=core.Layout.WGMMA, optimized=False)
                    s = s + bias.astype(jnp.float32) * LOG2E
                weights = jnp.exp2(s - along_column(lse))
                if p.segments:
                    q_segments = core.load(smem["segments_smem"].at[slot, own], layout=by_column, optimized=False)
                    same = lax.broadcast_in_dim(kv_segments, shape, (0,)) == along_column(q_segments)
                    weights = jnp.where(same, weights, 0.0)
                if masked:
                    numbers = core.load(smem["numbers_smem"].at[wg], layout=by_column, optimized=False) + (row + part * ROWS)
                    keys = core.broadcasted_iota(jnp.int32, shape, 0, layout=core.Layout.WGMMA) + first_key
                    weights = jnp.where(tokens.sees(along_column(numbers), keys), weights, 0.0)
                return weights, slope

            def step(member: Any, tile: Any, step: Any, masked: bool) -> Any:
                """One tile of rows."""
                slot = lax.rem(step, jnp.int32(rows_ring.slots))
                n, row = kv_head * group + member, tile * c.tile_q
                buffer = lax.rem(step, jnp.int32(2))
                wg = lax.optimization_barrier(lax.axis_index("wg"))
                mine = core.ds(wg * ROWS, ROWS)
                core.barrier_wait(rows_ring.filled.at[slot])
                for part in parts:
                    own = core.ds(part * ROWS, ROWS)
                    transposed(s_acc, "k_smem", rows_of("q_smem", slot, part))
                    transposed(dp_acc, "v_smem", rows_of("do_smem", slot, part))
                    p32, slope = weights(slot, part, row, masked)
                    core.wgmma(dv_acc, p32.astype(dtype), rows_of("do_smem", slot, part))
                    dp = core.accumulated(dp_acc, 1)
                    delta = core.load(smem["delta_smem"].at[slot, own], layout=by_column, optimized=False)
                    ds = p32 * (dp - along_column(delta))
                    if slope is not None:
                        ds = ds * slope
                    ds = ds.astype(dtype)
                    if fused or p.bias_grad:
                        smem["ds_smem"][buffer, part, mine, :] = ds
                        core.commit_smem()
                    core.wgmma(dk_acc, ds, rows_of("q_smem", slot, part))
                if p.bias_grad:
                    for part in parts:
                        place = dbias_ref.at[b, n, core.ds(first_key, ROWS), core.ds(row + part * ROWS, ROWS)]
                        core.copy_smem_to_gmem(smem["ds_smem"].at[buffer, part, mine, :], place)
                if fused:
                    meet()
                    # The rows' products with all keys: half of the columns, or where those are one panel, half of the rows.
                    if len(parts) == 1:
                        ds_rows, column, first_row = smem["ds_smem"].at[buffer, 0], wg * PANEL, row
                        keys = smem["k_smem"].at[wg]
                    else:
                        ds_rows, column, first_row = smem["ds_smem"].at[buffer, wg], 0, row + wg * ROWS
                        keys = smem["k_smem"].at[0]
                    dq_acc[0][...] = jnp.zeros(shape, jnp.float32)
                    core.wgmma(dq_acc[0], core.transpose_ref(ds_rows), keys)
                if fused:
                    dq = core.accumulated(dq_acc[0], 0)
                else:
                    core.wgmma_wait(0)
                core.barrier_arrive(rows_ring.released.at[slot])
                core.wait_smem_to_gmem(0, wait_read_only=True)
                if fused:
                    smem["dq_smem"][wg] = dq
                    core.commit_smem()
                    part_of = lax.div(key, jnp.int32(c.tile_kv)) if core.interpreting() else 0
                    place = dq_ref.at[part_of, b, core.ds(first_row, ROWS), n, core.ds(column, PANEL)]
                    core.add_tile(smem["dq_smem"].at[wg], place)
                return step + 1

            masks = _masks(p, c)
            done = lax.fori_loop(0, rows.masked, lambda j, done: step(*rows.masked_tile(j), done, masks), done)
            done = lax.fori_loop(0, rows.unmasked, lambda j, done: step(*rows.unmasked_tile(j), done, False), done)
            dk, dv = dk_acc[...] * x.inputs.options[0], dv_acc[...]
            meet()  # the keys are done with: their place, and the values', takes the gradients on their way out
            start = b * p.kv_tokens
            mine = core.ds(lax.optimization_barrier(lax.axis_index("wg")) * ROWS, ROWS)
            for name, values, ref in (("k_smem", dk, dk_ref), ("v_smem", dv, dv_ref)):
                for panel in panels:
                    staging = smem[name].at[panel, mine, :]
                    staging[...] = values[:, panel * PANEL : (panel + 1) * PANEL].astype(dtype)
                    core.commit_smem()
                    column = kv_head * p.head_dim + panel * PANEL
                    core.store_rows(staging, ref, start + first_key, start + p.kv_tokens, column)
            for acc in (dk_acc, dv_acc):
                acc[...] = jnp.zeros(acc.shape, jnp.float32)
            core.wait_smem_to_gmem(0, wait_read_only=True)
            core.barrier_arrive(kv_ring.released.at[0])
            return following, done

        lax.fori_loop(0, tiles.count, tile, (tiles.number(0), jnp.int32(0)))
        core.wait_smem_to_gmem(0)

    core.specialize(
        lambda: _load(x, {"do": do_ref, "lse": lse_ref, "delta": delta_ref}, c, tiles, rows_ring, kv_ring, smem),
        lambda: accumulators.scope(computing),
        compute_warpgroups=WARPGROUPS,
        copy_registers=c.memory_registers,
        compute_registers=compute_registers(WARPGROUPS, c.memory_registers, gpu),
    )


def _masks(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether some key is not seen by all rows of some tile that meets it."""
    return p.right is not None or p.left is not None or p.lengths or p.kv_tokens % c.tile_kv != 0


def launch(p: BackwardProblem, c: BackwardConfig, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Runs the kernel on q, k, v, the output's gradient, lse, delta and `Inputs.arrays()`: dq, dk, dv and any bias's gradient.

    lse as the forward kernel gives it; delta [batch, q_heads, q_tokens]: the rows' sums of output times its gradient.
    """
    head_dim, p = p.head_dim, dataclasses.replace(p, head_dim=padded(p.head_dim))
    q, k, v, out_grad = (pad_head(x, p.head_dim) for x in arrays[:4])
    lse, delta = pad_tokens(arrays[4], c.tile_q, math.inf), pad_tokens(arrays[5], c.tile_q)
    inputs, steps, fused = Inputs.of(p, arrays[6:]), c.max_concurrent_steps, c.mode == "fused"
    rows, panels, parts = lse.shape[2], p.head_dim // PANEL, c.tile_q // ROWS
    tiles = math.ceil(p.kv_tokens / c.tile_kv)
    blocks = min(gpu.sms, p.batch * p.kv_heads * tiles)
    operand = core.operand_transforms(PANEL, p.dtype, 128)
    extra, bias_shape, scratch = [], (1, 1), {}
    if inputs.segments is not None:
        q_segments, kv_segments = inputs.segments
        extra.append(segment_tiles(kv_segments, q_segments, c.tile_kv, c.tile_q))
        inputs = dataclasses.replace(inputs, segments=(pad_tokens(q_segments, c.tile_q), pad_tokens(kv_segments, c.tile_kv)))
        scratch["segments_smem"] = core.SMEM((steps, c.tile_q), jnp.int32)
    if inputs.bias is not None:
        bias_shape = inputs.bias.shape[:2]
        inputs = dataclasses.replace(inputs, bias=bias_rows(inputs.bias.swapaxes(2, 3)))
        panel = core.operand_transforms(128 // inputs.bias.dtype.itemsize, inputs.bias.dtype, 128)
        scratch["bias_smem"] = core.SMEM((steps, c.tile_kv, c.tile_q), inputs.bias.dtype, transforms=panel)
    copies = 4 + len(scratch)
    if fused:
        parts_of_dq = tiles if interpret else 1
        dq = jax.new_ref(jnp.zeros((parts_of_dq, p.batch, rows, p.q_heads, p.head_dim), jnp.float32))
        extra.append(dq)
        dq_panel = core.operand_transforms(32, jnp.float32, 128)
        scratch["dq_smem"] = core.SMEM((WARPGROUPS, ROWS, PANEL), jnp.float32, transforms=dq_panel)
    if p.bias_grad:
        dbias = jax.new_ref(jnp.zeros((p.batch, p.q_heads, tiles * c.tile_kv, rows), p.dtype))
        extra.append(dbias)
    if fused or p.bias_grad:
        scratch["ds_smem"] = core.SMEM((2, parts, c.tile_kv, PANEL), p.dtype, transforms=operand)

    def barriers(name: str, slots: int, copies: int) -> dict[str, Any]:
        ring = Ring.barriers(slots, copies=copies, readers=WARPGROUPS)
        return {f"{name}_{key}": barrier for key, barrier in ring.items()}

    square, tall = (ROWS, ROWS), (ROWS, p.head_dim)
    dk, dv = core.kernel(
        functools.partial(_kernel, p, c, gpu, bias_shape, fused),
        out_type=(jax.ShapeDtypeStruct((1, 1, p.batch * p.kv_tokens, p.kv_heads * p.head_dim), p.dtype),) * 2,
        scratch_types={
            "accumulators": core.Accumulators((square, square, tall, tall, *([square] * fused)), WARPGROUPS),
            "q_smem": core.SMEM((steps, c.tile_q, p.head_dim), p.dtype, transforms=operand),
            "do_smem": core.SMEM((steps, c.tile_q, p.head_dim), p.dtype, transforms=operand),
            "k_smem": core.SMEM((panels, c.tile_kv, PANEL), p.dtype, transforms=operand),
            "v_smem": core.SMEM((panels, c.tile_kv, PANEL), p.dtype, transforms=operand),
            "lse_smem": core.SMEM((steps, c.tile_q), jnp.float32),
            "delta_smem": core.SMEM((steps, c.tile_q), jnp.float32),
            "numbers_smem": core.SMEM((WARPGROUPS, ROWS), jnp.int32),
            **scratch,
            **barriers("rows", steps, copies),
            **barriers("kv", 1, 2 * panels),
            "together": core.Barrier(num_arrivals=WARPGROUPS),
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        name="mgpu_ops_flash_attention_backward",
        interpret=interpret,
        compiler_params=core.CompilerParams(lowering_semantics=core.LoweringSemantics.Warpgroup, approx_math=True),
    )(_schedule(p, c, blocks), as_blocks(q, c.tile_q), as_rows(k), as_rows(v), as_blocks(out_grad, c.tile_q), lse, delta,
      *inputs.arrays(), *extra)
    dk, dv = (x.reshape(k.shape)[..., :head_dim] for x in (dk, dv))
    if not fused:
        raise AssertionError
    dq = jax.freeze(dq).sum(0)[:, : p.q_tokens, :, :head_dim] * inputs.options[0]
    gradients = dq.astype(p.dtype), dk, dv
    if not p.bias_grad:
        return gradients
    summed = jax.freeze(dbias)[:, :, : p.kv_tokens, : p.q_tokens].swapaxes(2, 3).astype(jnp.float32)
    for axis, size in enumerate(bias_shape):
        summed = summed.sum(axis, keepdims=True) if size == 1 else summed
    return (*gradients, summed.astype(p.bias))
