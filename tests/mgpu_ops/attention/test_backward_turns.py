"""deterministic=True in one kernel: kv blocks take turns at adding to dq, always in one order, and nobody waits for ever.

JAX's interpreter runs a thread block after the other and cannot wait, so the turns themselves are played here.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import spec_of
from mgpu_ops.attention import backward_block
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.operands import Operands, OptionalRefs
from mgpu_ops.core.gpu import find

BACKWARD = spec_of("flash_attention_backward")
H200 = find("h200")
FEW = dataclasses.replace(H200, sms=11)


def problem_of(*sizes: int, **mask: Any) -> Any:
    return BACKWARD.Problem(*sizes, deterministic=True, **mask)


def config_of(head_dim: int, waves: int = 1024) -> Any:
    return BACKWARD.Config("fused", 128 if head_dim == 64 else 64, 128, 3, waves, 24, "next", "apart")


def thread_block(p: Any, c: Any) -> Any:
    """What counts and numbers, without arrays."""
    nothing: Any = dict.fromkeys(field.name for field in dataclasses.fields(backward_block.ThreadBlock))
    inputs = Inputs(jnp.zeros(3))
    return backward_block.ThreadBlock(
        **nothing | {"p": p, "c": c, "x": Operands(p, None, None, None, OptionalRefs(inputs, None, (1, 1)))}
    )


def play(p: Any, c: Any, gpu: Any) -> dict[tuple[int, int, int], list[int]]:
    """Runs all thread blocks, each until it waits: for each tile of dq (batch entry, q block, query head), who added in turn.

    A thread block that waits for ever leaves kv blocks out.
    """
    block, count, group = thread_block(p, c), math.ceil(p.kv_tokens / c.tile_kv), p.q_heads // p.kv_heads
    q_blocks = math.ceil(p.q_tokens / c.tile_q)
    turns = np.array(backward_block.first_turns(p, c, q_blocks * c.tile_q)).reshape(p.batch, q_blocks, p.q_heads)
    kv_blocks = [block.kv_block(jnp.int32(tile)) for tile in range(count)]
    own = [tuple(map(int, block.turns(kv))) for kv in kv_blocks]
    visits = [
        [tuple(map(int, kv.q_blocks.visit(jnp.int32(i), group))) for i in range(int(kv.q_blocks.count) * group)]
        for kv in kv_blocks
    ]
    blocks = min(gpu.sms, p.batch * p.kv_heads * count)
    work = [
        [
            (head, int(tile), *visit)
            for head, tile in (divmod(int(number), count) for number in row[1 : 1 + row[0]])
            for visit in visits[tile]
        ]
        for row in backward_block.schedule(p, c, blocks)
    ]
    added: dict[tuple[int, int, int], list[int]] = collections.defaultdict(list)
    moved = True
    while moved:
        moved = False
        for queue in work:
            while queue:
                head, tile, member, q_block = queue[0]
                entry, kv_head = divmod(head, p.kv_heads)
                at = entry, q_block, kv_head * group + member
                if turns[at] != own[tile][0]:
                    break
                first = block.is_first(kv_blocks[tile], q_block)
                assert first is None or bool(first) == (not added[at])
                added[at].append(tile)
                turns[at] = own[tile][1]
                queue.pop(0)
                moved = True
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
    "a circle, grouped heads": problem_of(3, 777, 600, 4, 1, 128),
    "a circle, more kv blocks than q blocks": problem_of(2, 130, 640, 2, 2, 128),
    "a circle, head_dim of 64, one q block": problem_of(3, 50, 1200, 2, 2, 64),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_tile_of_dq_is_added_to_by_every_kv_block_that_its_rows_see_in_an_order_of_its_own(name: str) -> None:
    p = PROBLEMS[name]
    c = config_of(p.head_dim)
    assert BACKWARD.check(p, c, FEW) is None
    added = play(p, c, FEW)
    tiles = math.ceil(p.kv_tokens / c.tile_kv)
    if name.startswith("a circle"):
        assert len(added) == p.batch * math.ceil(p.q_tokens / c.tile_q) * p.q_heads
        assert all(sorted(order) == list(range(tiles)) for order in added.values())
    assert all(len(set(order)) == len(order) for order in added.values())
    # The order depends on the q block alone, not on which thread block is how fast.
    for (_, q_block, _), order in added.items():
        assert order == added[0, q_block, 0]


def test_kv_blocks_of_a_head_begin_at_different_rows_in_a_circle() -> None:
    p = problem_of(1, 1024, 1024, 1, 1, 128)
    block = thread_block(p, config_of(128))
    starts = [int(block.kv_block(jnp.int32(tile)).q_blocks.block(jnp.int32(0))) for tile in range(8)]
    assert starts == [0, 2, 4, 6, 8, 10, 12, 14]
