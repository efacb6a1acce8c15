"""Draws calls of all ops and runs each on a Hopper GPU, or interpreted: is it right, and is it so each time?

    python -m tests.drawn.campaign --seconds 600 --output found.jsonl    # on a Hopper GPU: calls of seeds 0, 1, 2 ...
    python -m tests.drawn.campaign --interpret --seconds 300             # on any machine, small, with race detection
    python -m tests.drawn.campaign --only grouped_matmul:17              # one call again, as a failure is printed

A call is an op with a problem, a config and arrays that a seed decides (`ops.py`, `attention.py`). Processes without a GPU
draw and compile it and compute the truth; one process with the GPU runs it `RUNS` times, in memory that is full of NaN and then
of zeros. Wrong are: an error above the op's tolerance; runs that differ, where the op promises equal bits; inputs that have
changed; a kernel that does not end, or does not compile. Each is printed with what runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_ops.tuning.child import Child, Gone, first_line, settle

RUNS = 8
_AT_ONCE = 12  # cases that the GPU runs in a row, at most
_FAILURES = 100  # after which there is no more to learn
_COMPILE_SECONDS, _RUN_SECONDS, _START_SECONDS = 120.0, 20.0, 180.0
turn: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # around what runs on the GPU


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of a call. error and limit: of the result that is nearest to its limit, or beyond it."""

    name: str
    kind: str  # "ok", or how it failed
    detail: str = ""
    error: float = 0.0
    limit: float = 0.0
    label: str = ""
    seconds: float = 0.0  # drawing, compiling and the truth


@dataclasses.dataclass(frozen=True)
class Compiled:
    name: str
    label: str
    executable: Any
    arrays: tuple[np.ndarray, ...]
    wanted: tuple[Any, ...]
    repeats: bool
    seconds: float


def drawers() -> dict[str, Callable[..., Any]]:
    """Name of what is drawn -> draw(seed, gpu, tiny)."""
    from tests.drawn import attention, calls, ops

    found: dict[str, Callable[..., Any]] = {op: functools.partial(ops.case, op) for op in ops.PROBLEMS}
    return found | {
        "attention": attention.forward,
        "attention_gradients": attention.gradients,
        "attention_pages": attention.pages,
        "attention_eight_bits": attention.eight_bits,
        "calls": calls.case,
    }


# How often each comes: those with most options most often.
WEIGHTS = {
    "matmul": 7,
    "gated_matmul": 3,
    "quantized_matmul": 3,
    "quantize": 2,
    "grouped_matmul": 5,
    "gated_grouped_matmul": 4,
    "ragged_contraction": 2,
    "quantized_grouped_matmul": 2,
    "cross_entropy": 1,
    "rms_norm": 1,
    "rotary": 1,
    "embedding": 1,
    "attention": 5,
    "attention_gradients": 8,
    "attention_pages": 2,
    "attention_eight_bits": 2,
    "calls": 12,
}


def names(first: int, chosen: list[str] | None) -> Iterator[str]:
    """ "op:seed", the ops in turn by their weights."""
    turns = [(i / weight, op) for op, weight in WEIGHTS.items() if not chosen or op in chosen for i in range(weight)]
    order = [op for _, op in sorted(turns)]
    counts: Counter[str] = Counter()
    for op in itertools.cycle(order):
        yield f"{op}:{first + counts[op]}"
        counts[op] += 1


def judge(wanted: tuple[Any, ...], runs: list[list[np.ndarray]], repeats: bool) -> tuple[str, str, float, float]:
    """(kind, detail, error, limit) of the results of some runs."""
    from tests.drawn.case import where_wrong

    worst = (0.0, 0.0, 0.0)
    for number, results in enumerate(runs):
        if len(results) != len(wanted):
            return "wrong", f"{len(results)} results, not {len(wanted)}", 0.0, 0.0
        for out, one in zip(results, wanted, strict=True):
            off = one.error(out)
            if not off <= one.limit:
                where = where_wrong(out, one)
                return "wrong", f"{one.name} in run {number}: {where}", off, one.limit
            worst = max(worst, (off / one.limit, off, one.limit))
    if repeats:
        for number, results in enumerate(runs[1:], 1):
            for out, before, one in zip(results, runs[0], wanted, strict=True):
                if out.tobytes() != before.tobytes() and not _same(out, before):
                    differ = int((out.view(np.uint8) != before.view(np.uint8)).sum()) if out.ndim else 1
                    return "differs", f"{one.name} in run {number}: {differ} bytes", worst[1], worst[2]
    return "ok", "", worst[1], worst[2]


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
    return bool(((x == y) | (np.isnan(x) & np.isnan(y))).all())


# --- the process that draws and compiles


def prepare(pipe: Any, tiny: bool) -> None:
    """Answers names with a Compiled, or a Found where that fails; with `tiny` it interprets each, and answers with a Found."""
    settle()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import jax

    jax.config.update("jax_platforms", "cpu")
    from mgpu_ops.core import aot
    from mgpu_ops.core import gpu as gpus

    draw = drawers()
    pipe.send("ready")
    done = 0
    while True:
        try:
            name, topology, gpu = pipe.recv()
        except EOFError:
            return
        op, seed = name.split(":")
        start, label = time.monotonic(), ""
        try:
            case = draw[op](int(seed), gpu or gpus.find("h200"), tiny)
            label = case.label
            if tiny:
                pipe.send(_interpreted(name, case, start))
            else:
                executable = aot.build(case.gpu, case.function("mosaic"), *case.arrays, topology=topology)
                seconds = time.monotonic() - start
                pipe.send(Compiled(name, label, executable, case.arrays, case.wanted, case.repeats, seconds))
        except Exception as e:
            place = traceback.extract_tb(e.__traceback__)[-1]
            detail = f"{first_line(e)} ({Path(place.filename).name}:{place.lineno})"
            pipe.send(Found(name, "draw" if not label else "compile", detail, label=label, seconds=time.monotonic() - start))
        done += 1
        if done % 32 == 0:
            jax.clear_caches()


def _interpreted(name: str, case: Any, start: float) -> Found:
    import io

    import jax

    from mgpu_ops.core import engine

    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            out = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function("interpret"))(*case.arrays))]
            races = engine.races_found()
        finally:
            engine.reset_interpreter()
    kind, detail, error, limit = judge(case.wanted, [out], case.repeats)
    if races and kind == "ok":
        kind = "race"
    return Found(name, kind, detail, error, limit, case.label, time.monotonic() - start)


# --- the process with the GPU


def run_all(pipe: Any) -> None:
    """Answers lists of Compiled with ("running", name) for each and then a list of Found."""
    settle()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")
    import jax

    from mgpu_ops.core import aot, gpu

    device = jax.local_devices()[0]
    found = gpu.from_device(device)
    if found is None or found.architecture != "hopper":
        pipe.send(Found("", "gpu", f"{device.device_kind} is not a Hopper GPU"))
        return
    free = int(device.memory_stats()["bytes_limit"] * 0.7)
    fill = jax.jit(lambda x: jax.numpy.full((free,), x, "uint8"))
    with turn():
        jax.block_until_ready(fill(255))
    pipe.send((found, aot.attached()))
    while True:
        try:
            cases: list[Compiled] = pipe.recv()
        except EOFError:
            return
        calls = []
        for case in cases:
            pipe.send(("loading", case.name))
            try:
                calls.append(aot.load(case.executable))
            except Exception as e:
                calls.append(first_line(e))
        answers: list[Any] = []
        with turn():
            for case, call in zip(cases, calls, strict=True):
                pipe.send(("running", case.name))
                answers.append(call if isinstance(call, str) else _runs(case, call, fill))
        pipe.send([_judged(case, answer) for case, answer in zip(cases, answers, strict=True)])


def _runs(case: Compiled, call: Callable[..., Any], fill: Callable[..., Any]) -> Any:
    """The results of `RUNS` runs and the inputs after them, or an error's text."""
    import jax

    try:
        arrays = [jax.device_put(x) for x in case.arrays]
        results = []
        for pattern in (255, 0):
            fill(pattern).block_until_ready()  # and freed: results come to lie there
            results.append(call(*arrays))
            jax.block_until_ready(results[-1])
        results += [call(*arrays) for _ in range(RUNS - 2)]  # one upon the other
        return [[np.asarray(x) for x in jax.tree.leaves(out)] for out in results], [np.asarray(x) for x in arrays]
    except Exception as e:
        return first_line(e)


def _judged(case: Compiled, answer: Any) -> Found:
    if isinstance(answer, str):
        return Found(case.name, "error", answer, label=case.label, seconds=case.seconds)
    runs, after = answer
    kind, detail, error, limit = judge(case.wanted, runs, case.repeats)
    if kind == "ok" and any(x.tobytes() != y.tobytes() for x, y in zip(case.arrays, after, strict=True)):
        kind, detail = "overwritten", "inputs have changed"
    return Found(case.name, kind, detail, error, limit, case.label, case.seconds)


# --- both


class Report:
    """Prints failures and keeps count."""

    def __init__(self, output: Path | None):
        self.file = output.open("a") if output else None
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.failed: list[str] = []

    def add(self, found: Found) -> None:
        with self.lock:
            self.counts[found.kind] += 1
            if self.file:
                print(json.dumps(dataclasses.asdict(found)), file=self.file, flush=True)
            if found.kind != "ok":
                self.failed.append(found.name)
                how = f"error {found.error:.3g} exceeds {found.limit:.3g}; " if found.kind == "wrong" else ""
                print(f"{found.kind}: {how}{found.detail}\n  {found.label}\n  --only {found.name}", flush=True)


def campaign(todo: Iterator[str], seconds: float, processes: int, interpret: bool, report: Report) -> None:
    end = time.monotonic() + seconds
    prepared: queue.Queue[Compiled | None] = queue.Queue(maxsize=4 * _AT_ONCE)
    lock, topology, gpu = threading.Lock(), None, None
    runner: Child | None = None
    if not interpret:
        runner = Child(run_all)
        said = runner.receive(_START_SECONDS)
        if isinstance(said, Found | Gone):
            raise SystemExit(said.detail if isinstance(said, Found) else said.reason)
        gpu, topology = said

    def work() -> None:
        child = None
        while time.monotonic() < end:
            if child is None:
                child = Child(functools.partial(prepare, tiny=interpret))
                if isinstance(child.receive(_START_SECONDS), Gone):
                    raise RuntimeError("a process did not start")
            with lock:
                name = next(todo, None)
            if name is None or len(report.failed) >= _FAILURES:
                break
            child.send((name, topology, gpu))
            answer = child.receive(min(_COMPILE_SECONDS, max(1.0, end + 10 - time.monotonic())))
            if isinstance(answer, Gone):
                if time.monotonic() < end:
                    report.add(Found(name, "late" if answer.late else "died", answer.reason))
                child.kill()
                child = None
            elif isinstance(answer, Found):
                report.add(answer)
            else:
                prepared.put(answer)
        if child:
            child.kill()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    if runner is not None:
        _run_prepared(runner, prepared, threads, report)
    for thread in threads:
        thread.join()


def _run_prepared(
    runner: Child, prepared: queue.Queue[Compiled | None], threads: list[threading.Thread], report: Report
) -> None:
    while any(thread.is_alive() for thread in threads) or not prepared.empty():
        cases: list[Any] = []
        with contextlib.suppress(queue.Empty):
            cases.append(prepared.get(timeout=1.0))
            while len(cases) < _AT_ONCE:
                cases.append(prepared.get(timeout=0.5))
        while cases:
            runner.send(cases)
            running, waits = None, _COMPILE_SECONDS
            while True:
                answer = runner.receive(waits)
                if isinstance(answer, Gone):
                    break
                if isinstance(answer, list):
                    for found in answer:
                        report.add(found)
                    break
                step, running = answer
                waits = _RUN_SECONDS if step == "running" else _COMPILE_SECONDS
            if not isinstance(answer, Gone):
                break
            kind = "hangs" if answer.late else "died"
            label = next((case.label for case in cases if case.name == running), "")
            report.add(Found(running or "", kind, answer.reason, label=label))
            cases = [case for case in cases if case.name != running] if running else []
            runner.kill()
            runner = Child(run_all)
            runner.receive(_START_SECONDS)
    runner.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--calls", type=int, help="end after so many")
    parser.add_argument("--ops", nargs="*", choices=list(WEIGHTS), help="draw only these")
    parser.add_argument("--only", nargs="*", metavar="OP:SEED", help="run these calls")
    parser.add_argument("--interpret", action="store_true", help="small calls in JAX's GPU interpreter, with race detection")
    parser.add_argument("--processes", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--output", type=Path, help="a JSONL file to which each call is added")
    options = parser.parse_args()
    todo = iter(options.only) if options.only else names(options.seed, options.ops)
    report = Report(options.output)
    campaign(itertools.islice(todo, options.calls), options.seconds, options.processes, options.interpret, report)
    print(", ".join(f"{count} {kind}" for kind, count in report.counts.most_common()) or "none")
    if report.failed:
        again = " --interpret" * options.interpret
        print(f"again: python -m tests.drawn.campaign{again} --only {' '.join(report.failed)}")
    return bool(report.failed)


if __name__ == "__main__":
    sys.exit(main())
