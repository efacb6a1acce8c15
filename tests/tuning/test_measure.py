"""Times from CUPTI, cut up by who launched which kernel; and the error of a result. CUPTI is played by a list here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.core.gpu import find
from mgpu_ops.tuning import measure, nvml

GPU = find("h200")
times = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50)


# --- samples


@given(times)
def test_the_median_lies_among_the_samples_and_the_spread_within_their_range(samples: list[float]) -> None:
    assert min(samples) <= measure.median_us(samples) <= max(samples)
    assert 0.0 <= measure.spread_us(samples) <= max(samples) - min(samples)


def test_the_spread_is_from_the_10th_to_the_90th_percentile() -> None:
    assert measure.spread_us([float(x) for x in range(101)]) == pytest.approx(80.0)
    assert measure.spread_us([5.0]) == 0.0
    assert measure.spread_us([5.0, 5.0, 5.0]) == 0.0


def test_one_outlier_moves_the_median_little() -> None:
    assert measure.median_us([10.0, 11.0, 12.0, 1e9, 10.5]) == 11.0


@pytest.mark.parametrize(
    ("seconds", "us", "rounds"),
    [(1.0, 50_000.0, 20), (1.0, 1e9, 5), (1.0, 1.0, 100), (0.0, 10.0, 5), (1.0, 0.0, 100), (0.001, 100.0, 10)],
)
def test_rounds_fill_the_time_within_their_bounds(seconds: float, us: float, rounds: int) -> None:
    assert measure.rounds_for(seconds, us) == rounds


@given(st.floats(0, 1e4), st.floats(0, 1e9), st.integers(1, 50), st.integers(50, 500))
def test_rounds_are_never_out_of_bounds(seconds: float, us: float, low: int, high: int) -> None:
    assert low <= measure.rounds_for(seconds, us, low, high) <= high


# --- the error of a result


def test_the_error_is_the_largest_difference_relative_to_the_reference_and_its_rms() -> None:
    ref = jnp.array([[3.0, -4.0], [0.0, 5.0]])
    out = ref.at[1, 0].add(0.5).at[1, 1].add(0.5)
    rms = math.sqrt((9 + 16 + 25) / 4)
    assert measure.error(out, ref) == pytest.approx(0.5 / rms)  # at the zero, not at the 5
    assert measure.error(ref, ref) == 0.0


def test_the_error_is_computed_in_float32_whatever_the_dtypes() -> None:
    ref = jnp.full((4, 4), 1000.0, jnp.bfloat16)
    out = jnp.full((4, 4), 1001.0, jnp.float16)
    assert measure.error(out, ref) == pytest.approx(1 / 2000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite_passes_no_limit(bad: float) -> None:
    ref = jnp.ones((4, 4))
    assert not measure.error(ref.at[1, 2].set(bad), ref) <= 1e30


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_lets_nothing_pass(bad: float) -> None:
    """Of infinity in the reference alone every finite result would be near: a check that checks nothing."""
    ref = jnp.ones((4, 4)).at[0, 0].set(bad)
    assert not measure.error(jnp.zeros((4, 4)), ref) <= 1e30


def test_infinities_that_both_have_are_no_error_and_leave_the_rest_as_it_is() -> None:
    """The logarithm of no sum at all is infinite, and right."""
    ref = jnp.array([3.0, -4.0, math.inf, -math.inf])
    assert measure.error(ref, ref) == 0.0
    rms = math.sqrt((9 + 16) / 2)
    assert measure.error(ref.at[0].add(0.5), ref) == pytest.approx(0.5 / (3 + rms))
    for out in (ref.at[2].set(-math.inf), ref.at[2].set(1e30), ref.at[0].set(math.inf)):
        assert math.isnan(measure.error(out, ref))


def test_zeros_where_zeros_are_wanted_are_no_error() -> None:
    assert measure.error(jnp.zeros((2, 2)), jnp.zeros((2, 2))) == 0.0
    assert not measure.error(jnp.full((2, 2), 1e-30), jnp.zeros((2, 2))) <= 1e30


def test_the_error_of_several_arrays_is_that_of_the_worst() -> None:
    out, lse = jnp.full((4, 4), 2.0), jnp.full((4,), 8.0)
    assert measure.error((out, lse), (out, lse)) == 0.0
    assert measure.error((out, lse + 1), (out, lse)) == pytest.approx(1 / 16)
    assert measure.error([out + 1, lse + 1], (out, lse)) == pytest.approx(1 / 4)
    for wrong in ((out, lse * math.nan), (out,), out, (out, lse, lse), (out, lse[:3])):
        assert math.isnan(measure.error(wrong, (out, lse)))


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (1, 4), (4,), (1, 4, 4), ()])
def test_a_result_of_another_shape_passes_no_limit(shape: tuple[int, ...]) -> None:
    assert math.isnan(measure.error(jnp.ones(shape), jnp.ones((4, 4))))


# --- the same bits


DTYPES = [
    jnp.bfloat16,
    jnp.float16,
    jnp.float32,
    jnp.int8,
    jnp.int32,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.bool_,
    jnp.int4,
    jnp.uint4,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_is_a_difference_in_any_dtype(dtype: Any) -> None:
    x = jnp.arange(16).astype(dtype)
    y = x.at[3].set(x[4] if dtype != jnp.bool_ else False)
    assert measure.same((x, x), (x, x))
    assert not measure.same((x, x), (x, y))
    assert measure.fingerprint((x, y)) == measure.fingerprint([x, y]) != measure.fingerprint((x, x))


def test_signs_of_zero_differ_and_equal_nans_do_not() -> None:
    zero, nan = jnp.zeros(3), jnp.full(3, jnp.nan)
    assert not measure.same(zero, -zero)
    assert measure.same(nan, nan)


def test_results_of_other_shapes_differ() -> None:
    assert not measure.same(jnp.zeros(3), jnp.zeros((3, 1)))


# --- a clock that drifts


def test_a_clock_holds_within_its_drift_and_scales_to_the_first_time() -> None:
    clock = measure.Clock(100.0, 100.0)
    assert clock.holds(112.0)
    assert clock.holds(88.0)
    assert not clock.holds(120.0)
    assert not clock.holds(80.0)
    assert clock.scale == 1.0
    clock.now = 125.0
    assert clock.holds(125.0)
    assert clock.scale == 0.8


# --- times of functions that take turns


class FakeGpu:
    """Launches add (name, milliseconds) to what CUPTI collects; the flush takes 9 ms in `flush_kernels` kernels."""

    def __init__(self, flush_kernels: int = 1):
        self.collecting: list[tuple[str, float]] | None = None
        self.order: list[str] = []
        self.flush_kernels = flush_kernels

    def launch(self, name: str, ms: float) -> None:
        self.order.append(name)
        if self.collecting is not None:
            self.collecting.append((name, ms))

    def flush(self) -> np.ndarray:
        for _ in range(self.flush_kernels):
            self.launch("flush", 9.0)
        return np.zeros(1)

    @contextlib.contextmanager
    def cupti(self) -> Iterator[list[tuple[str, float]]]:
        timings: list[tuple[str, float]] = []
        self.collecting, found = [], timings
        try:
            yield timings
        finally:  # CUPTI tells at the end
            found.extend(self.collecting)
            self.collecting = None

    def function(self, name: str, kernels: list[float]) -> Callable[[], np.ndarray]:
        """A function of several kernels, each a tenth slower at every call."""
        calls = 0

        def call() -> np.ndarray:
            nonlocal calls
            for ms in kernels:
                self.launch(name, ms * (1 + calls / 10))
            calls += 1
            return np.zeros(1)

        return call


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGpu], FakeGpu]:
    def installed(fake: FakeGpu) -> FakeGpu:
        monkeypatch.setattr(measure, "_cupti", fake.cupti)
        monkeypatch.setattr(measure, "_flusher", lambda l2_bytes: fake.flush)
        return fake

    return installed


@pytest.mark.parametrize("flush_kernels", [1, 3])
def test_samples_are_the_sums_of_each_functions_own_kernels(flush_kernels: int, install: Callable[[FakeGpu], FakeGpu]) -> None:
    fake = install(FakeGpu(flush_kernels))
    functions = [fake.function("a", [0.001]), fake.function("b", [0.002, 0.003, 0.004]), fake.function("c", [0.05])]
    samples = measure.interleaved(functions, GPU, rounds=4)
    later = [1 + call / 10 for call in range(2, 6)]  # two calls warmed up and counted kernels
    for found, us in zip(samples, (1.0, 9.0, 50.0), strict=True):
        assert found == pytest.approx([us * x for x in later])


def test_functions_take_turns_each_after_a_flush(install: Callable[[FakeGpu], FakeGpu]) -> None:
    fake = install(FakeGpu())
    functions = [fake.function(name, [0.001]) for name in "ab"]
    fake.order.clear()
    measure.interleaved(functions, GPU, rounds=3)
    assert fake.order[-12:] == ["flush", "a", "flush", "b"] * 3


def test_a_function_that_launches_other_kernels_than_before_is_an_error_that_says_what_to_do(
    install: Callable[[FakeGpu], FakeGpu],
) -> None:
    fake = install(FakeGpu())
    calls = 0

    def varies() -> np.ndarray:
        nonlocal calls
        calls += 1
        for _ in range(1 + (calls == 4)):
            fake.launch("varies", 0.001)
        return np.zeros(1)

    with pytest.raises(measure.MeasurementError, match=r"CUPTI saw 13 kernels .* 3 rounds.*another profiler.*nsys"):
        measure.interleaved([varies, fake.function("b", [0.001])], GPU, rounds=3)


def test_kernels_of_somebody_else_are_an_error(install: Callable[[FakeGpu], FakeGpu]) -> None:
    fake = install(FakeGpu())
    calls = 0

    def disturbed() -> np.ndarray:
        nonlocal calls
        calls += 1
        fake.launch("ours", 0.001)
        if calls == 5:
            fake.launch("of another thread", 0.001)
        return np.zeros(1)

    with pytest.raises(measure.MeasurementError, match="another thread using this GPU"):
        measure.interleaved([disturbed], GPU, rounds=5)


def test_no_kernel_at_all_is_an_error_that_says_what_to_do(install: Callable[[FakeGpu], FakeGpu]) -> None:
    install(FakeGpu())
    with pytest.raises(measure.MeasurementError, match=r"no kernel: .*without nsys, ncu or cuda-gdb.*run on the GPU"):
        measure.interleaved([lambda: np.zeros(1)], GPU, rounds=3)


def test_a_second_subscriber_of_cupti_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import mosaic_gpu

    class Busy:
        @staticmethod
        def _cupti_init() -> None:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(mosaic_gpu, "_mosaic_gpu_ext", Busy)
    with (
        pytest.raises(measure.MeasurementError, match=r"CUPTI cannot start \(.*MULTIPLE.*without nsys, ncu"),
        measure._cupti(),
    ):
        pass


def test_the_flush_reads_more_than_the_l2_and_leaves_nothing_to_write_back() -> None:
    flush = measure._flusher(4096)
    assert flush().shape == ()
    assert flush() == measure.FLUSHED * 4096 / 4  # ones, all of them read
    assert measure.FLUSHED >= 2
    assert measure._flusher(4096) is flush


def test_a_warm_sample_is_the_second_of_two_calls_in_a_row(install: Callable[[FakeGpu], FakeGpu]) -> None:
    fake = install(FakeGpu())
    functions = [fake.function(name, [0.001]) for name in "ab"]
    samples = measure.warm(functions, GPU, rounds=3)
    assert fake.order[-12:] == ["a", "a", "b", "b"] * 3
    assert "flush" not in fake.order
    seconds = [1 + call / 10 for call in (3, 5, 7)]  # two calls warmed up and counted kernels
    assert samples == [pytest.approx(seconds)] * 2


def test_on_several_devices_a_sample_is_the_time_of_one_turn_and_no_cache_is_flushed(
    install: Callable[[FakeGpu], FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUPTI reports the kernels of all devices in any order: each sample is a session of its own."""
    fake = install(FakeGpu())
    monkeypatch.setattr(measure, "wall", lambda f, calls: 0.0)
    functions = [fake.function("ours", [0.004] * 8), fake.function("theirs", [0.006] * 8)]  # 2 devices, 4 calls in a row
    fake.order.clear()
    ours, theirs = measure.interleaved(functions, GPU, rounds=3, devices=2, calls=4)
    assert "flush" not in fake.order
    assert fake.order[-32:] == (["ours"] * 16 + ["theirs"] * 16)  # one call to meet, one that is timed
    assert ours == pytest.approx([4.0 * (1 + call / 10) for call in (3, 5, 7)])
    assert theirs == pytest.approx([6.0 * (1 + call / 10) for call in (3, 5, 7)])


@pytest.mark.parametrize(("gpu_us", "host_us", "sample"), [(8.0, 20.0, 20.0), (20.0, 8.0, 20.0), (60.0, 100.0, 60.0)])
def test_on_several_devices_a_call_that_waits_for_the_host_takes_what_the_host_does(
    install: Callable[[FakeGpu], FakeGpu], monkeypatch: pytest.MonkeyPatch, gpu_us: float, host_us: float, sample: float
) -> None:
    fake = install(FakeGpu())
    monkeypatch.setattr(measure, "kernels", lambda f: [("ours", gpu_us)] * 8)
    monkeypatch.setattr(measure, "_count", lambda f: 8)
    monkeypatch.setattr(measure, "wall", lambda f, calls: calls * 4 * host_us)
    ((one,),) = measure.interleaved([fake.function("ours", [0.001])], GPU, rounds=1, devices=2, calls=4)
    assert one == sample


def test_on_several_devices_too_kernels_of_somebody_else_are_an_error(install: Callable[[FakeGpu], FakeGpu]) -> None:
    fake = install(FakeGpu())
    calls = 0

    def disturbed() -> np.ndarray:
        nonlocal calls
        calls += 1
        for _ in range(2 + (calls == 4)):
            fake.launch("kernel", 0.001)
        return np.zeros(1)

    with pytest.raises(measure.MeasurementError, match=r"CUPTI saw 3 kernels where 2 were launched: .*these GPUs"):
        measure.interleaved([disturbed], GPU, rounds=3, devices=2)


# --- sustained


class Clocked:
    """A GPU that runs calls one after the other, on a clock that only waiting for it moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0  # of the host
        self.busy = 0.0  # when the GPU is done with all that is queued
        self.ran: list[str] = []
        self.held = 0  # results that are alive
        self.most = 0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def function(self, name: str, us: float, host_us: float = 1.0) -> Callable[[], Any]:
        def call() -> Result:
            self.now += host_us * 1e-6
            self.busy = max(self.busy, self.now) + us * 1e-6
            self.ran.append(name)
            return Result(self, self.busy)

        return call


class Result:
    def __init__(self, clocked: Clocked, end: float) -> None:
        self._clocked, self._end = clocked, end
        clocked.held += 1
        clocked.most = max(clocked.most, clocked.held)

    def __del__(self) -> None:
        self._clocked.held -= 1

    def is_ready(self) -> bool:
        return self._clocked.now >= self._end

    def block_until_ready(self) -> None:
        self._clocked.now = max(self._clocked.now, self._end)


class PlayedMeter:
    """700 W at a clock of 1500 MHz."""

    def between(self, start: float, end: float) -> Any:
        return nvml.Power(1500.0, 700.0, 700.0 * (end - start))


def test_a_sustained_turn_is_time_over_calls_and_energy_over_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    functions = [clocked.function("a", 1000.0), clocked.function("b", 2000.0)]
    found = measure.sustained(functions, 0.1, 3, PlayedMeter())  # type: ignore[arg-type]
    for turns, us in zip(found, (1000.0, 2000.0), strict=True):
        assert [turn.us for turn in turns] == pytest.approx([us] * 3)
        assert [turn.joules for turn in turns] == pytest.approx([700 * us * 1e-6] * 3)
        assert {(turn.clock_mhz, turn.watts) for turn in turns} == {(1500.0, 700.0)}


def test_sustained_turns_follow_each_other_without_a_pause_and_hold_few_results(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    functions = [clocked.function("a", 1000.0), clocked.function("b", 250.0)]
    measure.sustained(functions, 0.05, 2)
    began = len(clocked.ran)
    assert clocked.busy == pytest.approx((clocked.ran.count("a") * 1000 + clocked.ran.count("b") * 250) * 1e-6, rel=1e-3)
    assert began > 1000
    assert clocked.most <= 5000 / 250 + 3  # as many calls as are queued, however many are made
    turns = [name for name, before in zip(clocked.ran[8:], ["", *clocked.ran[8:]]) if name != before]
    assert turns.count("b") == 2


def test_the_first_turns_do_not_count_until_the_time_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)

    def throttled() -> Result:
        """At first 1 ms, after a second 1.25 ms, as under a power cap."""
        return clocked.function("a", 1000.0 if clocked.now < 1 else 1250.0)()

    assert measure.sustained([throttled], 0.1, 1) == [[measure.Turn(pytest.approx(1250.0))]]
    clocked.now = clocked.busy = 0.0
    clocked.ran.clear()
    measure.sustained([clocked.function("a", 1000.0)], 0.1, 1)
    assert len(clocked.ran) * 1e-3 == pytest.approx(4 * 0.5 + 0.1 + 0.5, abs=0.05)


def test_calls_that_the_host_cannot_queue_in_time_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    with pytest.raises(measure.MeasurementError, match="so short ones cannot be queued without gaps; measure them in bursts"):
        measure.sustained([clocked.function("a", 5.0, host_us=20.0)], 0.01, 1)


def test_what_is_typical_of_turns_is_the_median_of_each_number() -> None:
    turns = [measure.Turn(10.0, 1500.0, None), measure.Turn(12.0, 1400.0, 600.0), measure.Turn(11.0, 1600.0, 700.0)]
    assert measure.typical(turns) == measure.Turn(11.0, 1500.0, 650.0, None)
