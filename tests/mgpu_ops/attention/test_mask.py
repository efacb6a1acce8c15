"""Which tiles a kernel of attention visits, and which it need not mask, against one boolean for each pair of row and key."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu_ops import FlashAttentionProblem
from mgpu_ops.attention import launch, model, reference
from mgpu_ops.attention import mask as mask_module
from mgpu_ops.attention.arguments import Arguments
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import segment_blocks
from mgpu_ops.attention.mask import BlockOrder, BlockRange, MaskTerms, keys_seen, mask_of, rows_seeing, zero_unseen
from mgpu_ops.attention.operands import Operands, OptionalRefs
from tests.mgpu_ops.attention import cases
from tests.thorough import examples

P = FlashAttentionProblem
MOST = 40  # tokens


@dataclasses.dataclass(frozen=True)
class Entry:
    """One batch entry: what its problem says, how long it is, and the tiles it is cut into."""

    problem: Any
    q_end: int
    kv_end: int
    own: int  # tokens of a block, rows or keys
    tile: int  # tokens of a tile of the other side

    @property
    def lengths(self) -> Any:
        return (jnp.array([self.q_end]), jnp.array([self.kv_end])) if self.problem.lengths else None

    @property
    def terms(self) -> MaskTerms:
        return MaskTerms.of(self.problem, self.q_end, self.kv_end)

    def seen(self, mine: Any = None, others: Any = None) -> np.ndarray:
        p = self.problem
        window = tuple(None if side < 0 else side for side in (p.window_left, p.window_right))
        ends = {"q_lengths": [self.q_end], "kv_lengths": [self.kv_end]}
        ids = {"q_segment_ids": mine, "kv_segment_ids": others}
        scores = 1, 1, p.q_tokens, p.kv_tokens
        return cases.visible(scores, causal=p.causal, window=window, align=p.align, **ends, **ids)[0, 0]


@st.composite
def entries(draw: Any, **fields: Any) -> Entry:
    q_tokens, kv_tokens = draw(st.integers(1, MOST)), draw(st.integers(1, MOST))
    side = st.just(-1) | st.integers(0, MOST + 2) | st.just(2**30)
    lengths = draw(st.booleans()) if "lengths" not in fields else fields.pop("lengths")
    drawn = {
        "causal": draw(st.booleans()),
        "window_left": draw(side),
        "window_right": draw(side),
        "align": draw(st.sampled_from(["bottom_right", "top_left"])),
    }
    problem = P(1, q_tokens, kv_tokens, 1, 1, 64, lengths=lengths, **(drawn | fields))
    ends = (draw(st.integers(0, q_tokens)), draw(st.integers(0, kv_tokens))) if lengths else (q_tokens, kv_tokens)
    return Entry(problem, *ends, own=draw(st.integers(1, 16)), tile=draw(st.integers(1, 16)))


def resized(entry: Entry, q_tokens: int, kv_tokens: int, own: int = 1, tile: int = 1) -> Entry:
    """The entry with one of a few sizes, for what JAX compiles for each."""
    p = replace(entry.problem, q_tokens=q_tokens, kv_tokens=kv_tokens)
    ends = (min(entry.q_end, q_tokens), min(entry.kv_end, kv_tokens)) if p.lengths else (q_tokens, kv_tokens)
    return Entry(p, *ends, own, tile)


def tile_ranges(tiles: Any, tokens: int, own: int) -> list[tuple[int, tuple[int, ...]]]:
    """For each block of `own` of the tokens its first token and `tiles(token)`."""
    starts = np.arange(0, tokens, own, dtype=np.int32)
    as_many = np.resize(starts, MOST)  # always, so that JAX compiles nothing anew
    found = zip(*(np.broadcast_to(x, MOST).tolist() for x in jax.vmap(tiles)(as_many)))
    return list(zip(starts.tolist(), found))


def assert_ordered(ranges: tuple[int, ...], tokens: int, tile: int) -> None:
    """At least one tile, none outside the array, whole ones among them."""
    first, whole, whole_end, end = ranges
    assert 0 <= first <= whole <= whole_end <= end <= -(-tokens // tile)
    assert first < end


def assert_covers(seen: np.ndarray, first: int, end: int, tile: int) -> None:
    """No visible pair of [block, other tokens] lies outside the tiles [first, end)."""
    assert not seen[:, : first * tile].any()
    assert not seen[:, end * tile :].any()


@given(entries())
@example(Entry(P(1, 9, 4, 1, 1, 64, causal=True), 9, 4, 4, 4))  # rows that see nothing
@example(Entry(P(1, 8, 8, 1, 1, 64, lengths=True), 0, 0, 4, 4))
def test_tiles_of_keys_hold_all_that_is_visible_and_whole_ones_nothing_else(entry):
    p, seen = entry.problem, entry.seen()
    of_rows = lambda row: entry.terms.kv_range(row, entry.own, entry.tile)  # noqa: E731
    for row, ranges in tile_ranges(of_rows, p.q_tokens, entry.own):
        assert_ordered(ranges, p.kv_tokens, entry.tile)
        first, whole, whole_end, end = ranges
        assert_covers(seen[row : row + entry.own], first, end, entry.tile)
        keys = slice(whole * entry.tile, whole_end * entry.tile)
        assert whole == whole_end or keys.stop <= entry.kv_end
        assert seen[row : min(row + entry.own, entry.q_end), keys].all()


@given(entries())
@example(Entry(P(1, 4, 9, 1, 1, 64, window_left=1), 4, 9, 4, 4))  # keys that no row sees
@example(Entry(P(1, 8, 8, 1, 1, 64, lengths=True), 0, 0, 4, 4))
@example(Entry(P(1, 10, 8, 1, 1, 64), 10, 8, 4, 4))
def test_tiles_of_rows_hold_all_that_is_visible_and_whole_ones_nothing_else(entry):
    p, seen = entry.problem, entry.seen()
    of_keys = lambda key: entry.terms.q_range(key, entry.own, entry.tile)  # noqa: E731
    for key, ranges in tile_ranges(of_keys, p.kv_tokens, entry.own):
        assert_ordered(ranges, p.q_tokens, entry.tile)
        first, whole, whole_end, end = ranges
        assert_covers(seen[:, key : key + entry.own].T, first, end, entry.tile)
        assert whole == whole_end or key + entry.own <= entry.kv_end
        rows = slice(whole * entry.tile, min(whole_end * entry.tile, entry.q_end))
        assert seen[rows, key : key + entry.own].all()


@given(entries(window_left=-1, causal=True))
@example(Entry(P(1, 9, 4, 1, 1, 64, causal=True), 9, 4, 4, 4))  # rows that see nothing
def test_with_a_causal_mask_alone_a_row_sees_all_keys_up_to_its_last(entry):
    p, seen = entry.problem, entry.seen()
    last = np.asarray(entry.terms.last_key(np.arange(p.q_tokens, dtype=np.int32)))
    np.testing.assert_array_equal((np.arange(p.kv_tokens) <= last[:, None])[: entry.q_end], seen[: entry.q_end])


@pytest.mark.parametrize(
    "mask", [{}, {"window_left": 3}, {"causal": True, "window_left": 3}, {"causal": True, "segments": True}]
)
def test_a_last_key_alone_does_not_say_what_other_masks_show(mask):
    assert MaskTerms.of(P(1, 8, 8, 1, 1, 64, **mask), 8, 8).last_key is None


def least(seen: np.ndarray, tile: int) -> tuple[int, int]:
    """The fewest tiles that hold what is visible."""
    tokens = np.flatnonzero(seen.any(0))
    return (int(tokens[0]) // tile, int(tokens[-1]) // tile + 1) if len(tokens) else (0, 0)


def assert_least(seen: np.ndarray, first: int, end: int, tile: int) -> None:
    """The tiles [first, end) are the fewest that hold what is visible; where there is none, one."""
    low, high = least(seen, tile)
    assert end - first == max(1, high - low)


@given(entries())
def test_no_tile_is_visited_in_which_nothing_is_visible(entry):
    p, seen = entry.problem, entry.seen()
    of_rows = lambda row: entry.terms.kv_range(row, entry.own, entry.tile)  # noqa: E731
    for row, (first, _, _, end) in tile_ranges(of_rows, p.q_tokens, entry.own):
        assert_least(seen[row : row + entry.own], first, end, entry.tile)
    of_keys = lambda key: entry.terms.q_range(key, entry.own, entry.tile)  # noqa: E731
    for key, (first, _, _, end) in tile_ranges(of_keys, p.kv_tokens, entry.own):
        assert_least(seen[:, key : key + entry.own].T, first, end, entry.tile)


@given(entries(causal=True))
@example(Entry(P(1, 12, 12, 1, 1, 64, causal=True), 12, 12, 4, 4))
@example(Entry(P(1, 12, 5, 1, 1, 64, causal=True), 12, 5, 4, 2))  # rows that see nothing
def test_rows_pass_over_no_masked_tile_of_a_block_of_rows_in_which_they_see_something(entry):
    p, seen, rows = entry.problem, entry.seen(), 3 * entry.own

    def of_rows(row: Any) -> tuple[Any, ...]:
        order = BlockOrder.of(entry.terms.kv_range(row // rows * rows, rows, entry.tile))
        unseen = order.unseen(entry.terms.kv_range(row, entry.own, entry.tile))
        return unseen, order.masked, order.masked_block(0)

    for row, (unseen, masked, first) in tile_ranges(of_rows, p.q_tokens, entry.own):
        assert 0 <= unseen < masked
        passed = slice((first + 1 - unseen) * entry.tile, (first + 1) * entry.tile)
        assert not seen[row : min(row + entry.own, entry.q_end), passed].any()


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4, unique=True), st.sampled_from(["first", "last", "both", "none"]))
def test_each_tile_is_listed_once_and_those_to_be_masked_are(drawn, ends_that_are_whole):
    first, whole, whole_end, end = sorted(drawn)
    first = whole if ends_that_are_whole in ("first", "both") else first
    end = whole_end if ends_that_are_whole in ("last", "both") else end
    order = BlockOrder.of(BlockRange(*(jnp.int32(x) for x in (first, whole, whole_end, end))))
    masked = [int(order.masked_block(i)) for i in range(int(order.masked))]
    unmasked = [int(order.unmasked_block(i)) for i in range(int(order.unmasked))]
    assert sorted(masked + unmasked) == list(range(first, end))
    assert masked
    assert set(unmasked) <= set(range(whole, whole_end))
    assert len(unmasked) == whole_end - whole - (ends_that_are_whole == "both")


@given(entries(lengths=False))
def test_ranges_that_a_schedule_goes_by_are_those_of_visible_tokens(entry):
    p, seen, own = entry.problem, entry.seen(), entry.own
    for (first, end), by_row in ((keys_seen(p, own), seen), (rows_seeing(p, own), seen.T)):
        blocks = [by_row[i : i + own].any(0) for i in range(0, len(by_row), own)]
        wanted = [(tokens[0], tokens[-1] + 1) if len(tokens) else None for tokens in map(np.flatnonzero, blocks)]
        assert len(first) == len(end) == len(wanted)
        for low, high, tokens in zip(first, end, wanted):
            assert tokens == (low, high) if tokens else high <= low


# --- segments

NO_OPERANDS = Operands(**dict.fromkeys(field.name for field in dataclasses.fields(Operands)))


SIZES = st.sampled_from([(12, 12), (17, 5), (5, 17)])
TILES_OF_SEGMENTS = st.sampled_from([(4, 4), (3, 5), (8, 2)])


@st.composite
def segments_of(draw: Any, tokens: int, kind: str = "any") -> np.ndarray:
    """Ids that grow, or come in any order."""
    ids = np.array(draw(st.lists(st.integers(-2, 4), min_size=tokens, max_size=tokens)), np.int32)
    return np.sort(ids) if kind == "sorted" else ids


@given(st.data(), SIZES, TILES_OF_SEGMENTS, st.sampled_from(["sorted", "any"]))
def test_tiles_between_segments_hold_every_shared_pair(data, sizes, tiles, kind):
    own, tile = tiles
    mine, others = (data.draw(segments_of(tokens, kind)) for tokens in sizes)
    if sizes[0] == sizes[1]:
        others = mine
    found = np.asarray(segment_blocks(mine[None], others[None], own, tile))[0]
    assert found.shape == (-(-sizes[0] // own), 2)
    shared = mine[:, None] == others[None, :]
    for block, (first, end) in enumerate(found):
        pairs = shared[block * own : (block + 1) * own]
        assert 0 <= first <= end <= -(-sizes[1] // tile)
        assert_covers(pairs, first, end, tile)
        if others is mine and kind == "sorted":
            assert (first, end) == least(pairs, tile)


@given(st.data(), entries(segments=True), SIZES, TILES_OF_SEGMENTS, st.sampled_from(["sorted", "any"]))
def test_a_block_visits_all_that_is_visible_within_its_segments(data, entry, sizes, tiles, kind):
    entry = resized(entry, *sizes, *tiles)
    p, own, tile = entry.problem, entry.own, entry.tile
    mine, others = (data.draw(segments_of(tokens, kind)) for tokens in sizes)
    seen = entry.seen(mine, others)

    def of(tiles: Any) -> Operands:
        return replace(NO_OPERANDS, problem=p, optional=OptionalRefs(Inputs(None, entry.lengths), tiles, (1, 1)))

    by_rows, by_keys = (of(segment_blocks(x[None], y[None], own, tile)) for x, y in ((mine, others), (others, mine)))
    for row, ranges in tile_ranges(lambda row: by_rows.kv_range(0, row, own, tile), p.q_tokens, own):
        assert_ordered(ranges, p.kv_tokens, tile)
        assert_covers(seen[row : row + own], ranges[0], ranges[3], tile)
    for key, ranges in tile_ranges(lambda key: by_keys.q_range(0, key, own, tile), p.kv_tokens, own):
        assert_ordered(ranges, p.q_tokens, tile)
        assert_covers(seen[:, key : key + own].T, ranges[0], ranges[3], tile)


# --- pairs


@given(entries(lengths=False))
def test_pairs_counts_what_is_visible(entry):
    assert reference.pairs(entry.problem) == entry.seen().sum()


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_left": 9, "window_right": 3}])
@pytest.mark.parametrize("tokens", [(64, 64), (61, 47), (50, 83)])
def test_pairs_counts_the_segments_that_random_inputs_have(mask, tokens):
    problem = P(2, *tokens, 2, 1, 8, segments=True, **mask)
    inputs = Inputs.of(problem, model.inputs(problem, jax.random.key(0))[3:])
    seen = mask_of(problem, None, inputs.segments)
    assert reference.pairs(problem) == seen[0].sum() == seen[1].sum()


def test_operations_and_bytes_count_lengths_as_random_inputs_have_them_on_average():
    problem = P(4096, 40, 64, 2, 1, 8, lengths=True)
    q_lengths, kv_lengths = Inputs.of(problem, model.inputs(problem, jax.random.key(0))[3:]).lengths
    seen = (np.asarray(q_lengths, np.int64) * np.asarray(kv_lengths)).sum()
    assert reference.flops(problem) == pytest.approx(2 * 2 * 16 * seen, rel=0.02)
    read = 2 * 8 * (2 * np.asarray(q_lengths).sum() + 2 * np.asarray(kv_lengths).sum())
    written = 4096 * 40 * 2 * (2 * 8 + 4)
    assert reference.bytes_moved(problem) == pytest.approx(read + written, rel=0.02)


@given(st.data(), entries(), SIZES, st.booleans())
def test_visible_is_what_the_documentation_says(data, entry, sizes, segments):
    entry = resized(entry, *sizes)
    ids = [data.draw(segments_of(tokens)) for tokens in sizes] if segments else []
    found = mask_of(entry.problem, entry.lengths, tuple(x[None] for x in ids) or None)
    np.testing.assert_array_equal(found[0], entry.seen(*ids))


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_alignment_without_lengths(align):
    wanted = {"bottom_right": [[1, 1, 1, 0], [1, 1, 1, 1]], "top_left": [[1, 0, 0, 0], [1, 1, 0, 0]]}
    np.testing.assert_array_equal(mask_of(P(1, 2, 4, 1, 1, 64, causal=True, align=align))[0], wanted[align])


@examples(40)
@given(SIZES, st.integers(-20, 30), st.integers(-20, 30))
def test_lengths_out_of_range_count_as_the_nearest(sizes, q_length, kv_length):
    q_tokens, kv_tokens = sizes
    p = P(1, q_tokens, kv_tokens, 1, 1, 64, causal=True, lengths=True)
    nearest = min(max(q_length, 0), q_tokens), min(max(kv_length, 0), kv_tokens)
    lengths = jnp.array([q_length]), jnp.array([kv_length])
    terms = replace(NO_OPERANDS, problem=p, optional=OptionalRefs(Inputs(None, lengths), None, (1, 1))).mask_terms(0)
    assert (terms.q_end, terms.kv_end, terms.offset) == (*nearest, nearest[1] - nearest[0])
    np.testing.assert_array_equal(mask_of(p, lengths)[0], Entry(p, *nearest, 1, 1).seen())


def test_one_array_of_segment_ids_for_both_sides_hides_no_token_and_two_may():
    x, ids, others = jnp.zeros((1, 4, 1, 64)), jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32)
    assert not Arguments(x, x, x, q_segment_ids=ids, kv_segment_ids=ids).hides_tokens
    assert Arguments(x, x, x, q_segment_ids=ids, kv_segment_ids=others).hides_tokens


def test_rows_of_a_bias_have_whole_panels():
    bias = jnp.arange(24.0).reshape(1, 2, 3, 4)
    rows = np.asarray(launch.bias_rows(bias)).reshape(6, -1)
    assert rows.shape == (6, 64)
    np.testing.assert_array_equal(rows[:, :4], bias.reshape(6, 4))
    np.testing.assert_array_equal(rows[:, 4:], 0)


# --- tokens that nothing sees


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_left": 4, "window_right": 3}, {"window_right": 2, "align": "top_left"}]
)
@pytest.mark.parametrize("lengths", [None, ((9, 31), (40, 5))])
@pytest.mark.parametrize("pairs", [mask_module.FEW_PAIRS, 0])
def test_tokens_that_no_segment_shows_are_zeroed(mask, lengths, pairs, monkeypatch):
    monkeypatch.setattr(mask_module, "FEW_PAIRS", pairs)
    problem = P(2, 31, 40, 2, 1, 8, segments=True, lengths=lengths is not None, **mask)
    rng = np.random.default_rng(0)
    segments = tuple(jnp.array(rng.integers(-9, 9, (2, n)), jnp.int32) for n in (31, 40))
    lengths = None if lengths is None else tuple(jnp.array(x, jnp.int32) for x in lengths)
    q, k = jnp.ones((2, 31, 2, 8)), jnp.ones((2, 40, 1, 8))
    seen = mask_of(problem, lengths, segments)
    rows, keys, values = zero_unseen(problem, Inputs(None, lengths, segments), q, k, k)
    assert (rows == seen.any(2)[:, :, None, None]).all()
    assert (keys == seen.any(1)[:, :, None, None]).all()
    assert (values == keys).all()
