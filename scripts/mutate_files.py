"""Gives broken files to their readers, and prints how many ended in anything but a result or a message of one line.

    python scripts/mutate_files.py                                  # 1,000 of each kind
    python scripts/mutate_files.py --count 100000 --seed 1          # hours
    python scripts/mutate_files.py --kind database --op matmul --count 20000

Kinds: `database` files of each op, `journal`s of optuna, `csv` files of bench, `problems` files of capture. A file is a sound
one with some bytes or values changed: numbers no call has, other types, keys and lines left out or doubled, an end cut off.
What a reader raises must be the error it documents; a lookup of `resolve`, as programs make it, must raise nothing. What takes
more than 2 s of CPU time, or a minute, counts as a hang and is ended. Exit status 1 where there was any of either; the first
ones are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs
os.environ.setdefault("NPROC", "64")

import msgspec

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.registry import database, resolution
from mgpu_ops.registry.database import DatabaseError, Entry, Evidence
from mgpu_ops.registry.spec import OpSpec

SECONDS, WAITING = 2.0, 60.0  # of CPU time, and in all: more is a hang
TAKEN = "taken"
SHOWN = 5  # tracebacks of a kind
KINDS = ("database", "journal", "csv", "problems")
H200 = gpu.find("h200")
ODD: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 64, 10**7, 2**28, 2**31, 2**53, 2**62, 2**63 - 1, 2**64, 1e308, -0.5, 1e-300, True, False, None,
    "", "x", "float7", "NVIDIA H200", "h200", "2026-11-31", "a\nb", "[red]", "\ud800", [], [1], {}, {"m": 1},
)  # fmt: skip


class Hang(BaseException):
    """A reader took too long. No reader catches it."""


# --- sound files


FURTHER: dict[str, list[dict[str, Any]]] = {  # fields that no named problem has, and with which a kernel runs the first one
    "matmul": [
        {"dtype": "float8_e4m3fn", "b_dtype": "float8_e5m2", "layout": "nt", "scales": "row"},
        {"dtype": "int8", "out_dtype": "int32", "layout": "nt"},
        {"bias": True, "activation": "gelu", "residual": True, "batch": 3, "out_dtype": "float32"},
        {"dtype": "float32", "out_dtype": "float32", "algorithm": "bf16_x3"},
        {"normalised": True},
    ],
    "gated_matmul": [{"dtype": "float16", "out_dtype": "float16", "layout": "nt"}, {"normalised": True, "joined": True}],
    "quantized_matmul": [
        {"w_dtype": "int4", "group_size": 128, "zero_points": True, "dtype": "float16", "out_dtype": "float16"},
        {"scale_dtype": "float32"},
        {"bias": True, "residual": True},
    ],
    "quantize": [{"dtype": "float32"}, {"dtype": "float16"}],
    "grouped_matmul": [
        {"bias": True, "activation": "silu", "group_offset": True, "row_scale": True, "out_dtype": "float32"},
        {"second": True, "residual": True, "dtype": "float16", "out_dtype": "float16"},
        {"lhs_rows": 4096, "bias": True, "row_scale": True},
        {"dtype": "float8_e4m3fn", "rhs_dtype": "float8_e5m2", "scales": "block", "layout": "nt"},
        {"gated_gradient": True, "row_scale": True, "activation": "silu", "layout": "nt"},
    ],
    "quantized_grouped_matmul": [
        {"w_dtype": "int4", "group_size": 128, "zero_points": True, "dtype": "float16", "out_dtype": "float16"},
        {"scale_dtype": "float32", "group_offset": True, "spread": "even"},
    ],
    "gated_grouped_matmul": [
        {"group_offset": True, "activation": "gelu", "dtype": "float16", "out_dtype": "float16", "layout": "nt"},
        {"keep": True, "lhs_rows": 4096},
        {"dtype": "float8_e4m3fn", "rhs_dtype": "float8_e5m2", "scales": "block", "layout": "nt"},
    ],
    "ragged_contraction": [
        {"group_offset": True, "dtype": "float16", "out_dtype": "float16"},
        {"dtype": "float8_e4m3fn", "rhs_dtype": "float8_e5m2", "transposed": True},
    ],
    "flash_attention": [
        {"bias": "float32", "soft_cap": True, "soft_cap_after_bias": True, "segments": True, "window_right": 64},
        {"dtype": "float16", "align": "top_left", "sinks": True, "lengths": True},
        {"q_tokens": 1, "kv_dtype": "int8"},
    ],
    "flash_attention_backward": [
        {"deterministic": True, "lengths": True, "segments": True, "soft_cap": True, "window_right": 64},
        {"bias": "float32", "soft_cap": True, "soft_cap_after_bias": True},
        {"bias": "bfloat16", "bias_grad": True, "dtype": "float16", "align": "top_left", "sinks": True},
    ],
    "cross_entropy": [{"dtype": "float32"}],
    "rms_norm": [{"dtype": "float16", "gradient": True, "residual": True}],
    "rotary": [{"dtype": "float16", "gradient": True, "head_dim": 64}, {"normalised": True}],
    "embedding": [{"dtype": "float16"}],
    "all_reduce": [{"dtype": "float32", "reduction": "max"}, {"transport": "multimem"}],
    "reduce_scatter": [{"dtype": "float32", "reduction": "max"}, {"transport": "multimem"}],
    "all_gather": [{"dtype": "float32"}, {"transport": "multimem"}],
}


@functools.cache
def problems_in(name: str) -> tuple[Any, ...]:
    """Problems of an op: the first two named ones, one for each field that others have otherwise, and those of `FURTHER`."""
    spec = mgpu_ops.spec_of(name)
    found = list(spec.shapes.values())[:2]
    for field in dataclasses.fields(spec.Problem):
        if field.default is not dataclasses.MISSING:
            others = (p for p in spec.shapes.values() if getattr(p, field.name) != field.default)
            found += [p for p in itertools.islice(others, 1) if all(getattr(q, field.name) == field.default for q in found)]
    return (*found, *(dataclasses.replace(found[0], **fields) for fields in FURTHER.get(name, ())))


def entry_of(spec: OpSpec, problem: Any, kind: Literal["measured", "modelled"] = "measured") -> Entry:
    evidence = Evidence(
        kind=kind, gpu=H200.name, driver="580.1", jax="0.11.2", jaxlib="0.11.2", cuda="13000", kernel_version=spec.version,
        median_us=10.0, spread_us=0.1, default_us=12.0, baseline="xla", baseline_us=11.0, error=1e-4, trials=8, seed=0,
        date="2026-11-22", samples_us=[10.0, 10.1],
    )  # type: ignore[arg-type]  # fmt: skip
    return database.to_entry(problem, spec.default(problem, H200), evidence)


def database_of(spec: OpSpec) -> bytes:
    known = problems_in(spec.name)
    entries = [entry_of(spec, problem) for problem in known] + [entry_of(spec, known[0], "modelled")]
    return database.encode(database.File(database.SCHEMA, H200.key, spec.name, tuple(entries)))


def journal_of(spec: OpSpec, folder: Path) -> bytes:
    """A journal with a finished study of three trials, an unfinished one, and a fleet's queue."""
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import queue as fleet_queue
    from mgpu_ops.tuning.ledger import Ledger
    from mgpu_ops.tuning.outcome import Outcome

    path, name, problem = folder / f"sound-{spec.name}.journal", next(iter(spec.shapes)), problems_in(spec.name)[-1]
    with storage.opened(path) as backend:
        for kind in ("measured", "modelled"):
            study = storage.open_study(backend, storage.Identity.of(spec, problem, H200, kind, {"jax": "0.11.2"}))
            ledger: Ledger[Any] = Ledger(study, spec.Config)
            for number, config in enumerate(spec.candidates(problem, H200)[:3]):
                ledger.claim(config, "model")
                ledger.record(
                    config, Outcome("ok", 10.0 + number, 11.0, 1e-4) if number else Outcome("wrong", detail="error 1")
                )
            ledger.close()
            if kind == "measured":
                storage.finish(study, entry_of(spec, problem))
        fleet_queue.enqueue(backend, [fleet_queue.Job(spec.name, dataclasses.asdict(problem), name, trials=8)])
    return path.read_bytes()


def csv_of(spec: OpSpec) -> bytes:
    from mgpu_ops.tuning.bench import plot, results

    rows = plot.rows_of(spec, H200, [entry_of(spec, problem) for problem in problems_in(spec.name)])
    with tempfile.TemporaryDirectory() as folder:
        results.write_csv(rows, Path(folder) / "sound.csv")
        return (Path(folder) / "sound.csv").read_bytes()


def problems_of(spec: OpSpec) -> bytes:
    from mgpu_ops.tuning import problems

    items = [problems.ProblemEntry(spec.name, dataclasses.asdict(problem), 3) for problem in problems_in(spec.name)]
    file = problems.File(problems.SCHEMA, H200.key, "train:step", tuple(items), notes=("a loop",))
    return msgspec.json.encode(file)


# --- broken ones


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON document."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def change(tree: Any, rng: random.Random) -> None:
    """Changes one value of a JSON document, or removes, doubles or renames an entry."""
    every = list(places(tree))
    if not every:
        return
    scalars = [(holder, key) for holder, key in every if not isinstance(holder[key], dict | list)]
    holder, key = rng.choice(scalars if scalars and rng.random() < 0.7 else every)
    how = rng.random()
    if how < 0.7:
        old = holder[key]
        near = [old * 2, old + 1, -old, old * 10**9] if isinstance(old, int) and not isinstance(old, bool) else ODD
        alike = [odd for odd in ODD if type(odd) is type(old)]  # such as a schema lets pass
        choices = (ODD, near, alike or ODD)[rng.choice((0, 1, 2, 2))]
        holder[key] = copy.deepcopy(rng.choice(choices))
    elif how < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(rng.choice(holder)))
    else:
        other, at = rng.choice(every)
        holder[key] = copy.deepcopy(other[at])


def bytes_of(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed, removed or doubled, or with the end cut off."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(found) or 1), rng.choice((1, 1, 2, 8, 40))
        how = rng.random()
        if how < 0.4:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif how < 0.6:
            del found[at : at + length]
        elif how < 0.8:
            found[at:at] = found[at : at + length]
        elif how < 0.9:
            found[at : at + 1] = rng.choice((b"9", b"0", b"-", b"e9", b'"', b",", b"\n", b"\x00", b"NaN", b"{}", b"\xff"))
        else:
            del found[at:]
    return bytes(found)


def as_json(data: bytes, rng: random.Random) -> bytes:
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change(tree, rng)
    return json.dumps(tree).encode()


def mutated(kind: str, data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return bytes_of(data, rng)
    if kind in ("database", "problems"):
        return as_json(data, rng)
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        how = rng.random()
        if how < 0.7 and kind == "journal":
            with contextlib.suppress(ValueError):
                lines[at] = as_json(lines[at], rng) + b"\n"
        elif how < 0.7:
            cells = lines[at].rstrip(b"\n").split(b",")
            cells[rng.randrange(len(cells))] = str(rng.choice(ODD)).encode(errors="replace")
            lines[at] = b",".join(cells) + b"\n"
        elif how < 0.8 and len(lines) > 1:
            del lines[at]
        elif how < 0.9:
            lines.insert(at, rng.choice(lines))
        else:
            rng.shuffle(lines)
    return b"".join(lines)


# --- what reads them


def read_database(path: Path, spec: OpSpec) -> bool:
    """Runs all readers of databases; whether the file is one."""
    from mgpu_ops.tuning import cli, search
    from mgpu_ops.tuning.bench import page, sources

    first, *others = problems_in(spec.name)
    for problem in (first, *others, list(spec.shapes.values())[-1]):  # as a traced program does: nothing may be raised
        resolution.resolve(spec, problem, H200)
    search.stored_neighbours(spec, first, H200)
    out = path.with_suffix(".csv")
    for words in (
        ("validate", "--stale", path),
        ("merge", path, path, "--into", path.with_name("all.json"), "--dry-run"),
        ("export", spec.name, "--gpu", H200.key, "--own", "--format", "csv", "--output", out),
        ("show", spec.name, "--gpu", H200.key),
        ("diff", path, database.shipped_path(H200.key, spec.name)),
    ):
        cli.main([str(word) for word in words])
    with contextlib.suppress(DatabaseError, ValueError):
        page.page(sources.find([str(path)], mgpu_ops.SPECS), mgpu_ops.SPECS, [], "2026-11-22")
    try:
        database.read(path)
    except DatabaseError:
        return False
    return True


def read_journal(path: Path, spec: OpSpec) -> bool:
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.bench import page, sources
    from mgpu_ops.tuning.fleet import merge
    from mgpu_ops.tuning.fleet import queue as fleet_queue
    from mgpu_ops.tuning.ledger import Ledger

    try:
        page.page(sources.find([str(path)], mgpu_ops.SPECS), mgpu_ops.SPECS, [], "2026-11-22")
        merge.tuned_in(str(path), mgpu_ops.SPECS)
        problem = problems_in(spec.name)[-1]
        with storage.opened(path) as backend:
            fleet_queue.queued(backend)
            for kind in ("measured", "modelled"):
                study = storage.open_study(backend, storage.Identity.of(spec, problem, H200, kind, {"jax": "0.11.2"}))
                ledger: Ledger[Any] = Ledger(study, spec.Config, legal=lambda config: spec.check(problem, config, H200) is None)
                ledger.new_results()
                ledger.adopt()
                ledger.close()
    except storage.StorageError:
        return False
    return True


def read_csv(path: Path, spec: OpSpec) -> bool:
    from mgpu_ops.tuning.bench import page, report, results, sources

    try:
        page.page(sources.find([str(path)], mgpu_ops.SPECS), mgpu_ops.SPECS, [], "2026-11-22")
        report.table(results.read_csv(path))
    except ValueError:
        return False
    return True


def read_problems(path: Path, spec: OpSpec) -> bool:
    from mgpu_ops.tuning import problems

    try:
        problems.read(path)
    except ValueError:
        return False
    return True


# --- trying


Read = Callable[[Path, OpSpec], bool]


def of_kind(kind: str, specs: Sequence[OpSpec], folder: Path) -> list[tuple[OpSpec, bytes, Path, Read]]:
    """(op, an intact file, where it goes, its reader)."""
    if kind == "problems":
        return [(spec, problems_of(spec), folder / "problems.json", read_problems) for spec in specs]
    if kind == "database":
        return [(spec, database_of(spec), database.user_path(H200.key, spec.name), read_database) for spec in specs]
    one_gpu = [spec for spec in specs if not hasattr(next(iter(spec.shapes.values())), "devices")]
    if kind == "csv":
        return [(spec, csv_of(spec), folder / f"{spec.name}.csv", read_csv) for spec in one_gpu]
    return [(spec, journal_of(spec, folder), folder / f"{spec.name}.journal", read_journal) for spec in one_gpu]


def trial(read: Read, path: Path, spec: OpSpec) -> str:
    """The result of reading a file: `TAKEN`, "refused", or "hang" or "traceback" with its place."""

    def stop(*_: Any) -> None:
        raise Hang

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAITING)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        return TAKEN if read(path, spec) else "refused"
    except Hang:
        return f"hang\n{traceback.format_exc()}"
    except Exception:
        return f"traceback\n{traceback.format_exc()}"
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def try_kind(kind: str, specs: Sequence[OpSpec], count: int, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """The results of so many broken files of a kind, shared among the ops."""
    outcomes: Counter[str] = Counter()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a journal is synced to the disk line by line
    with tempfile.TemporaryDirectory(dir=memory) as name, quiet(Path(name)):
        cases = of_kind(kind, specs, Path(name))
        for spec, sound, path, read in cases:  # which also imports what the readers need
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sound)
            if not read(path, spec):
                raise RuntimeError(f"the sound file of {kind} and {spec.name} was refused")
            path.unlink()
        for number in range(count):
            rng = random.Random(f"{seed} {kind} {number}")
            spec, sound, path, read = cases[number % len(cases)]
            path.write_bytes(data := mutated(kind, sound, rng))
            told = trial(read, path, spec)
            if told.startswith("hang"):  # or is the machine busy?
                path.write_bytes(data)
                told = trial(read, path, spec)
            outcome = told.partition("\n")[0]
            outcomes[outcome] += 1
            if outcome in ("hang", "traceback") and outcomes[outcome] <= SHOWN:
                say(f"{kind} {number} of seed {seed}, {spec.name}: {told}\n{data[:2000]!r}")
            path.unlink()
            resolution._warned.clear()
            resolution._logged.clear()
    return outcomes


@contextlib.contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """An empty user database, no warnings and no log."""
    old = {name: os.environ.get(name) for name in ("MGPU_OPS_CONFIG_DIR", "MGPU_OPS_STATE_DIR")}
    os.environ |= {name: str(folder / name) for name in old}
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="files of each kind (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--op", choices=sorted(mgpu_ops.SPECS), action="append", help="default: all")
    arguments = parser.parse_args(words)
    specs = [spec for name, spec in mgpu_ops.SPECS.items() if name in (arguments.op or mgpu_ops.SPECS)]
    out, bad = sys.stdout, 0
    for kind in arguments.kind or KINDS:
        began = time.monotonic()
        found = try_kind(kind, specs, arguments.count, arguments.seed, lambda text: print(text, file=out, flush=True))
        bad += found["traceback"] + found["hang"]
        told = ", ".join(f"{found[what]} {what}" for what in ("taken", "refused", "traceback", "hang"))
        print(
            f"{kind}: {sum(found.values())} files of seed {arguments.seed}: {told} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
