"""The settings of competitors: which are compiled and timed, and which of them is kept. No GPU, no kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning import compile_pool
from mgpu_ops.tuning.bench import settings
from mgpu_ops.tuning.outcome import Outcome

H200 = gpus.find("h200")


SETTINGS = [(("tile", tile), ("raster", raster)) for tile in (64, 128, 192) for raster in (1, 2, 4)]
COST = {64: 30.0, 128: 10.0, 192: 12.0}


class Clock:
    """Times settings by their fields: by default 10 us for tile 128, 12 for 192, 30 for 64, and the raster on top."""

    def __init__(self) -> None:
        self.us: Callable[[dict[str, int]], float] = lambda fields: COST[fields["tile"]] + fields["raster"]
        self.built: dict[int, Any] = {}
        self.passes: list[list[Any]] = []

    def build(self, setting: Any) -> Callable[..., Any]:
        def function(x: jax.Array) -> jax.Array:
            return x

        self.built[id(function)] = setting
        return function

    def compiled(self, function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
        setting = self.built[id(function)]

        def call() -> Any:
            return setting

        return call

    def timer(self, functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
        timed = [dict(f()) for f in functions]
        self.passes.append([tuple(fields.values()) for fields in timed])
        return [[self.us(fields)] * rounds for fields in timed]

    def fastest(self, tried: Sequence[Any] = SETTINGS, passes: Sequence[Sequence[str]] = (), **changes: Any) -> str:
        """What `fastest` says of these settings."""
        context = settings.TuningContext(None, H200, (jnp.ones(3),), self.timer, **changes)
        return settings.fastest(context, settings.SettingSpace(tried, self.build, passes))[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(settings, "compiled", clock.compiled)
    return clock


PASSES = (("tile",), ("raster",))


def test_one_pass_times_every_setting_and_keeps_the_fastest(clock: Clock) -> None:
    text = clock.fastest()
    assert text == "tile=128 raster=1; fastest of 9"
    assert len(clock.passes) == 1


def test_two_passes_first_choose_the_tiles_and_then_all_else_of_the_two_fastest(clock: Clock) -> None:
    text = clock.fastest(SETTINGS, PASSES)
    assert clock.passes == [[(64, 1), (128, 1), (192, 1)], [(t, r) for t in (128, 192) for r in (1, 2, 4)]]
    assert text == "tile=128 raster=1; fastest of 7"


def test_each_pass_varies_its_fields_alone_from_the_two_fastest_so_far(clock: Clock) -> None:
    clock.us = lambda fields: 100 * fields["tile"] + 10 * fields["steps"] + fields["raster"]
    tried = [(("tile", t), ("steps", s), ("raster", r)) for t in (3, 1, 2) for s in (4, 2) for r in (8, 1)]
    text = clock.fastest(tried, (("tile",), ("steps",), ("raster",)))
    assert clock.passes[0] == [(t, 4, 8) for t in (3, 1, 2)]  # the first of each tile
    assert clock.passes[1] == [(t, s, 8) for t in (1, 2) for s in (4, 2)]
    assert clock.passes[2] == [(1, s, r) for s in (4, 2) for r in (8, 1)]
    assert text == "tile=1 steps=2 raster=1; fastest of 7"


def test_settings_that_won_before_are_not_tuned_again(clock: Clock) -> None:
    earlier = settings.settings_in("tile=192 raster=4; fastest of 7 | tile=64 raster=1; fastest of 7")
    text = clock.fastest(SETTINGS, PASSES, known=earlier)
    assert clock.passes == [[(64, 1), (192, 4)]]
    assert text == "tile=192 raster=4; fastest of 2 that won before"


def test_settings_of_another_version_that_won_before_are_no_hindrance(clock: Clock) -> None:
    text = clock.fastest(SETTINGS, PASSES, known=frozenset(["tile=8"]))
    assert text == "tile=128 raster=1; fastest of 7"


def test_settings_beyond_the_kernels_limits_are_passed_over(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
        call = clock.compiled(function, arrays)
        if dict(call())["tile"] == 128:
            raise ValueError("Mosaic GPU kernel exceeds available shared memory")
        return call

    monkeypatch.setattr(settings, "compiled", compiled)
    text = clock.fastest(SETTINGS, PASSES)
    assert text == "tile=192 raster=1; fastest of 6"
    with pytest.raises(ValueError, match="none of 3 settings compiles; the last: ValueError: Mosaic GPU kernel exceeds"):
        clock.fastest(SETTINGS[3:6])


def test_what_does_not_compile_in_time_is_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
        time.sleep(0.3)
        return clock.compiled(function, arrays)

    monkeypatch.setattr(settings, "compiled", slow)
    many = [(("tile", 64), ("raster", i)) for i in range(100)]
    text = clock.fastest(many, seconds=0.1)
    found = re.fullmatch(r"tile=64 raster=\d+; fastest of (\d+), (\d+) were not in time", text)
    assert found
    done, late = map(int, found.groups())
    assert done >= 1
    assert done + late == 100


def test_no_setting_at_all_is_told(clock: Clock) -> None:
    with pytest.raises(ValueError, match="none of 0 settings compiles"):
        clock.fastest([])


# --- compiling many


class FakePool:
    """Answers each call at once, as processes would: with what `answer` makes of its setting, or not at all."""

    def __init__(self, answer: Callable[[Any], Any]):
        self.answer, self.calls = answer, list[compile_pool.Call]()

    def submit(self, call: compile_pool.Call) -> Future[Any]:
        self.calls.append(call)
        future: Future[Any] = Future()
        found = self.answer(call.function.args[0])
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future


def product(setting: int, a: jax.Array) -> jax.Array:
    return a * setting


def in_a_pool(pool: FakePool, **changes: Any) -> tuple[Callable[..., Any], str]:
    def timer(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
        return [[float(f()[0])] * rounds for f in functions]

    context = settings.TuningContext(None, H200, (jnp.ones(3),), timer, pool=pool, **changes)  # type: ignore[arg-type]
    return settings.fastest(context, settings.SettingSpace([3, 2, 1], lambda setting: partial(product, setting), text=str))


def test_settings_compile_in_the_pool_and_what_won_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.aot, "load", lambda executable: partial(product, executable.registers))
    pool = FakePool(lambda s: Outcome("compile", detail="no") if s == 1 else Executable(b"", (None, None), s, 0))
    function, said = in_a_pool(pool)
    assert said == "2; fastest of 2"
    assert [(call.function.args, call.shapes[0].shape, call.gpu) for call in pool.calls] == [
        ((s,), (3,), H200) for s in (3, 2, 1)
    ]
    monkeypatch.setattr(jax, "jit", None)
    assert settings.compiled(function, function.arrays)()[0] == 2.0


def test_what_the_pool_does_not_answer_in_time_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.aot, "load", lambda executable: partial(product, executable.registers))
    _, said = in_a_pool(FakePool(lambda s: Executable(b"", (None, None), s, 0) if s == 3 else None), seconds=0.01)
    assert said == "3; fastest of 1, 2 were not in time"


def test_what_no_process_can_compile_or_no_gpu_loads_compiles_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(executable: Any) -> Any:
        raise RuntimeError("INVALID_ARGUMENT: unexpected PJRT version")

    monkeypatch.setattr(settings.aot, "load", refuses)
    for answer in (Executable(b"", (None, None), 1, 0), Outcome("compile", detail="no CUDA here")):
        assert in_a_pool(FakePool(lambda s, answer=answer: answer))[1] == "1; fastest of 3"


def test_a_function_that_pickle_does_not_take_compiles_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that were asked all the same would have to be replaced."""
    monkeypatch.setattr(settings.pickle, "dumps", lambda call: 1 / 0)
    pool = FakePool(lambda s: None)
    assert in_a_pool(pool)[1] == "1; fastest of 3"
    assert pool.calls == []
