"""Schedules of collectives: what they cost, what they signal, and how a payload is cut."""

from __future__ import annotations

import itertools
from collections import Counter

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.collectives import schedules as collective
from mgpu_ops.collectives.schedules import MULTICAST, Cut, Move, Place, Schedule, Signal, Wait

EVERY = [
    (kind, algorithm, transport)
    for kind in ("all_reduce", "reduce_scatter", "all_gather")
    for transport in ("peer", "multimem")
    for algorithm in collective.algorithms(kind, transport)
]


def schedules(n: int) -> list[Schedule]:
    return [
        collective.schedule(kind, algorithm, n, transport, entry_barrier=entry_barrier)
        for (kind, algorithm, transport), entry_barrier in itertools.product(EVERY, (False, True))
    ]


@pytest.mark.parametrize("n", range(2, 9))
def test_as_many_signals_come_as_are_waited_for(n):
    for schedule in schedules(n):
        sent: Counter[str] = Counter()
        awaited: Counter[str] = Counter()
        for step in schedule.steps:
            if isinstance(step, Signal):
                sent[step.flag] += n if step.to == MULTICAST else len(step.to)
            elif isinstance(step, Wait):
                awaited[step.flag] += step.count
        assert sent == awaited, schedule.name
        assert set(sent) == set(schedule.flags)


def test_an_entry_barrier_stands_for_the_first_handshake_and_nothing_else():
    for kind, algorithm, transport in EVERY:
        without, behind = (collective.schedule(kind, algorithm, 4, transport, entry_barrier=b) for b in (False, True))
        assert without.flags == ("start", *behind.flags)
        assert without.steps[2:] == behind.steps
        assert (without.name, behind.name) == (behind.name.removesuffix("/entry_barrier"), without.name + "/entry_barrier")


SLICES = {  # sent, received, scratch in slices, of which a payload has n; waits behind an entry barrier; roundings
    ("all_reduce", "one_shot", "peer"): lambda n: (n * (n - 1), n * (n - 1), 0, 1, 1),
    ("all_reduce", "push_one_shot", "peer"): lambda n: (n * (n - 1), n * (n - 1), n * n, 1, 1),
    ("all_reduce", "ll_one_shot", "peer"): lambda n: (2 * n * (n - 1), 2 * n * (n - 1), 2 * n * n, 1, 1),
    ("all_reduce", "two_shot", "peer"): lambda n: (2 * (n - 1), 2 * (n - 1), 0, 1, 1),
    ("all_reduce", "push_two_shot", "peer"): lambda n: (2 * (n - 1), 2 * (n - 1), n, 2, 1),
    ("all_reduce", "ll_two_shot", "peer"): lambda n: (4 * (n - 1), 4 * (n - 1), 4 * n, 2, 1),
    ("all_reduce", "ring", "peer"): lambda n: (2 * (n - 1), 2 * (n - 1), n, 2 * (n - 1), n - 1),
    ("reduce_scatter", "one_shot", "peer"): lambda n: (n - 1, n - 1, 0, 1, 1),
    ("reduce_scatter", "push_one_shot", "peer"): lambda n: (n - 1, n - 1, n, 1, 1),
    ("reduce_scatter", "ll_one_shot", "peer"): lambda n: (2 * (n - 1), 2 * (n - 1), 2 * n, 1, 1),
    ("reduce_scatter", "ring", "peer"): lambda n: (n - 1, n - 1, n, n - 1, n - 1),
    ("all_gather", "one_shot", "peer"): lambda n: (n - 1, n - 1, 0, 1, 0),
    ("all_gather", "ll_one_shot", "peer"): lambda n: (2 * (n - 1), 2 * (n - 1), 2 * n, 1, 0),
    ("all_gather", "ring", "peer"): lambda n: (n - 1, n - 1, 0, n - 1, 0),
    ("all_reduce", "one_shot", "multimem"): lambda n: (n * n, n, 0, 1, 1),
    ("all_reduce", "two_shot", "multimem"): lambda n: (n + 1, n + 1, 0, 1, 1),
    ("reduce_scatter", "one_shot", "multimem"): lambda n: (n, 1, 0, 1, 1),
    ("all_gather", "one_shot", "multimem"): lambda n: (1, n, 0, 1, 0),
}


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("key", EVERY)
def test_traffic(n, key):
    kind, algorithm, transport = key
    sent, received, scratch, waits, roundings = SLICES[key](n)
    schedule = collective.schedule(kind, algorithm, n, transport, entry_barrier=True)
    traffic = collective.traffic(schedule, 100 * n)
    assert (traffic.sent, traffic.received, traffic.scratch) == (100 * sent, 100 * received, 100 * scratch)
    assert (traffic.waits, traffic.roundings) == (waits, roundings)
    assert traffic.flags == (0 if schedule.ll else len(schedule.flags))
    assert schedule.scratch_slices * (1 + schedule.ll) == scratch


def test_what_a_device_loads_and_stores_itself_is_local_traffic():
    traffic = collective.traffic(collective.schedule("all_reduce", "push_two_shot", 4, entry_barrier=True), 400)
    assert traffic.local == 300 + 100 + 300 + 100  # x to push, x to reduce, the scratch, out


def test_a_payload_that_n_does_not_divide_costs_whole_slices():
    assert collective.traffic(collective.schedule("all_gather", "one_shot", 4), 10).sent == 3 * 3


def test_which_results_are_the_same_bits():
    """in device order, in every run, on all devices"""
    for n in (2, 3, 8):
        properties = {
            key: (schedule.in_device_order, schedule.repeatable, schedule.same_on_all)
            for key in EVERY
            for schedule in [collective.schedule(key[0], key[1], n, key[2])]
        }
        rings = {key for key in EVERY if key[1] == "ring" and key[0] != "all_gather"}
        through_switch = {key for key in EVERY if key[2] == "multimem" and key[0] != "all_gather"}
        for key in EVERY:
            in_order = key not in through_switch and (key not in rings or n == 2)
            same = key != ("all_reduce", "one_shot", "multimem")
            assert properties[key] == (in_order, key not in through_switch, same), key


@pytest.mark.parametrize("n", range(2, 9))
def test_a_move_reads_from_each_device_in_the_order_of_turns(n):
    """The k-th read brings what device own + k contributes: its x, or what it left in the part of scratch with its number."""
    for schedule in schedules(n):
        for move in schedule.moves:
            if len(move.reads) != n or schedule.algorithm == "ring":
                continue
            for own in range(n):
                positions = [move.position(k, own, n) for k in range(n)]
                assert sorted(positions) == list(range(n))
                for position, place in zip(positions, move.reads, strict=True):
                    from_scratch = place.buffer == "scratch"
                    assert collective.relative(place.part if from_scratch else place.device, own, n) == position


def test_turns_and_relative_numbers_can_be_traced():
    assert collective.relative(-1, jnp.int32(0), 8) == 7
    assert Move((Place("x"), Place("x", 1)), (Place("out"),)).position(1, jnp.int32(1), 2) == 0


def test_no_move_stores_to_a_place_twice_or_goes_through_the_switch_with_others():
    for schedule in itertools.chain(*map(schedules, range(2, 9))):
        for move in schedule.moves:
            assert len(set(move.writes)) == len(move.writes)
            for places in (move.reads, move.writes):
                assert len(places) == 1 or MULTICAST not in [place.device for place in places]
            assert len(move.reads) <= schedule.reads_at_once <= schedule.n


@given(
    size=st.integers(1, 500), n=st.integers(2, 8), chunk=st.integers(1, 40), blocks=st.integers(1, 5), granule=st.integers(1, 9)
)
def test_blocks_share_the_chunks_of_a_part_and_parts_cover_the_payload(size, n, chunk, blocks, granule):
    cut = Cut(size, n, chunk, blocks, granule)
    assert cut.slice % granule == 0
    assert size <= n * cut.slice < size + n * granule
    for whole in (False, True):
        chunks = sorted(chunk for block in range(blocks) for chunk in cut.chunks(whole, block))
        assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
        assert chunks[-1][1] == cut.length(whole)
        assert all(0 < stop - start <= chunk for start, stop in chunks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "one_shot", 1), "n=1: a collective needs 2 devices or more"),
        (("all_reduce", "tree", 4), "algorithm='tree' is none of all_reduce on transport 'peer': one_shot, push_one_shot"),
        (("all_reduce", "ring", 4, "multimem"), "on transport 'multimem': one_shot, two_shot$"),
        (("broadcast", "one_shot", 4), "kind='broadcast', transport='peer': kinds are all_reduce, reduce_scatter, all_gather"),
        (("all_gather", "one_shot", 4, "xla"), "transport='xla': .* transports peer, multimem"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_what_there_is(arguments, message):
    with pytest.raises(ValueError, match=message):
        collective.schedule(*arguments)
