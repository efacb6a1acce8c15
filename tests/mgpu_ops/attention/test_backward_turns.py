"""deterministic=True in one kernel: kv blocks take turns at adding to dq, always in one order, and nobody waits for ever.

JAX's interpreter runs a thread block after the other and cannot wait, so the turns themselves are played here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import spec_of
from mgpu_ops.attention import backward_block, backward_round
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import BackwardArrays, optional_refs
from mgpu_ops.attention.operands import Operands
from mgpu_ops.core.gpu import find

BACKWARD = spec_of("flash_attention_backward")
H200 = find("h200")
FEW = dataclasses.replace(H200, sms=11)


def problem_of(*sizes: int, **mask: Any) -> Any:
    return BACKWARD.Problem(*sizes, deterministic=True, **mask)


def config_of(head_dim: int, waves: int = 1024) -> Any:
    return BACKWARD.Config("fused", 128 if head_dim == 64 else 64, 128, 3, waves, 24, "next", "apart")


def drawn(p: Any) -> Inputs:
    """Random lengths of half the tokens or more, and segments: packed ones with a causal mask, else of any order."""
    rng, sizes = np.random.default_rng(0), (p.q_tokens, p.kv_tokens)
    lengths = tuple(rng.integers(n // 2, n + 1, p.batch).astype(np.int32) for n in sizes) if p.lengths else None
    ids = [rng.integers(0, 9, (p.batch, n)).astype(np.int32) for n in sizes]
    segments = tuple(np.sort(x, 1) if p.causal else x for x in ids) if p.segments else None
    return Inputs(np.zeros(3, np.float32), lengths, segments)


def thread_block(p: Any, c: Any, inputs: Inputs, blocks: int, sms: int) -> Any:
    """What counts and numbers, without q, k, v and their gradients."""
    nothing: Any = dict.fromkeys(field.name for field in dataclasses.fields(backward_block.ThreadBlock))
    refs: Any = dict.fromkeys(field.name for field in dataclasses.fields(backward_block.Refs))
    optional, _ = optional_refs(inputs, "q", c.tile_q, c.tile_kv, c.max_concurrent_steps)
    refs = backward_block.Refs(**refs | {"numbers": jnp.asarray(backward_block.turn_numbers(p, c, optional, blocks, sms))})
    return backward_block.ThreadBlock(**nothing | {"p": p, "c": c, "refs": refs, "x": Operands(p, None, None, None, optional)})


class Known(NamedTuple):
    """Of the kv blocks of each head of keys in each batch entry."""

    counts: Any  # [heads, kv blocks]: visits
    visits: Any  # [most visits, heads, kv blocks, 2]: member of the group, q block
    numbers: Any  # [q blocks, heads, kv blocks]: how many add before


def known(p: Any, c: Any, inputs: Inputs, blocks: int, sms: int) -> Known:
    block, count, q_blocks = thread_block(p, c, inputs, blocks, sms), -(-p.kv_tokens // c.tile_kv), -(-p.q_tokens // c.tile_q)
    heads, group = p.batch * p.kv_heads, p.q_heads // p.kv_heads
    kv = block.kv_block(jnp.int32(0), jnp.arange(heads)[:, None] * count + jnp.arange(count))
    steps, every = jnp.arange(q_blocks * group)[:, None, None], jnp.arange(q_blocks)[:, None, None]
    visits = jnp.stack([x + jnp.zeros((len(steps), heads, count), int) for x in kv.q_blocks.visit(steps, group)], -1)
    return Known(
        kv.q_blocks.count * group + jnp.zeros((heads, count), int),
        visits,
        block.turn_number(kv, every) + jnp.zeros((q_blocks, heads, count), int),
    )


def play(p: Any, c: Any, gpu: Any) -> dict[tuple[int, int], list[int]]:
    """Runs all thread blocks, each until it waits: for each tile of dq (q block, query head of all entries), who added in turn.

    As many as there are SMs run at one time, from the first one on. One that waits for ever leaves kv blocks out.
    """
    count = -(-p.kv_tokens // c.tile_kv)
    blocks = p.batch * p.kv_heads * count
    blocks = blocks if backward_block.dealt(p) else min(gpu.sms, blocks)
    run = functools.partial(known, p, c, blocks=blocks, sms=gpu.sms)
    counts, visits, numbers = jax.tree.map(np.array, jax.jit(run)(drawn(p)))
    group = p.q_heads // p.kv_heads
    work = []
    for row in backward_block.schedule(p, c, blocks, gpu.sms):
        assigned = [divmod(int(number), count) for number in row[1 : 1 + row[0]]]
        work.append([(h, t, *map(int, visit)) for h, t in assigned for visit in visits[: counts[h, t], h, t]])
    added: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    moved = True
    while moved:
        moved = False
        for queue in [queue for queue in work if queue][: gpu.sms]:
            done = 0
            for head, tile, member, q_block in queue:
                at = q_block, head * group + member
                if len(added[at]) != numbers[q_block, head, tile]:
                    break
                added[at].append(tile)
                done += 1
            del queue[:done]
            moved |= done > 0
    assert not any(work), "thread blocks wait for each other"
    return added


PROBLEMS = {
    "causal, grouped heads": problem_of(2, 500, 700, 4, 2, 128, causal=True),
    "causal, more rows than keys": problem_of(2, 900, 400, 2, 2, 128, causal=True),
    "causal, keys that no row sees": problem_of(1, 300, 900, 2, 1, 128, causal=True, align="top_left"),
    "window to the right, head_dim of 64": problem_of(2, 500, 1100, 2, 2, 64, window_right=70),
    "window to both sides": problem_of(2, 900, 1100, 2, 1, 128, window_left=200, window_right=70),
    "window to the left, fewer keys, head_dim of 64": problem_of(2, 900, 600, 2, 1, 64, window_left=200),
    "causal, a small window, keys that no row sees": problem_of(1, 300, 1400, 2, 1, 128, causal=True, window_left=20),
    "lengths": problem_of(3, 700, 900, 4, 2, 128, lengths=True),
    "lengths, causal, dealt": problem_of(5, 900, 1300, 4, 2, 128, causal=True, lengths=True),
    "lengths, causal, aligned with the first key, dealt": problem_of(
        5, 1500, 700, 2, 2, 64, causal=True, align="top_left", lengths=True
    ),
    "lengths, causal, a window, head_dim of 64": problem_of(3, 1000, 900, 2, 2, 64, causal=True, window_left=300, lengths=True),
    "segments in any order": problem_of(2, 900, 800, 2, 1, 128, segments=True),
    "packed segments, causal": problem_of(2, 1100, 1100, 2, 2, 64, causal=True, segments=True),
    "a circle, grouped heads": problem_of(3, 777, 600, 4, 1, 128),
    "a circle of more kv blocks than thread blocks": problem_of(2, 300, 1600, 2, 2, 128),
    "a circle, more kv blocks than q blocks": problem_of(2, 130, 640, 2, 2, 128),
    "no mask, head_dim of 64, one q block": problem_of(3, 50, 1200, 2, 2, 64),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_tile_of_dq_is_added_to_by_every_kv_block_that_its_rows_see_in_an_order_of_its_own(name: str) -> None:
    p = PROBLEMS[name]
    c = config_of(p.head_dim)
    assert BACKWARD.check(p, c, FEW) is None
    added = play(p, c, FEW)
    tiles, group = math.ceil(p.kv_tokens / c.tile_kv), p.q_heads // p.kv_heads
    if "circle" in name:
        assert len(added) == p.batch * math.ceil(p.q_tokens / c.tile_q) * p.q_heads
        assert all(sorted(order) == list(range(tiles)) for order in added.values())
    assert all(len(set(order)) == len(order) for order in added.values())
    # The order depends on the place alone, not on which thread block is how fast: heads of a group have the same one.
    for (q_block, head), order in added.items():
        assert order == added[q_block, head // group * group]


def test_heads_in_a_line_that_no_section_divides_end_as_soon_as_others() -> None:
    p, c = problem_of(2, 6144, 6144, 24, 12, 128, causal=True), config_of(128, waves=8)  # a section has 22 of 24 heads
    costs = backward_block._steps(p, c) + backward_block.TILE_COST
    rows = backward_block.schedule(p, c, H200.sms, H200.sms)
    ends = [costs[row[1 : 1 + row[0]] % len(costs)].sum() for row in rows]
    assert max(ends) < 1.05 * sum(ends) / len(ends)


def test_thread_blocks_do_not_wait_for_each_other_in_even_sections_of_heads() -> None:
    p, c = problem_of(2, 1300, 1300, 4, 2, 128, causal=True), config_of(128, waves=3)  # sections of 3 of 4 heads, or of 2
    costs = backward_block._steps(p, c) + backward_block.TILE_COST
    uneven = backward_block._falling_in(3, costs, 4, FEW.sms)
    assert (backward_block.schedule(p, c, FEW.sms, FEW.sms) != uneven).any()
    assert all(len(set(order)) == len(order) for order in play(p, c, FEW).values())


def test_kv_blocks_of_a_head_begin_at_different_rows_in_a_circle() -> None:
    p = problem_of(1, 1024, 1024, 1, 1, 128)
    starts = known(p, config_of(128), drawn(p), 8, 8).visits[0, 0, :, 1]
    assert starts.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize("name", ["lengths, causal, dealt", "packed segments, causal", "window to both sides"])
def test_dq_is_not_filled_with_zeros_before_the_first_turn(name: str) -> None:
    """Who has it stores its sums: zeros would be written and read for nothing."""
    p = PROBLEMS[name]
    arrays = jax.eval_shape(functools.partial(BACKWARD.inputs, p), jax.random.key(0))
    program = jax.make_jaxpr(functools.partial(BACKWARD.run, p, config_of(p.head_dim), H200))(*arrays)
    filled = [x for eqn in program.eqns if eqn.primitive.name == "broadcast_in_dim" for x in eqn.outvars]
    assert filled
    assert max(x.aval.size for x in filled) < p.batch * p.q_tokens * p.q_heads * p.head_dim


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_is_zero_where_no_kv_block_had_a_turn(head_dim: int) -> None:
    """Whatever memory held there before. The interpreter, which fills dq, does not meet this in a whole gradient."""
    p, c = problem_of(2, 200, 300, 2, 1, head_dim, lengths=True, causal=True), config_of(head_dim)
    rows = -(-p.q_tokens // c.tile_q) * c.tile_q
    shape = backward_round.tiles_shape(p, rows)
    added = np.array([[[3, 1], [2, 2]] + [[0, 1]] * (rows // c.tile_q - 2), [[1, 0]] * (rows // c.tile_q)], np.int32)
    of_tiles = np.repeat(added, c.tile_q // 64, 1)  # [batch, tiles of 64 rows, heads]
    values = np.where(of_tiles.reshape(-1, 1, 1) > 0, np.float32(1), np.float32("nan")) * np.ones(shape, np.float32)
    q = jnp.zeros((p.batch, p.q_tokens, p.q_heads, p.head_dim), p.dtype)
    arrays = BackwardArrays(q, q, q, q, q, q, Inputs(jnp.array([0.5, 0, 0], jnp.float32)))
    tiles = backward_round.Tiles(jnp.asarray(values), jnp.asarray(added.reshape(-1)))
    found = np.asarray(backward_round.launch(p, tiles, arrays, interpret=True), np.float32)
    wanted = np.where(np.repeat(of_tiles, 64, 1)[:, : p.q_tokens] > 0, 0.5, 0.0)[..., None]
    np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))
