"""Tables of whole programs: steps of language models, their kernels, and how long they take to compile."""

from __future__ import annotations

import collections
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.figures.lines import Row, Strip, newest, sources


def steps_of_programs(
    results: Path, gpu: str = "h200", what: str = "llama"
) -> tuple[dict[tuple[str, str], dict[str, Row]], list[Path]]:
    """Of each step of a language model, by op and problem, the newest row of each implementation; and the files."""
    steps: dict[tuple[str, str], dict[str, Row]] = {}
    found = []
    for path, rows in newest(results, f"{gpu}-{what}"):
        here: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            here.setdefault((row["op"], row["problem"]), {})[row["impl"]] = row
        steps |= here
        found.append(path)
    if not steps:
        raise LookupError(f"{results} has no benchmark {gpu}-{what}")
    return steps, found


def training_steps(
    results: Path, gpu: str = "h200", models: str = "llama", of: str = "", beside: str = "XLA and cuDNN"
) -> Iterator[Strip]:
    """Training in 16 and in 8 bits beside that of others in 16. of: what the lines' titles add."""
    steps, _ = steps_of_programs(results, gpu, models)
    for bits, wanted in (
        ("16 bits", "llama-step"),
        ("8 bits", "llama-fp8-step"),
        ("8 bits, delayed scaling", "llama-fp8-delayed-step"),
    ):
        found = ((problem, by) for (op, problem), by in steps.items() if op == wanted)
        ratios = sorted((float(by["xla"]["median_us"]) / float(by["mgpu_ops"]["median_us"]), problem) for problem, by in found)
        if ratios:
            yield Strip(f"a training step in {bits}{of}", beside + " in 16 bits" * (bits != "16 bits"), ratios)


def program(results: Path, gpu: str = "h200") -> Iterator[str]:
    """Steps of a language model: milliseconds and the memory that XLA plans, beside XLA's in the same run."""
    steps, found = steps_of_programs(results, gpu)
    yield from _steps(sorted(steps.items(), key=_order_of_step), _step)
    yield next(sources(*found))  # the page has pictures of its own


def program_h100(results: Path) -> Iterator[str]:
    """The same on an H100."""
    return program(results, "h100")


def program_models(
    results: Path, gpu: str = "h200", models: str = "llama-models", beside: str = "XLA and cuDNN"
) -> Iterator[str]:
    """The same of other models, that nothing is tuned for, by model."""
    steps, found = steps_of_programs(results, gpu, models)

    def order(item: tuple[tuple[str, str], Any]) -> tuple[str, Any]:
        return item[0][1].partition("-layers-")[0], _order_of_step(item)

    def what(op: str, problem: str) -> str:
        model, _, rest = problem.partition("-layers-")
        name, _, layers = model.rpartition("-")
        return f"{name}, {layers} layers: {_step(op, f'-layers-{rest}')}"

    yield from _steps(sorted(steps.items(), key=order), what, beside)
    yield next(sources(*found))


def program_models_h100(results: Path) -> Iterator[str]:
    """The same on an H100."""
    return program_models(results, "h100")


def program_experts(results: Path) -> Iterator[str]:
    """The same of models with experts."""
    return program_models(results, models="llama-experts", beside="XLA, cuDNN and JAX's ragged_dot")


def _steps(
    steps: Iterable[tuple[tuple[str, str], dict[str, Row]]], what: Callable[[str, str], str], beside: str = "XLA and cuDNN"
) -> Iterator[str]:
    """A table of steps, a line of each. what: its title, of the op and the problem."""
    yield f"| a step | {beside}, ms | ours, ms | theirs over ours | XLA's memory, GB | ours, GB |"
    yield "|---" * 6 + "|"
    for (op, problem), by in steps:
        xla, ours = (float(by[impl]["median_us"]) / 1e3 for impl in ("xla", "mgpu_ops"))
        peaks = (f"{float(by[impl]['peak_bytes']) / 1e9:.2f}" for impl in ("xla", "mgpu_ops"))
        yield f"| {what(op, problem)} | {xla:.4g} | {ours:.4g} | {xla / ours:.3f}x | {' | '.join(peaks)} |"


_COMPILED = {  # of scripts/compile_times.py
    "attention": "attention, forward and backward",
    "attention-segments": "the same with segments",
    "attention-deterministic": "the same, deterministic",
    "llama": "a training step of 4 layers",
}
_COMPILERS = {"mgpu_ops": "ours", "cudnn": "cuDNN", "tokamax": "tokamax", "xla": "XLA and cuDNN"}
_COMPILE_STAGES = ("trace", "lower", "compile", "all")


def compile_times(results: Path, gpu: str = "h200") -> Iterator[str]:
    """Seconds from a function to an executable, by stage: of processes alone, or medians of those timed in turn, if later."""
    alone, in_turn = (sorted(results.glob(f"????-??-??-{gpu}-compile-times{kind}.jsonl")) for kind in ("", "-early"))
    if not alone or not in_turn:
        raise LookupError(f"{results} has no {gpu}-compile-times, or none of processes in turn, -early")
    rows, turns = ([json.loads(line) for line in of[-1].read_text(encoding="utf-8").splitlines()] for of in (alone, in_turn))
    times: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        times[row["case"], row["implementation"]][row["stage"]] = row["seconds"]
    latest = [row for row in turns if row["what"] in ("now", "XLA and cuDNN")]
    for case, implementation in dict.fromkeys((row["case"], row["implementation"]) for row in latest):
        of = [row for row in latest if (row["case"], row["implementation"]) == (case, implementation)]
        times[case, implementation] = {stage: statistics.median(row[stage] for row in of) for stage in _COMPILE_STAGES}
    yield "| what | whose | trace, s | lower, s | compile, s | all, s |"
    yield "|---" * 6 + "|"
    for (case, implementation), by_stage in times.items():
        cells = " | ".join(f"{by_stage[stage]:.2f}" for stage in _COMPILE_STAGES)
        yield f"| {_COMPILED[case]} | {_COMPILERS[implementation]} | {cells} |"
    yield next(sources(alone[-1], in_turn[-1]))


_STEPS = {
    "llama-step": "training",
    "llama-fp8-step": "training with FP8 products",
    "llama-fp8-delayed-step": "training with FP8 products, delayed scaling",
    "llama-decode": "decoding",
    "llama-int8-decode": "decoding, int8 weights",
    "llama-kv8-decode": "decoding, FP8 cache",
    "llama-int8-kv8-decode": "decoding, int8 weights and FP8 cache",
}


def _order_of_step(item: tuple[tuple[str, str], Any]) -> tuple[int, str, list[int]]:
    op, problem = item[0]
    return [*_STEPS].index(op.removesuffix("-sustained")), op, [int(n) for n in problem.rsplit("-", 1)[1].split("x")]


def _step(op: str, problem: str) -> str:
    what = _STEPS[op.removesuffix("-sustained")] + ", without pause" * op.endswith("-sustained")
    many, _, cached = problem.rsplit("-", 1)[1].partition("x")
    return f"{what}, {many} sequence{'s' * (many != '1')} of {cached} tokens" if cached else f"{what}, {many} tokens"


_KERNELS = re.compile(r"# (llama-\w+)-(\S+), (\w+): milliseconds of (.+)")
_KINDS = {"product": "products", "attention": "attention", "loss": "loss", "between": "between", "gaps": "gaps", "all": "all"}


@dataclass(frozen=True)
class Profile:
    """Where the milliseconds of one recorded step went: by kind of kernel, without one, and in all."""

    op: str  # llama-step
    problem: str  # llama3-8b-4-layers-16384-8192
    impl: str
    run: int  # the number of its file
    ms: dict[str, float]

    @property
    def size(self) -> int:
        """Tokens of training, sequences of decoding."""
        return int(self.problem.rsplit("-", 1)[1].partition("x")[0])


def profiles(results: Path) -> tuple[list[Profile], list[Path]]:
    """The steps in results/<date>-h200-llama-kernels*.txt, by the files' dates and names. LookupError where there is none."""
    paths = sorted(results.glob("????-??-??-h200-llama-kernels*.txt"), key=lambda path: path.stem)
    found = []
    for run, path in enumerate(paths, 1):
        for op, problem, impl, told in _KERNELS.findall(path.read_text(encoding="utf-8")):
            ms = {kind: float(number) for kind, number in (part.rsplit(" ", 1) for part in told.split(", "))}
            found.append(Profile(op, problem, impl, run, ms))
    if not found:
        raise LookupError(f"{results} has no kernels of h200-llama")
    return found, paths


def program_kernels(results: Path) -> Iterator[str]:
    """Where the time of recorded steps went, a table for each length of training and one for decoding.

    Of each length, and of each number of sequences, from the newest file that has it: its steps were recorded in one run.
    """
    found, paths = profiles(results)
    newest_of = {(p.op, p.size): p.run for p in found}
    found = [p for p in found if p.run == newest_of[p.op, p.size]]
    training = [p for p in found if p.op == "llama-step"]
    for count in sorted({p.size for p in training}):
        yield from _kinds_of(f"training, {count} tokens", [p for p in training if p.size == count], 1)
    decoding = sorted((p for p in found if p.op == "llama-decode"), key=lambda p: p.size)
    yield from _kinds_of("decoding", decoding, 3, lambda p: f"{p.impl}, batch {p.size}")
    yield next(sources(*(paths[run - 1] for run in sorted({p.run for p in found})))).lstrip("\n")


def _kinds_of(
    what: str, steps: Sequence[Profile], digits: int, title: Callable[[Profile], str] = lambda p: p.impl
) -> Iterator[str]:
    """A table: a column for each step, a line for each kind of kernel that any of them has."""
    yield f"| {what}, ms | {' | '.join(map(title, steps))} |"
    yield "|---" * (1 + len(steps)) + "|"
    for kind, name in _KINDS.items():
        if any(p.ms[kind] for p in steps):
            cells = (f"{p.ms[kind]:.{digits}f}" if p.ms[kind] or kind != "loss" else "with between" for p in steps)
            yield f"| {name} | {' | '.join(cells)} |"
    yield ""
