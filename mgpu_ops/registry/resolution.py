"""Which config a call uses, and whether the kernel runs with it or XLA. `resolve` takes it from the first of these sources that
has one:

1. Explicit: `argument`, `override` (`use_configs`), `environment` (`MGPU_OPS_CONFIG_PATH`). What
   cannot be read or cannot run raises.
2. Stored for exactly this problem: `user`, `shipped`, `family` (the user's and the shipped files of
   other GPUs with the same architecture and SM count). Every measured entry comes before every
   modelled one, whichever file it is in: a modelled entry never hides a measured one. Then those of the objective come first
   that $MGPU_OPS_OBJECTIVE names, "burst" (the default) or "sustained".
3. `near`: the entry of those files for the nearest other problem, again measured before modelled, unless the op's model
   puts its config behind the default for this problem, or it was no faster than the default there.
4. `default`: the op's analytic choice.

Then it says whether a call that names no backend runs the kernel or XLA (`winner.py`): by the entry's times where it is one of
this very problem, and by the op's models or a near entry where there is none. A Config that the program names, in 1, is for the
kernel; a file that it names is read as any other. With `OpSpec.unmeasured`, XLA runs until an entry was measured.

In a job of several processes (`jax.distributed.initialize`), whose machines may have other files, the first process to resolve
a problem from files or by default decides for all of them and for as long as the job lasts: the others' source is `job`.

In 2 and 3 an entry is passed over that `database.check_entry` refuses: no call could have its problem, it fails the op's
`check`, it is for another kernel version, or it was slower than the default when it was measured. A broken entry, and a file
that cannot be read, are passed over with one warning.

This happens while JAX traces. `use_configs` is part of jit's trace key; a file or an environment
variable that changes later does not retrace a function that is already traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import msgspec

from mgpu_ops.core.gpu import Gpu, family
from mgpu_ops.core.limits import field_fault
from mgpu_ops.registry import database, job, winner
from mgpu_ops.registry.database import (
    OBJECTIVES,
    AnyPath,
    DatabaseError,
    Entry,
    Evidence,
    Objective,
    check_entry,
    decode,
    key_of_fields,
    kind,
    read_bytes,
    stale_kernel,
    title,
    to_config,
)
from mgpu_ops.registry.spec import baseline_of
from mgpu_ops.registry.winner import Times, Winner

if TYPE_CHECKING:
    from mgpu_ops.registry.spec import Baseline, Config, OpSpec, Problem

# A near entry whose gain over the default is known may be modelled this much slower: then it won on every recorded sweep.
NEAR_SLACK = 1.02
NEAR_GAIN = 1.004  # how much faster than the default it must promise to be here: less was a loss on recorded sweeps


# --- overrides


class _Snapshot(NamedTuple):
    """A database file as it was when `use_configs` was entered: hashable, for jit's trace key."""

    path: Path
    data: bytes


# Layers, innermost first; each a tuple of (op, Config | "xla" | ((Problem, Config | "xla"), ...) | _Snapshot).
_overrides: Any = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_configs(configs: Mapping[str, Any] | AnyPath) -> Iterator[None]:
    """What `mgpu_ops.use_configs` does, which knows what ops there are."""
    layer = _layer(configs)
    with _overrides((layer, *(_overrides.value or ()))):
        yield


def overrides() -> Any:
    """What `use_configs` says here, for `overridden`."""
    return _overrides.value


def overridden(by: Any) -> contextlib.AbstractContextManager[None]:
    """As in the place where `overrides()` gave `by`, whatever `use_configs` says here."""
    return _overrides(by)


def _layer(configs: Mapping[str, Any] | AnyPath) -> tuple[tuple[str, Any], ...]:
    if isinstance(configs, str | os.PathLike):
        snapshot = _Snapshot(Path(configs), read_bytes(configs))
        return ((decode(snapshot.data, path=configs).op, snapshot),)
    if isinstance(configs, Mapping):
        return tuple((op, frozen(op, configs[op])) for op in sorted(configs))
    raise TypeError(f"use_configs takes {{op: config}} or a path, not {configs!r}")


def frozen(op: str, answer: Any) -> Any:
    """What `use_configs` is given for an op, hashable: a Config, "xla", or a tuple of pairs. TypeError for anything else."""
    if _is_config(answer):
        return answer
    pairs = [p for p in answer if _is_pair(p)] if isinstance(answer, Sequence) else []
    if not pairs or len(pairs) != len(answer):
        raise TypeError(f"use_configs: {op} takes a Config or [(Problem, Config)], not {answer!r}")
    return tuple(map(tuple, pairs))


def _is_config(answer: Any) -> bool:
    return dataclasses.is_dataclass(answer) or answer == "xla"


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and dataclasses.is_dataclass(pair[0]) and _is_config(pair[1])


# --- resolution


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Which config a call uses, whether it runs the kernel with it, and why.

    config: of the kernel, also where XLA runs.
    runs: what a call runs that names no backend. times: by which this was decided; None where there are none, or where others
      decided (the program, another process).
    """

    config: Any  # the op's Config
    source: str  # argument, override, environment, user, shipped, family, near, default or job
    path: Path | None = None  # the file it came from
    entry: Entry | None = None
    distance: float | None = None  # of a `near` entry's problem
    nearest: Entry | None = None  # of a default: for a comparable problem, where it is no better than the default
    tried: tuple[tuple[str, str], ...] = ()  # (source, what was found or why it was passed over)
    runs: Winner = "kernel"
    times: Times | None = None


class _Query(NamedTuple):
    spec: OpSpec
    problem: Problem
    gpu: Gpu
    tried: list[tuple[str, str]]

    def note(self, source: str, what: str) -> None:
        self.tried.append((source, what))


class StoredEntry(NamedTuple):
    """A checked entry of a file. problem and config are None if it is broken or of another kernel version."""

    path: Path
    entry: Entry
    problem: Problem | None
    config: Config | None
    fault: str | None  # why it is not used unless somebody names its file
    key: tuple[Any, ...]  # of its problem


class _Agreed(msgspec.Struct):
    """What the processes of a job agree on."""

    runs: Winner
    config: dict[str, Any]


_logged: set[tuple[Any, ...]] = set()
_warned: set[str] = set()


def resolve(spec: OpSpec, problem: Problem, gpu: Gpu, config: Config | None = None) -> Resolution:
    """The config for a problem on a GPU, and whether the kernel or XLA runs, by the order at the top of this module.

    Logs a choice once, at INFO to the logger "mgpu_ops", unless it is the `config` given.
    Raises ValueError for a config that cannot run, DatabaseError for an explicit file that cannot be used, TypeError for what
    is no `spec.Config`. So `spec.check` has passed for whatever it returns.
    """
    result = _resolve(spec, problem, gpu, config)
    key = (spec.name, problem, gpu.key, result.source, result.config, result.runs)
    if result.source != "argument" and key not in _logged:
        _logged.add(key)
        instead = "" if result.runs == "kernel" else f"; XLA runs{versus(result)}"
        logging.getLogger("mgpu_ops").info(
            "%s %s on %s: %s from %s%s", spec.name, problem, gpu.key, result.config, _place(result, problem), instead
        )
    return result


def _resolve(spec: OpSpec, problem: Problem, gpu: Gpu, config: Config | None) -> Resolution:
    query = _Query(spec, problem, gpu, [])
    by_program = _argument(query, config) or _override(query)
    found = by_program or _environment(query) or _stored(query)
    _require(query, found)
    if by_program is None:  # else it is the same in every process
        found = _agreed(query, found)
    return dataclasses.replace(found, tried=tuple(query.tried))


def objective() -> Objective:
    """What entries are to be the fastest at, by $MGPU_OPS_OBJECTIVE; "burst" where it is not set."""
    name = os.environ.get("MGPU_OPS_OBJECTIVE") or "burst"
    for known in OBJECTIVES:
        if name == known:
            return known
    raise ValueError(f"MGPU_OPS_OBJECTIVE={name!r} is not one of {', '.join(OBJECTIVES)}")


def _agreed(query: _Query, found: Resolution) -> Resolution:
    """The choice of the first process of the job to resolve this problem: files may differ between machines."""
    spec, problem, gpu, _ = query
    if job.size() == 1:
        return found
    fields = msgspec.json.encode(dataclasses.asdict(problem)).decode()
    mine = msgspec.json.encode(_Agreed(found.runs, dataclasses.asdict(found.config))).decode()
    first = job.first(f"config/{gpu.key}{'/shared' * gpu.shares_sms}/{spec.name}/{spec.version}/{fields}", mine)
    if first == mine:
        return found
    here = f"{found.config} from {_place(found, problem)}{', through XLA' * (found.runs == 'xla')}"
    query.note("job", f"another process of this job chose first; here it would be {here}")
    theirs = msgspec.json.decode(first, type=_Agreed)
    agreed = Resolution(to_config(spec, theirs.config), "job", runs=theirs.runs)
    _require(query, agreed)
    return agreed


def _argument(query: _Query, config: Config | None) -> Resolution | None:
    if config is not None:
        return _named(query, config, "argument")
    query.note("argument", "no config= was given")
    return None


def _override(query: _Query) -> Resolution | None:
    layers = _overrides.value or ()
    for answer in (answer for layer in layers for op, answer in layer if op == query.spec.name):
        if isinstance(answer, _Snapshot):
            if found := _exact(query, "override", answer.path, answer.data):
                return found
            continue
        config = dict(answer).get(query.problem) if isinstance(answer, tuple) else answer
        if config is not None:
            return _named(query, config, "override")
    query.note("override", "no use_configs has one for this problem")
    return None


def _named(query: _Query, config: Config | Literal["xla"], source: str) -> Resolution:
    """A Config that the program names: for the kernel, unless it says itself that XLA runs."""
    spec, problem, gpu, _ = query
    if config == "xla" and (reason := _why_not_xla(baseline_of(spec, problem))) is not None:
        query.note(source, f"xla was asked for: {reason}")
        return Resolution(spec.default(problem, gpu), source)
    if config == "xla" or (isinstance(config, spec.Config) and spec.leaves_to_xla(config)):
        return Resolution(spec.default(problem, gpu), source, runs="xla")
    return Resolution(config, source)


def _environment(query: _Query) -> Resolution | None:
    what = "MGPU_OPS_CONFIG_PATH names no file for this GPU and op"
    for path in _environment_paths(query.gpu.key, query.spec.name):
        data = read_bytes(path)
        if decode(data, path=path).op != query.spec.name:  # the paths may name one file per op
            continue
        if found := _exact(query, "environment", path, data):
            return found
        what = f"{path}: no entry for this problem"
    query.note("environment", what)
    return None


def _exact(query: _Query, source: str, path: Path, data: bytes) -> Resolution | None:
    """The entry of a file that was named explicitly; DatabaseError if the file has one of another kernel version only."""
    fields = dataclasses.asdict(query.problem)
    entries = _entries(query.spec, query.gpu, path, data)
    matches = [stored for stored in entries if stored.key == key_of_fields(fields)]
    if not matches:
        return None
    wanted = objective()
    of = [(stored, stored.entry.evidence) for stored in matches]
    stored, _ = min(of, key=lambda r: (r[0].config is None, r[1].kind == "modelled", r[1].objective != wanted))
    if stored.config is None:
        raise DatabaseError(path, f"{fields}: {stored.fault}")
    return _decided(query, Resolution(stored.config, source, path, stored.entry))


def _require(query: _Query, found: Resolution) -> None:
    """Raises for a config that cannot run. Every call's config passes here: kernels do not check theirs again."""
    spec, problem, gpu, _ = query
    what = f"{spec.name}: {found.config} from {_place(found, problem)}"
    if not isinstance(found.config, spec.Config):
        raise TypeError(f"{what} must be a {spec.Config.__module__}.{spec.Config.__qualname__}")
    reason = field_fault(found.config) or spec.check(problem, found.config, gpu)
    if reason is not None:
        raise ValueError(f"{what} cannot run {problem} on {gpu.key}: {reason}")


def _stored(query: _Query) -> Resolution:
    """The best entry of the user's, the shipped and the family's files that can run, or the default."""
    spec, problem, gpu, _ = query
    key, wanted = key_of_fields(dataclasses.asdict(problem)), objective()
    plain = key_of_fields(dataclasses.asdict(spec.plain(problem)))
    ranked = []
    for level, (source, owner, path) in enumerate(_stored_files(gpu, spec.name)):
        for stored in _stored_entries(query, source, owner, path):
            modelled, other = stored.entry.evidence.kind == "modelled", stored.entry.evidence.objective != wanted
            if stored.key == key:
                ranked.append(((False, modelled, 0.0, other, level), source, stored))
            elif stored.fault is None:
                distance = spec.distance(problem, stored.problem)
                if distance is not None:
                    ranked.append(((True, modelled, distance, other, level), "near", stored))

    failed = 0
    nearest: tuple[StoredEntry, float] | None = None
    for (near, _, distance, _, _), source, stored in sorted(ranked, key=lambda candidate: candidate[0]):
        reason = stored.fault or spec.check(problem, stored.config, gpu)
        as_own = near and stored.key == plain
        if reason is None and near and not as_own:
            nearest, reason = nearest or (stored, distance), _behind(query, stored)
        if reason is None:
            found = Resolution(stored.config, source, stored.path, stored.entry, distance if near else None)
            return _decided(query, found, (stored, distance) if near and not as_own else None)
        failed += near
        if failed <= 3:  # enough to see why
            query.note(source, f"{stored.path}: {_whose(stored.entry, problem)} passed over: {reason}")
        if nearest and stored.entry.evidence.default_us is None:  # what the default takes is known by the model alone
            break
    query.note("near", f"none of {failed} entries for comparable problems can run this one")
    default = Resolution(spec.default(problem, gpu), "default", nearest=nearest[0].entry if nearest else None)
    return _decided(query, default, nearest)


def _decided(query: _Query, found: Resolution, near: tuple[StoredEntry, float] | None = None) -> Resolution:
    """What was found, and whether the kernel runs with it or XLA. `near`: an entry for another problem, and its distance."""
    spec, problem, gpu, _ = query
    said = near[0].config if near else found.config
    if said is not None and spec.leaves_to_xla(said):
        return dataclasses.replace(found, config=spec.default(problem, gpu), runs="xla")
    baseline = baseline_of(spec, problem)
    if (reason := _why_not_xla(baseline)) is not None:
        query.note("xla", reason)
        return found
    times = winner.measured(found.entry, baseline) if found.entry is not None and near is None else None
    if times is not None and found.source == "family":
        times = dataclasses.replace(times, how="family")
    unmeasured = spec.unmeasured(problem)
    entry = near[0].entry if near else found.entry
    if near is not None and spec.unmeasured(near[0].problem) != unmeasured:
        near = entry = None  # times of another kernel say nothing of this one
    if unmeasured is None:
        times = times or winner.expected(spec, problem, found.config, gpu, baseline, objective())
    if times is None and near is not None and (there := winner.measured(near[0].entry, baseline)):
        times = winner.expected_from(there, near[1], spec.cost(problem, found.config, gpu) * 1e6)
    if times is None:
        query.note("xla", f"no time of {baseline.name} is known for this problem or one near it")
        if unmeasured is None or (entry is not None and entry.evidence.kind == "measured"):
            return found
        query.note("xla", unmeasured)
        return dataclasses.replace(found, runs="xla")
    times = dataclasses.replace(times, shares_sms=gpu.shares_sms and spec.baseline_keeps_sms)
    query.note("xla", f"{times}: XLA runs where the kernel takes {times.margin:g} of its time or more")
    return dataclasses.replace(found, runs=times.winner, times=times)


def _stored_entries(query: _Query, source: str, owner: Gpu, path: Path) -> tuple[StoredEntry, ...]:
    """The entries of `owner`'s file. The file may be missing; if it, or an entry, is broken, there is one warning."""
    try:
        entries = _entries(query.spec, owner, path, read_bytes(path))
    except DatabaseError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            query.note(source, f"passed over: {error}")
            _warn_once(f"{error}. mgpu_ops goes on without this file.")
        elif source != "family":
            query.note(source, f"{path}: no such file")
        return ()
    broken = [stored for stored in entries if stored.problem is None and stale_kernel(stored.entry, query.spec) is None]
    if broken:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        what = f"{path}: {title(broken[0].entry)}: {broken[0].fault}"
        _warn_once(f"{what}. mgpu_ops goes on without this entry{others}: see `mgpu-tune validate`.")
    key = key_of_fields(dataclasses.asdict(query.problem))
    kinds = [kind(stored.entry) for stored in entries if stored.key == key]
    what = f"{path}: {len(entries)} entries, {' and '.join(kinds) or 'none'} for this problem"
    query.note(source, what)
    return entries


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


# Keyed by content: a changed file is always noticed, and a trace costs one read and one hash.
@functools.lru_cache(maxsize=64)
def _entries(spec: OpSpec, gpu: Gpu, path: Path, data: bytes) -> tuple[StoredEntry, ...]:
    entries = decode(data, path=path, gpu_key=gpu.key, op=spec.name).entries
    return tuple(StoredEntry(path, entry, *check_entry(entry, gpu, spec), key_of_fields(entry.problem)) for entry in entries)


def _why_not_xla(baseline: Baseline) -> str | None:
    """Why a baseline cannot run in the kernel's place, here and now, or None."""
    reason = baseline.differs or baseline.missing()
    return None if reason is None else f"{baseline.name} cannot run instead: {reason}"


# --- files


def _environment_paths(gpu_key: str, op: str) -> Iterator[Path]:
    """What MGPU_OPS_CONFIG_PATH names: files, or directories that may hold <gpu key>/<op>.json."""
    for part in filter(None, os.environ.get("MGPU_OPS_CONFIG_PATH", "").split(os.pathsep)):
        path = Path(os.path.expanduser(part))
        if not path.exists():
            raise DatabaseError(path, "does not exist: correct or unset MGPU_OPS_CONFIG_PATH")
        if not path.is_dir():
            yield path
        elif (inside := path / gpu_key / f"{op}.json").exists():
            yield inside


def _stored_files(gpu: Gpu, op: str) -> Iterator[tuple[str, Gpu, Path]]:
    """(source, GPU, path) of every file that may hold a config, in order of precedence."""
    for owner in (gpu, *family(gpu)):
        for location in database.files([owner.key], op):
            yield location.owner if owner is gpu else "family", owner, location.path


def _behind(query: _Query, stored: StoredEntry) -> str | None:
    """Why a config that was fast for a near problem is not expected to be fast for this one, or None.

    It must not be modelled behind the default here, or by `NEAR_SLACK` at most where the default was timed there: half of the
    rows, say, can turn one full wave of tiles into half a wave, which a measurement elsewhere does not show. And the gain over
    the default that was measured there, times the change of the modelled gain from there to here, must be a gain. The logarithm
    of the measured gain halves with each unit of distance.
    """
    spec, problem, gpu, _ = query
    default = spec.default(problem, gpu)
    if stored.config == default:
        return None
    ours, theirs = (spec.cost(problem, c, gpu) for c in (stored.config, default))
    evidence = stored.entry.evidence
    if ours > (1.0 if evidence.default_us is None else NEAR_SLACK) * theirs:
        return f"modelled at {ours * 1e6:.1f} us here, the default at {theirs * 1e6:.1f} us"
    if evidence.default_us is None:
        return None
    there, default_there = (spec.cost(stored.problem, c, gpu) for c in (stored.config, spec.default(stored.problem, gpu)))
    distance = spec.distance(problem, stored.problem) or 0.0
    gained = (evidence.default_us / evidence.median_us) ** (0.5**distance)
    promised = gained * (there / default_there) / (ours / theirs)
    if promised >= NEAR_GAIN:
        return None
    return f"{evidence.default_us / evidence.median_us:.3f}x as fast as the default there, which promises {promised:.3f}x here"


# --- telling


def explain(spec: OpSpec, problem: Problem, gpu: Gpu, config: Config | None = None) -> str:
    """What `resolve` chooses, on what evidence, and what it looked at, or why XLA runs: text of several lines."""
    if config is None and (reason := spec.supports(problem, gpu)):
        return f"{spec.name} {problem} on {gpu.key}\n  runs      XLA: {reason}"
    result = _resolve(spec, problem, gpu, config)
    lines = [
        f"{spec.name} {problem} on {gpu.key}",
        f"  runs      {'the kernel' if result.runs == 'kernel' else 'XLA'}{versus(result)}",
        f"  config    {result.config}{', which backend="mosaic" runs' * (result.runs == 'xla')}",
        f"  from      {_place(result, problem)}",
    ]
    if result.entry is not None:
        lines.append(f"  evidence  {_summary(result.entry.evidence)}")
    lines += ["  tried", *(f"    {s}: {what}" for s, what in result.tried)]
    return "\n".join(line.replace("\n", r"\n") for line in lines)  # a file's text has no line of its own


def versus(result: Resolution) -> str:
    """ ": kernel 12.3 us, xla 11.9 us, measured", or why XLA runs without such times; nothing for a kernel without them.

    Where the slower one runs, or they tie, the rule by which it does follows.
    """
    if result.times is not None:
        return f": {result.times}{result.times.rule}"
    if result.runs == "kernel":
        return ""
    known = {"job": ": so chose another process", "override": ": use_configs says so"}
    if result.source in known:
        return known[result.source]
    why = [what for source, what in result.tried if source == "xla"]  # none where the config itself leaves the call to XLA
    return f": {why[-1]}" if why else ": the config that was found says so, without the kernel's time"


def _place(result: Resolution, problem: Problem) -> str:
    """ "near, distance 0.5: measured for m=64, in /path"."""
    text = result.source
    if result.distance is not None:
        text += f", distance {result.distance:.3g}"
    if result.entry is not None:
        text += f": {_whose(result.entry, problem)}, in {result.path}"
    return text


def _whose(entry: Entry, problem: Problem) -> str:
    """ "measured for this problem", or "measured for m=64, layout='nt'": the fields in which an entry's problem is another."""
    there = {field.name: field.default for field in dataclasses.fields(problem)} | entry.problem
    apart = [f"{name}={there[name]!r}" for name, value in dataclasses.asdict(problem).items() if there[name] != value]
    return f"{kind(entry)} for {', '.join(apart) or 'this problem'}"


def _summary(e: Evidence) -> str:
    sustained = f" {e.objective}" if e.objective != "burst" else ""
    parts = [f"{e.kind} {e.median_us:.4g} us{sustained}, spread {e.spread_us:.2g} us, on {e.gpu}"]
    for name, time in (("the default", e.default_us), (e.baseline, e.baseline_us)):
        if time is not None:
            parts.append(f"{time / e.median_us:.3g}x as fast as {name} ({time:.4g} us)")
    if e.burst_us is not None:
        parts.append(f"{e.burst_us:.4g} us in a burst")
    if e.joules is not None and e.watts is not None:
        parts.append(f"{e.watts:.0f} W, {e.joules:.3g} J a call")
    if e.error is not None:
        parts.append(f"error {e.error:.2g}")
    parts.append(f"{e.trials} trial{'s' * (e.trials != 1)} on {e.date}, jax {e.jax}, kernel version {e.kernel_version}")
    return "; ".join(parts)
