"""The simulator finds every fault planted in a schedule or a kernel, and none in ours."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.collectives import schedules as collective
from mgpu_ops.collectives.schedules import MULTICAST, Cut, Move, Place, Schedule, Signal, Wait
from tests.mgpu_ops.collectives import simulator
from tests.mgpu_ops.collectives.simulator import (
    Across,
    Call,
    Deadlock,
    Fault,
    Kernel,
    Race,
    Unspent,
    Wrong,
    explore,
    simulate,
)
from tests.thorough import examples

EVERY = [
    (kind, algorithm, transport)
    for kind in ("all_reduce", "reduce_scatter", "all_gather")
    for transport in ("peer", "multimem")
    for algorithm in collective.algorithms(kind, transport)
]
every_algorithm = pytest.mark.parametrize(("kind", "algorithm", "transport"), EVERY)
CHOOSERS = (simulator.lazily, simulator.eagerly, simulator.scripted(b"", 1))


def both(kind: str, algorithm: str, transport: str, n: int) -> tuple[Schedule, ...]:
    return tuple(collective.schedule(kind, algorithm, n, transport, entry_barrier=barrier) for barrier in (False, True))


# Ours


ONE, TWO = "ll_one_shot", "ll_two_shot"


def in_workspace(n: int, *halves: str, algorithms: tuple[str, ...] = (ONE,)) -> tuple[Call, ...]:
    """Small all-reduces one after the other, each with a half of a workspace, with nothing between them."""
    schedules = [collective.schedule("all_reduce", algorithm, n, entry_barrier=True) for algorithm in algorithms]
    plans = itertools.cycle([dataclasses.replace(schedule, entry_barrier=False) for schedule in schedules])
    buffers = ["x", *(f"after {i}" for i in range(1, len(halves))), "out"]
    return tuple(Call(next(plans), x, out, half) for (x, out), half in zip(itertools.pairwise(buffers), halves, strict=True))


@pytest.mark.parametrize("algorithms", [(ONE,), (TWO,), (ONE, TWO), (TWO, ONE)])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_calls_that_take_turns_with_two_halves_of_a_workspace_need_no_barrier(n, algorithms):
    """The minimum of minima is the minimum."""
    for choose in CHOOSERS:
        stages = in_workspace(n, "first", "second", algorithms=algorithms)
        simulate(stages, 7, blocks=2, chunk=2, calls=4, op="min", choose=choose)


@examples(60)
@given(
    n=st.integers(2, 5),
    algorithms=st.sampled_from([(ONE,), (TWO,), (ONE, TWO)]),
    size=st.integers(1, 12),
    blocks=st.integers(1, 3),
    script=st.binary(max_size=60),
    seed=st.integers(0, 99),
)
def test_two_halves_are_enough_whatever_the_order_of_events(n, algorithms, size, blocks, script, seed):
    stages = in_workspace(n, "first", "second", algorithms=algorithms)
    simulate(stages, size, blocks=blocks, chunk=2, calls=3, op="min", choose=simulator.scripted(script, seed))


def test_reduce_scatter_and_all_gather_take_turns_too():
    plans = [
        dataclasses.replace(collective.schedule(kind, "ll_one_shot", 3, entry_barrier=True), entry_barrier=False)
        for kind in ("reduce_scatter", "all_gather")
    ]
    for choose in CHOOSERS:
        simulate(
            (Call(plans[0], "x", "middle", "first"), Call(plans[1], "middle", "out", "second")), 11, calls=4, choose=choose
        )


@pytest.mark.parametrize("halves", [("first", "first"), ("first", "second", "first")])
def test_a_half_used_twice_in_a_row_is_a_race(halves):
    """Of one trip. Two trips are a handshake themselves."""
    faults = set()
    for seed in range(20):
        try:
            simulate(in_workspace(3, *halves), 7, calls=3, op="min", choose=simulator.scripted(b"", seed))
        except Fault as fault:
            faults.add(type(fault))
    assert Race in faults


@every_algorithm
def test_results_are_right_on_two_to_eight_devices_with_any_number_of_blocks_and_tails(kind, algorithm, transport):
    for n, blocks in itertools.product(range(2, 9), range(1, 4)):
        size = n * (2 * blocks + 1) - 1  # an odd slice, the last block with less to do than the others, the payload cut off
        schedule = collective.schedule(kind, algorithm, n, transport, entry_barrier=(n + blocks) % 2 == 0)
        simulate(schedule, size, blocks=blocks, chunk=2, choose=CHOOSERS[(n + blocks // 2) % 3])


@examples(150)
@given(
    key=st.sampled_from(EVERY),
    n=st.integers(2, 8),
    entry_barrier=st.booleans(),
    size=st.integers(1, 40),
    blocks=st.integers(1, 3),
    chunk=st.integers(2, 8),
    granule=st.integers(1, 4),
    op=st.sampled_from(["add", "min", "max"]),
    stages=st.integers(1, 3),
    script=st.binary(max_size=60),
    seed=st.integers(0, 2**32),
)
def test_results_are_right_whatever_the_order_of_events(
    key, n, entry_barrier, size, blocks, chunk, granule, op, stages, script, seed
):
    schedule = collective.schedule(key[0], key[1], n, key[2], entry_barrier=entry_barrier)
    kernel = Kernel(stages=stages)
    choose = simulator.scripted(script, seed)
    simulate(schedule, size, blocks=blocks, chunk=chunk, granule=granule, op=op, choose=choose, kernel=kernel)


@every_algorithm
def test_every_order_of_signals_between_two_devices_is_right(kind, algorithm, transport):
    for schedule in both(kind, algorithm, transport, 2):
        calls = 1 if transport == "multimem" and not schedule.entry_barrier else 2
        assert explore(schedule, 3, chunk=4, calls=calls) > 10


@pytest.mark.parametrize("algorithm", ["one_shot", "push_one_shot", "two_shot", "ring"])
def test_every_order_of_signals_between_three_devices_is_right(algorithm):
    schedule = collective.schedule("all_reduce", algorithm, 3, entry_barrier=True)
    assert explore(schedule, 3, calls=1) > 100


def test_every_order_of_signals_is_tried():
    """A flag that counts to two of three: which two those are differs, and one of the three orders is a race."""
    early = Wait("data", 1)
    push = collective.schedule("all_reduce", "push_one_shot", 3, entry_barrier=True)
    steps = tuple(early if step == Wait("data", 2) else step for step in push.steps)
    with pytest.raises(Race, match="scratch"):
        explore(dataclasses.replace(push, steps=steps), 3, calls=1)


def fractions(calls: int, devices: int, size: int) -> np.ndarray:
    """Numbers whose float32 sum depends on the order."""
    random = np.random.default_rng(1)
    return (random.normal(size=(calls, devices, size)) * 10.0 ** random.integers(-3, 4, (calls, devices, size))).astype(
        np.float32
    )


@every_algorithm
def test_sums_have_the_bits_that_the_schedule_promises(kind, algorithm, transport):
    """`simulate` itself compares with the sum in the order of devices, and devices with each other."""
    for schedule in both(kind, algorithm, transport, 5):
        inputs = fractions(2, 5, 4 if kind == "all_gather" else 20)
        runs = [simulate(schedule, 20, blocks=2, chunk=2, inputs=inputs, choose=choose) for choose in CHOOSERS]
        assert all((run == runs[0]).all() for run in runs)


def test_devices_may_differ_where_each_lets_the_switch_sum_for_itself():
    out = simulate(collective.schedule("all_reduce", "one_shot", 5, "multimem"), 20, inputs=fractions(2, 5, 20))
    assert (out[0] != out[0, 0]).any()


@pytest.mark.parametrize("transport", ["peer", "multimem"])
@pytest.mark.parametrize(("hosts", "n"), [(1, 4), (2, 2), (2, 4), (3, 3)])
def test_an_all_reduce_over_hosts_is_scatter_within_reduce_across_gather_within(hosts, n, transport):
    names = (collective.algorithms(kind, transport) for kind in ("reduce_scatter", "all_gather"))
    combinations = itertools.product(itertools.product(*names), (False, True))
    for ((scatter, gather), entry_barrier), choose in zip(combinations, itertools.cycle(CHOOSERS)):
        stages = simulator.two_level(
            collective.schedule("reduce_scatter", scatter, n, transport, entry_barrier=entry_barrier),
            collective.schedule("all_gather", gather, n, transport, entry_barrier=entry_barrier),
        )
        simulate(stages, 3 * n + 1, hosts=hosts, blocks=2, chunk=1, choose=choose)
        simulate(stages, 7, hosts=hosts, inputs=fractions(2, hosts * n, 7))


def test_hosts_that_forget_to_reduce_across_are_found():
    scatter, gather = (collective.schedule(kind, "one_shot", 2) for kind in ("reduce_scatter", "all_gather"))
    in_place = Across("middle")
    with pytest.raises(Wrong):
        simulate((Call(scatter, "x", "middle"), Call(gather, "middle", "out"), in_place), 8, hosts=2)


def test_two_groups_of_a_mesh_do_not_meddle():
    for choose in CHOOSERS:
        out = simulate(collective.schedule("all_reduce", "two_shot", 2), 9, hosts=3, choose=choose)
        assert (out[:, 0] == out[:, 1]).all()
        assert (out[:, 0] != out[:, 2]).any()


# Faults

N, BLOCKS, SIZE = 3, 2, 14  # slices of 5, the last one of 4


RIGHT = Kernel()


def found(schedule: Schedule, kernel: Kernel = RIGHT, size: int = SIZE, inputs: np.ndarray | None = None) -> set[type[Fault]]:
    """What is found, whatever the order of events."""
    faults = set()
    for choose in CHOOSERS:
        with pytest.raises(Fault) as fault:
            simulate(schedule, size, blocks=BLOCKS, chunk=2, choose=choose, kernel=kernel, inputs=inputs)
        faults.add(fault.type)
    return faults


def with_step(schedule: Schedule, i: int, *steps: Move | Signal | Wait) -> Schedule:
    return dataclasses.replace(schedule, steps=schedule.steps[:i] + steps + schedule.steps[i + 1 :])


def steps_of(kind: str, algorithm: str, transport: str, which: type) -> Iterator[tuple[Schedule, int]]:
    for schedule in both(kind, algorithm, transport, N):
        for i, step in enumerate(schedule.steps):
            if isinstance(step, which):
                yield schedule, i


@every_algorithm
def test_a_missing_handshake_is_a_race(kind, algorithm, transport):
    for schedule in both(kind, algorithm, transport, N):
        for flag in schedule.flags:
            steps = tuple(step for step in schedule.steps if isinstance(step, Move) or step.flag != flag)
            assert found(dataclasses.replace(schedule, steps=steps)) == {Race}, (schedule.name, flag)


@every_algorithm
def test_a_missing_start_without_an_entry_barrier_is_a_race(kind, algorithm, transport):
    behind = collective.schedule(kind, algorithm, N, transport, entry_barrier=True)
    assert found(dataclasses.replace(behind, entry_barrier=False)) == {Race}


@every_algorithm
def test_a_dropped_wait_or_one_that_waits_for_too_few_is_found(kind, algorithm, transport):
    for schedule, i in steps_of(kind, algorithm, transport, Wait):
        wait = schedule.steps[i]
        assert found(with_step(schedule, i)) <= {Race, Unspent, Deadlock}, (schedule.name, i)
        assert found(with_step(schedule, i, Wait(wait.flag, wait.count - 1))) <= {Race, Unspent, Deadlock}, (schedule.name, i)


@every_algorithm
def test_a_dropped_signal_or_a_wait_for_too_many_is_a_deadlock(kind, algorithm, transport):
    for schedule, i in steps_of(kind, algorithm, transport, Signal):
        assert Deadlock in found(with_step(schedule, i)), (schedule.name, i)
    for schedule, i in steps_of(kind, algorithm, transport, Wait):
        wait = schedule.steps[i]
        assert Deadlock in found(with_step(schedule, i, Wait(wait.flag, wait.count + 1))), (schedule.name, i)


@every_algorithm
def test_a_signal_to_the_wrong_device_is_found(kind, algorithm, transport):
    for schedule, i in steps_of(kind, algorithm, transport, Signal):
        signal = schedule.steps[i]
        to = range(N) if signal.to == MULTICAST else signal.to
        for k, other in itertools.product(range(len(to)), (1, 2)):
            if to[k] != 0:  # a device's signal to itself says nothing: anyone's may take its place
                found(with_step(schedule, i, Signal((*to[:k], to[k] + other, *to[k + 1 :]), signal.flag)))


@every_algorithm
def test_a_wrong_part_or_device_of_a_move_is_found(kind, algorithm, transport):
    def wrong(place: Place) -> Iterator[Place]:
        yield dataclasses.replace(place, part=0 if place.part is None else place.part + 1)
        yield dataclasses.replace(place, device=0 if place.device == MULTICAST else place.device + 1)

    for schedule, i in steps_of(kind, algorithm, transport, Move):
        move = schedule.steps[i]
        found(with_step(schedule, i))
        for field in ("reads", "writes"):
            places = getattr(move, field)
            for k, place in enumerate(places):
                for other in wrong(place):
                    if (kind, algorithm) == ("all_reduce", "one_shot") and other == Place("out", 1):
                        continue  # all devices sum the same: each may as well do it for the next, thanks to the end handshake
                    if (kind, algorithm) == ("all_reduce", "ll_one_shot") and other in (Place("scratch", 1, 0), Place("x", 1)):
                        continue  # what it has itself written to the next one; who sends whose x makes no difference either
                    changed = {field: (*places[:k], other, *places[k + 1 :])}
                    found(with_step(schedule, i, dataclasses.replace(move, **changed)))


@every_algorithm
def test_a_signal_before_its_stores_are_done_is_a_race(kind, algorithm, transport):
    """Where the kernel does not drain its stores, and where the schedule signals too early."""
    for schedule, i in steps_of(kind, algorithm, transport, Signal):
        if i == 0 or not isinstance(schedule.steps[i - 1], Move):
            continue
        move = schedule.steps[i - 1]
        early = dataclasses.replace(
            schedule, steps=(*schedule.steps[: i - 1], schedule.steps[i], move, *schedule.steps[i + 1 :])
        )
        assert found(early) == {Race}, (schedule.name, i)
        if any(write.device not in (0,) for write in move.writes):  # who stores to itself alone has drained when it leaves
            assert found(schedule, Kernel(drains=lambda step, i=i: step != i)) == {Race}, (schedule.name, i)


@every_algorithm
def test_chunks_that_overlap_or_leave_gaps_are_found(kind, algorithm, transport):
    def too_short(cut: Cut, whole: bool, block: int) -> Iterator[tuple[int, int]]:
        for start, stop in Cut.chunks(cut, whole, block):
            yield start, stop - (stop == cut.length(whole))

    def too_long(cut: Cut, whole: bool, block: int) -> Iterator[tuple[int, int]]:
        for start, _ in Cut.chunks(cut, whole, block):
            yield start, start + cut.chunk

    def too_many(cut: Cut, whole: bool, block: int) -> Iterator[tuple[int, int]]:
        yield from Cut.chunks(cut, whole, block)
        yield 0, 1

    def one_late(cut: Cut, whole: bool, block: int) -> Iterator[tuple[int, int]]:
        for start, stop in Cut.chunks(cut, whole, block):
            yield start + 1, stop

    for schedule in both(kind, algorithm, transport, N):
        assert found(schedule, Kernel(chunks=too_many)) == {Race}
        found(schedule, Kernel(chunks=one_late))
        found(schedule, Kernel(chunks=too_short), size=15)
        if any(write.part is not None for move in schedule.moves for write in move.writes):
            found(schedule, Kernel(chunks=too_long))  # beyond a part lies another; what lies beyond a buffer is clipped


def as_listed(move: Move, k: int, own: int, n: int) -> int:
    """Each device's own order: wrong where the order of devices is promised."""
    return k


@every_algorithm
def test_a_sum_in_another_order_than_promised_is_found(kind, algorithm, transport):
    for schedule in both(kind, algorithm, transport, N):
        if schedule.in_device_order and kind != "all_gather":
            assert found(schedule, Kernel(position=as_listed), inputs=fractions(2, N, SIZE)) == {Wrong}


def test_devices_that_hold_different_bits_are_found_where_sums_are_only_bounded():
    stages = (Call(collective.schedule("all_reduce", "one_shot", N)), Across("out"))
    inputs = fractions(2, 2 * N, SIZE)
    simulate(stages, SIZE, hosts=2, inputs=inputs)
    with pytest.raises(Wrong, match="devices 0 and 1 hold different bits"):
        simulate(stages, SIZE, hosts=2, inputs=inputs, kernel=Kernel(position=as_listed))


@pytest.mark.parametrize("choose", CHOOSERS)
def test_a_missing_handshake_is_found_on_a_mesh(choose):
    scatter, gather = (collective.schedule(kind, "one_shot", N) for kind in ("reduce_scatter", "all_gather"))
    for stages in (
        simulator.two_level(dataclasses.replace(scatter, steps=scatter.steps[:-2]), gather),
        simulator.two_level(scatter, dataclasses.replace(gather, steps=gather.steps[:-2])),
    ):
        with pytest.raises(Race):
            simulate(stages, SIZE, hosts=2, choose=choose)


# What is said


def test_a_race_names_both_accesses_and_the_elements():
    schedule = collective.schedule("all_reduce", "one_shot", 2)
    without_end = dataclasses.replace(schedule, steps=schedule.steps[:-2])
    with pytest.raises(Race) as fault:
        simulate(without_end, 4)
    assert str(fault.value) == (
        "race on x of device 0, elements 0 to 1: device 1 block 0 in call 0, step 2 reads them, "
        "the program of device 0 in call 1 writes them, and no signal orders the two"
    )


def test_a_deadlock_names_who_waits_for_what():
    schedule = collective.schedule("all_reduce", "one_shot", 3)
    with pytest.raises(Deadlock) as fault:
        simulate(with_step(schedule, 3), 4)
    assert str(fault.value) == "deadlock: " + "; ".join(
        f"device {d} block 0 in call 0, step 3 waits for 2 of 'end' and has 0" for d in range(3)
    )


def test_a_flag_left_over_is_named():
    schedule = collective.schedule("all_gather", "one_shot", 2, entry_barrier=True)
    with pytest.raises(Unspent, match="at the entry barrier of call 1 flag 'more' of device 1 block 0 is 1, not 0"):
        simulate(dataclasses.replace(schedule, steps=(Signal((1,), "more"), *schedule.steps)), 4)


def test_a_wrong_result_is_named():
    schedule = collective.schedule("all_gather", "one_shot", 2)
    with pytest.raises(Wrong, match=r"wrong result in call 0: out\[0\] of device 0 is nan, not"):
        simulate(with_step(schedule, 2), 4)
