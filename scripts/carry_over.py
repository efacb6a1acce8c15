"""Stores configs for a GPU of the same family as another, where those of the other are not the fastest on it.

    python scripts/carry_over.py --op matmul,flash_attention --database DIR --output results/DATE-GPU-carry-over.jsonl

An H100 takes the H200's entries: it has as many SMs and the same clock, but less memory bandwidth. For each problem that the
family has an entry for, the stored config is timed on the GPU here beside the default, configs of the nearest other entries,
the most promising by the model, and the baseline (XLA, cuDNN). An entry for this GPU goes to DIR/<op>.json where another config
is faster by more than 1 % and for sure, or where a call would then run the other of kernel and XLA. All times go to the output;
problems that it has already are passed over, so that a run may go on where another ended.

`mgpu-tune run` searches longer, and stores an entry for every problem.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_ops import spec_of
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.gpu import family as family_of
from mgpu_ops.registry import database, winner
from mgpu_ops.registry.database import Entry
from mgpu_ops.registry.spec import Config, OpSpec, Problem, baseline_of
from mgpu_ops.registry.winner import Winner
from mgpu_ops.tuning import measure, ranking
from mgpu_ops.tuning.cli.check_in import evidence_faults
from mgpu_ops.tuning.compile_pool import Pool
from mgpu_ops.tuning.device import Device, Measured
from mgpu_ops.tuning.labels import label
from mgpu_ops.tuning.outcome import Final
from mgpu_ops.tuning.tuner import entry_of
from mgpu_ops.tuning.worker import WorkerError

NEIGHBOURS = 3  # configs of other entries to try
BY_MODEL = 2
GAIN = 0.01  # of the time: less is not worth an entry of its own
SECONDS = 0.4  # of measuring the configs of a problem in turn
_NEAR = 1.2  # times the fastest: slower configs are not measured in turn
_SEED = 0
_AHEAD = 3  # problems whose configs compile while one is measured


@dataclasses.dataclass(frozen=True)
class Stored:
    """An entry of a GPU of the family, and what a call here runs by it."""

    problem: Problem
    config: Config
    runs: Winner


def stored(spec: OpSpec, gpu: Gpu) -> list[Stored]:
    """What this GPU takes from its family: entries measured in bursts, of problems for which it has none of its own."""
    own = {database.key_of_fields(entry.problem) for entry in _entries(spec, gpu)}
    found: dict[Any, Stored] = {}
    for other in family_of(gpu):
        for entry in _entries(spec, other):
            key, one = database.key_of_fields(entry.problem), _stored(spec, entry)
            if key not in own and spec.check(one.problem, one.config, gpu) is None:
                found.setdefault(key, one)
    return list(found.values())


def _entries(spec: OpSpec, gpu: Gpu) -> list[Entry]:
    """Those whose config is the kernel's."""
    path = database.shipped_path(gpu.key, spec.name)
    return [
        entry
        for entry in (database.read(path).entries if path.exists() else ())
        if (entry.evidence.kind, entry.evidence.objective) == ("measured", "burst")
        and database.stale_kernel(entry, spec) is None
        and not spec.leaves_to_xla(database.to_config(spec, entry.config))
    ]


def _stored(spec: OpSpec, entry: Entry) -> Stored:
    problem = database.to_problem(spec, entry.problem)
    times = winner.measured(entry, baseline_of(spec, problem))
    runs = dataclasses.replace(times, how="family").winner if times else "kernel"
    return Stored(problem, database.to_config(spec, entry.config), runs)


def to_try(spec: OpSpec, one: Stored, others: Sequence[Stored], gpu: Gpu) -> list[Config]:
    """The stored config, then the default, those of the nearest other problems, and the best by the model: each once."""
    comparable = [(spec.distance(one.problem, other.problem), other.config) for other in others if other is not one]
    nearest = [c for d, c in sorted(((d, c) for d, c in comparable if d is not None), key=lambda pair: pair[0])]
    found = dict.fromkeys([one.config, spec.default(one.problem, gpu)])
    for configs, count in ((nearest, NEIGHBOURS), (spec.candidates(one.problem, gpu), BY_MODEL)):
        most = len(found) + count
        for config in configs:
            if len(found) < most and spec.check(one.problem, config, gpu) is None:
                found[config] = None
    return list(found)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The times of the configs in turn and the baseline's, what failed and why, and the entry to store, or None."""

    times: Final
    failed: dict[Config, str]
    entry: Entry | None


def measured(spec: OpSpec, one: Stored, configs: Sequence[Config], device: Device) -> Measurement:
    """Measures configs that are under way on the device, where the problem is open."""
    outcomes = dict(device.next() for _ in configs)
    right = {c: o for c, o in outcomes.items() if o.kind == "ok"}
    failed = {c: f"{o.kind}: {o.detail}" for c, o in outcomes.items() if c not in right}
    if not right:
        return Measurement(Final({}, []), failed, None)
    us = {c: o.us or 0.0 for c, o in right.items()}
    kept = (one.config, spec.default(one.problem, device.gpu))
    times = device.finals([c for c in right if c in kept or us[c] <= _NEAR * min(us.values())], SECONDS)
    if not times.samples:
        return Measurement(times, failed, None)
    best = ranking.winner(times.samples, one.config, _SEED)
    entry = entry_of(spec, one.problem, device, best, times, right[best].error, len(configs), _SEED)
    return Measurement(times, failed, entry if _worth_it(spec, one, times, entry, best) else None)


def _worth_it(spec: OpSpec, one: Stored, times: Final, entry: Entry, best: Config) -> bool:
    """Whether the stored config failed here or is slower, or the other of kernel and baseline is the faster: for sure."""
    if any(evidence_faults(entry)):
        return False
    if one.config not in times.samples:
        return True
    gain = measure.median_us(times.samples[one.config]) / measure.median_us(times.samples[best]) - 1
    return gain > GAIN or winner.of_entry(entry, spec) != one.runs


def told(spec: OpSpec, one: Stored, found: Measurement, baseline: str | None) -> str:
    """One line."""
    us = {config: measure.median_us(samples) for config, samples in found.times.samples.items()}
    held = f"{us[one.config]:.1f}" if one.config in us else found.failed.get(one.config, "no time")
    theirs = f"{baseline} {measure.median_us(found.times.baseline):.1f}" if found.times.baseline else "no baseline"
    best = f"{min(us.values()):.1f}" if us else "none"
    times = f"the family's config {held} us, the best of {len(us)} {best}, {theirs}"
    runs = winner.of_entry(found.entry, spec) if found.entry else one.runs
    return f"{spec.name} {label(spec, '', one.problem)}: {times}; {'stored' if found.entry else 'kept'}, calls run {runs}"


def record(spec: OpSpec, one: Stored, found: Measurement, device: Device) -> dict[str, Any]:
    """Every time, for the output."""
    configs = [
        {"config": dataclasses.asdict(c), "us": round(measure.median_us(samples), 3), "stored": c == one.config}
        for c, samples in found.times.samples.items()
    ]
    failed = [{"config": dataclasses.asdict(c), "failed": why} for c, why in found.failed.items()]
    baseline_us = round(measure.median_us(found.times.baseline), 3) if found.times.baseline else None
    return {
        "op": spec.name,
        "problem": dataclasses.asdict(one.problem),
        "configs": configs + failed,
        "baseline": device.baseline,
        "baseline_us": baseline_us,
        "entry": found.entry is not None,
        "gpu": device.gpu.name,
        **device.versions,
    }


def known(output: Path) -> set[tuple[str, Any]]:
    """Op and key of the problems whose times the output has."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else ()
    return {(record["op"], database.key_of_fields(record["problem"])) for record in map(json.loads, lines)}


def carry_over(ops: Sequence[str], device: Measured, database_folder: Path, output: Path, seconds: float) -> None:
    """Measures what the device's GPU takes from its family and the output lacks, op after op, for so many seconds."""
    until, queued, done = time.monotonic() + seconds, [], known(output)
    for name in ops:
        spec = spec_of(name)
        entries = stored(spec, device.gpu)
        left = [one for one in entries if (name, database.key_of_fields(dataclasses.asdict(one.problem))) not in done]
        queued += [(spec, one, to_try(spec, one, entries, device.gpu)) for one in left]
    for i, (spec, one, configs) in enumerate(queued):
        for s, o, c in queued[i : i + 1 + _AHEAD] if i == 0 else queued[i + _AHEAD : i + 1 + _AHEAD]:
            device.prepare(s, o.problem, c)
        if time.monotonic() > until:
            print(f"out of time: {len(queued) - i} of {len(queued)} problems are left")
            return
        try:
            device.open(spec, one.problem, _SEED)
            found = measured(spec, one, configs, device)
        except WorkerError as error:
            print(f"{spec.name} {one.problem}: {error}", flush=True)
            continue
        print(told(spec, one, found, device.baseline), flush=True)
        with output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record(spec, one, found, device)) + "\n")
        if found.entry is not None:
            database.update(database_folder / f"{spec.name}.json", [found.entry], gpu_key=device.gpu.key, op=spec.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", required=True, help="ops, separated by commas")
    parser.add_argument("--database", type=Path, required=True, metavar="DIR", help="where entries go")
    parser.add_argument("--output", type=Path, required=True, metavar="JSONL")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time")
    arguments = parser.parse_args()
    arguments.database.mkdir(parents=True, exist_ok=True)
    with Pool() as pool, contextlib.closing(Measured(pool=pool)) as device:
        carry_over(arguments.op.split(","), device, arguments.database, arguments.output, arguments.seconds)


if __name__ == "__main__":
    main()
