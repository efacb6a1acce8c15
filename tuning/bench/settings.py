"""The settings of competitors: which of them is the fastest on a problem, within a time."""

from __future__ import annotations

import functools
import pickle
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mgpu_ops.core import aot
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning.compile_pool import Call, Pool
from mgpu_ops.tuning.measure import median_us
from mgpu_ops.tuning.terminal import brief

Timer = Callable[[Sequence[Callable[[], Any]], Gpu, int], list[list[float]]]  # measure.interleaved
Function = Callable[..., Any]  # of arrays; jax.jit can trace it
CompiledCall = Callable[[], Any]  # a function on certain arrays, compiled
Prepared = tuple[Function, str]  # a function of the context's arrays, and its settings as text


@dataclass(frozen=True)
class TuningContext:
    """What a competitor is tuned for, and with what."""

    problem: Any
    gpu: Gpu
    arrays: tuple  # what the function will take
    timer: Timer
    grad: bool = False  # whether the function will be differentiated
    seconds: float = 60.0  # that compiling its settings may take, about
    known: frozenset[str] = frozenset()  # settings, as text, that won an earlier run: others are not tried again
    pool: Pool | None = None  # processes that compile; None: threads of this one do


class Precompiled:
    """A function that is compiled already for certain arrays."""

    def __init__(self, function: Function, arrays: tuple, call: CompiledCall):
        self._function, self.arrays, self.call = function, arrays, call

    def __call__(self, *arrays: Any) -> Any:
        return self._function(*arrays)


def compiled(function: Function, arrays: tuple) -> CompiledCall:
    """The call `function(*arrays)`, compiled ahead."""
    if isinstance(function, Precompiled) and list(map(id, function.arrays)) == list(map(id, arrays)):
        return function.call
    return partial(jax.jit(function).lower(*arrays).compile(), *arrays)


# --- Search -------------------------------------------------------------------------------------------------------------


def as_text(setting: Any) -> str:
    """A setting, a tuple of (name, value), as "name=value ..."."""
    return " ".join(f"{name}={value}" for name, value in setting)


def settings_in(config: str) -> frozenset[str]:
    """The settings, as text, in the config of a competitor's measurement."""
    return frozenset(part.strip() for part in re.split(r"[;|]", config))


@dataclass(frozen=True)
class SettingSpace:
    """The settings that a competitor may have, the most promising first.

    Without `passes` all are tried. With them, each pass varies its own fields only. The first pass tries, for each value of
    its fields, the first setting that has it. A later pass tries all settings that differ from one of the two fastest so far
    in its fields alone.
    """

    settings: Sequence[Hashable]
    build: Callable[[Any], Function]  # the function that has a setting
    passes: Sequence[Sequence[str]] = ()  # names of fields
    pairs: Callable[[Any], Iterable[tuple[str, Any]]] = tuple  # the fields of a setting, (name, value)
    text: Callable[[Any], str] = as_text

    def fields(self, setting: Any, names: Collection[str]) -> tuple:
        """The fields of a setting that have one of these names."""
        return tuple((name, value) for name, value in self.pairs(setting) if name in names)

    def others(self, setting: Any, names: Collection[str]) -> tuple:
        """The fields of a setting that have none of these names."""
        return tuple((name, value) for name, value in self.pairs(setting) if name not in names)


def fastest(context: TuningContext, space: SettingSpace) -> Prepared:
    """The function of the fastest setting, and which that is; as `best_setting`."""
    best, call, text = best_setting(context, space)
    return Precompiled(space.build(best), context.arrays, call), text


def best_setting(context: TuningContext, space: SettingSpace) -> tuple[Any, CompiledCall, str]:
    """The fastest setting, by the medians of interleaved rounds with an L2 flush before each call; its call; and as text.

    Settings compile in their order until the context's seconds are over; one that does not compile, or not in time, is passed
    over. Functions that `build` makes compile in the context's pool if pickle takes them. ValueError where no setting compiles.
    """
    search = _Search(context, space)
    known = [setting for setting in space.settings if space.text(setting) in context.known]
    if known or not space.passes:
        best = search.ranked(known or space.settings, context.seconds)[0]
    else:
        best = search.ranked_in_passes()[0]
    told = f"fastest of {len(search.calls)}" + " that won before" * bool(known)
    late = search.errors.count(_LATE)
    told += f", {late} were not in time" * bool(late)
    return best, search.calls[best], f"{space.text(best)}; {told}"


class _Search:
    """The settings that were compiled so far, and why others were not."""

    def __init__(self, context: TuningContext, space: SettingSpace):
        self._context, self._space = context, space
        self.calls: dict[Hashable, CompiledCall] = {}
        self.errors: list[str] = []

    def ranked(self, settings: Sequence[Hashable], seconds: float) -> list[Any]:
        """Those of the settings that compile within `seconds`, or did before, the fastest first."""
        functions = {setting: self._space.build(setting) for setting in settings if setting not in self.calls}
        made, failed = _compiled(functions, self._context, seconds)
        self.calls.update(made)
        self.errors.extend(failed)
        legal = [setting for setting in settings if setting in self.calls]
        if not legal:
            last = f"; the last: {self.errors[-1]}" if self.errors else ""
            raise ValueError(f"none of {len(self._space.settings)} settings compiles{last}")
        samples = self._context.timer([self.calls[setting] for setting in legal], self._context.gpu, 3)
        times = dict(zip(legal, map(median_us, samples), strict=True))
        return sorted(times, key=lambda setting: times[setting])

    def ranked_in_passes(self) -> list[Any]:
        """What the last pass tried, the fastest first. The passes share the context's seconds evenly."""
        space, seconds = self._space, self._context.seconds
        end = time.monotonic() + seconds
        first: dict[tuple, Hashable] = {}
        for setting in space.settings:
            first.setdefault(space.fields(setting, space.passes[0]), setting)
        ranked = self.ranked(list(first.values()), seconds / len(space.passes))
        for number, names in enumerate(space.passes[1:], 1):
            near = {space.others(best, names) for best in ranked[:2]}
            some = [setting for setting in space.settings if space.others(setting, names) in near]
            ranked = self.ranked(some, max(0.0, end - time.monotonic()) / (len(space.passes) - number))
        return ranked


# --- Compiling many -----------------------------------------------------------------------------------------------------

_LATE = "too slow to compile"
_Calls = tuple[dict[Hashable, CompiledCall], list[str]]  # what compiles, and why the rest does not


def _compiled(functions: Mapping[Hashable, Function], context: TuningContext, seconds: float) -> _Calls:
    """The calls of functions on the context's arrays, compiled side by side, in `seconds` or a little more.

    They compile in the processes of the context's pool. Threads of this process compile instead where there is no pool, where
    pickle takes none of the functions, and where this machine loads nothing that another process compiled.
    """
    start = time.monotonic()
    if context.pool is not None and functions:
        made, errors = _in_processes(context.pool, functions, context, seconds)
        if made or errors.count(_LATE) == len(errors):
            return made, errors
    return _in_threads(functions, context, max(0.0, seconds - (time.monotonic() - start)))


def _in_processes(pool: Pool, functions: Mapping[Hashable, Function], context: TuningContext, seconds: float) -> _Calls:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in context.arrays)
    topology = _attached()
    jobs = {}
    made: dict[Hashable, CompiledCall] = {}
    errors = []
    for setting, function in functions.items():
        call = Call(function, shapes, context.gpu, topology)
        try:
            pickle.dumps(call)  # asked first: a process that cannot be sent its job would have to be replaced
        except Exception as error:
            errors.append(brief(error))
        else:
            jobs[setting] = pool.submit(call)
    wait(jobs.values(), seconds)
    for setting, job in jobs.items():
        if job.cancel() or not job.done():
            errors.append(_LATE)
            continue
        try:
            found = job.result()
            if isinstance(found, Executable):
                made[setting] = partial(aot.load(found), *context.arrays)
            else:
                errors.append(_LATE if found.kind == "timeout" else found.detail)
        except Exception as error:  # this machine does not load it
            errors.append(brief(error))
    return made, errors


@functools.cache
def _attached() -> bytes | None:
    try:
        return aot.attached()
    except jax.errors.JaxRuntimeError:  # of a plugin that cannot describe a device
        return None


def _in_threads(functions: Mapping[Hashable, Function], context: TuningContext, seconds: float) -> _Calls:
    threads = ThreadPoolExecutor(8)
    jobs = {setting: threads.submit(compiled, function, context.arrays) for setting, function in functions.items()}
    wait(jobs.values(), seconds)
    threads.shutdown(cancel_futures=True)  # waits for those in progress
    made: dict[Hashable, CompiledCall] = {}
    errors = []
    for setting, job in jobs.items():
        if job.cancelled():
            errors.append(_LATE)
        elif error := job.exception():  # a setting beyond the kernel's limits, as of shared memory, raises
            errors.append(brief(error))
        else:
            made[setting] = job.result()
    return made, errors
