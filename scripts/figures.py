"""What README and docs/ say about speed, computed from the benchmarks in results/: tables and one picture.

    python -m scripts.figures            prints the tables
    python -m scripts.figures --write    puts them into README.md and docs/, between marks, and draws docs/images/speed.svg

A table names its CSV files. Of several files with the same problem, the one with the newest date in its name counts. "x" is the
other's time over ours, so that 1.10x is 10 % faster and 0.90x slower; means are geometric. "Earlier config" counts the problems
that were timed with another config than a call uses now (`tuning/bench/earlier.py`); a new benchmark of them brings it to 0.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mgpu_ops.tuning.bench.earlier import earlier_config
from scripts import speed_picture

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/speed.svg"
MARKS = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
HEAD = ("| | beside | problems | mean | worst | best | below 1x | earlier config |", "|---|---|---|---|---|---|---|---|")

Row = dict[str, str]
Ratio = Callable[["Problem"], float]


@dataclass(frozen=True)
class Problem:
    """What was timed in turn on one problem: a row for each implementation."""

    name: str  # square-2048
    shape: tuple[int, ...]  # (2048, 2048, 2048)
    file: Path
    rows: dict[str, Row]

    def us(self, impl: str) -> float:
        return float(self.rows[impl]["median_us"])

    def rate(self, impl: str) -> float:
        return float(self.rows[impl]["tflops"])

    @functools.cached_property
    def earlier_config(self) -> bool | None:
        return earlier_config(self.rows["mgpu_ops"])


def newest(results: Path, what: str) -> Iterator[tuple[Path, list[Row]]]:
    """The CSV files results/<date>-<what>.csv, oldest first, where `what` is a regular expression."""
    for path in sorted(results.glob("*.csv")):
        if re.fullmatch(r"\d{4}-\d\d-\d\d-" + what, path.stem):
            with path.open(newline="", encoding="utf-8") as stream:
                yield path, list(csv.DictReader(stream))


def problems(results: Path, what: str, *others: str) -> list[Problem]:
    """Of the benchmarks `what`, each problem from the newest file that has it and `others`. LookupError where there is none."""
    found: dict[tuple[str, str], Problem] = {}
    for path, rows in newest(results, what):
        here: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            here.setdefault((row["op"], row["problem"]), {})[row["impl"]] = row
        for key, impls in here.items():
            if not {*others} <= impls.keys():
                continue
            name, shape = key[1].split()[:2]
            found[key] = Problem(name, tuple(int(n) for n in shape.split("x")), path, impls)
    if not found:
        raise LookupError(f"{results} has no benchmark {what}")
    return list(found.values())


# --- lines of tables


@dataclass(frozen=True)
class Strip:
    """Ratios of some problems beside the fastest of some competitors: a line of a table, or of the picture."""

    what: str
    beside: str
    ratios: list[tuple[float, str]]  # with the problem's name, the smallest first
    earlier: int | None = None  # how many of them were timed with another config than a call uses now; None: not known of any

    @property
    def mean(self) -> float:
        return math.exp(math.fsum(math.log(r) for r, _ in self.ratios) / len(self.ratios))


def strip(what: str, beside: str, found: Iterable[Problem], *competitors: str, ratio: Ratio | None = None) -> Strip:
    """The ratios of those problems that all of `competitors` ran. LookupError where there is none.

    ratio: by default the time of the fastest of `competitors` over ours.
    """
    ratio = ratio or (lambda p: min(p.us(competitor) for competitor in competitors) / p.us("mgpu_ops"))
    timed = [p for p in found if {*competitors} <= p.rows.keys()]
    if not timed:
        raise LookupError(f"no problem of {what!r} was timed beside {', '.join(competitors)}")
    known = [p.earlier_config for p in timed if p.earlier_config is not None]
    return Strip(what, beside, sorted((ratio(p), p.name) for p in timed), sum(known) if known else None)


def line(what: str, beside: str, found: Iterable[Problem], *competitors: str, ratio: Ratio | None = None) -> str:
    """A line of a table, of a `strip`: geometric mean, extremes with their problems, and how many are below 1."""
    return line_of(strip(what, beside, found, *competitors, ratio=ratio))


def line_of(s: Strip) -> str:
    (worst, worst_name), (best, best_name) = s.ratios[0], s.ratios[-1]
    below = sum(r < 1 for r, _ in s.ratios)
    extremes = (f"{worst:.3f}x ({worst_name})", f"{best:.3f}x ({best_name})")
    cells = (s.what, s.beside, len(s.ratios), f"{s.mean:.3f}x", *extremes, below, "" if s.earlier is None else s.earlier)
    return f"| {' | '.join(map(str, cells))} |"


def of_dense(p: Problem) -> float:
    return p.rate("mgpu_ops") / p.rate("dense")


def sources(*files: Path) -> Iterator[str]:
    """Where a table is from, and the picture that lies beside the first file."""
    found = list(dict.fromkeys(files))
    yield f"\nFrom {', '.join(f'`results/{path.name}`' for path in found)}."
    if found[0].with_suffix(".png").exists():
        yield f"\n![{found[0].stem}](results/{found[0].stem}.png)"


def files(*groups: list[Problem]) -> list[Path]:
    return [p.file for group in groups for p in group]


# --- the tables


def rooflines(results: Path, *landmarks: tuple[str, str, str, tuple[str, ...]]) -> Iterator[str]:
    """Problems beside the datasheet's bound, the longer of arithmetic and HBM: (benchmark, label, problem, others)."""
    yield "| problem | FLOP/byte | bound by the datasheet, us | ours, us | share of the bound | fastest other, us |"
    yield "|---" * 6 + "|"
    shown = []
    for benchmark, what, name, others in landmarks:
        p = next(p for p in problems(results, benchmark) if p.name == name)
        bound, beside = p.rows["roofline"], [p.us(other) for other in others if other in p.rows]
        intensity = 1000 * float(bound["tflops"]) / float(bound["gbs"])
        share = f"{100 * p.us('roofline') / p.us('mgpu_ops'):.0f} %"
        cells = (f"{p.us('roofline'):.4g}", f"{p.us('mgpu_ops'):.4g}", share, f"{min(beside):.4g}" if beside else "")
        yield f"| {what or name} | {intensity:.0f} | {' | '.join(cells)} |"
        shown.append(p.file)
    yield next(sources(*shown))


def matmul_roofline(results: Path) -> Iterator[str]:
    bursts = ("square-8192", "llama3-8b-qkv-4096", "llama3-8b-gate_up-128", "llama3-8b-out-128", "llama3-8b-down-256")
    held = ("h200-matmul-sustained", "llama3-70b-qkv-8192, without pause", "llama3-70b-qkv-8192", ("xla",))
    yield from rooflines(results, *(("h200-matmul", "", name, ("xla",)) for name in bursts), held)


def flash_attention_roofline(results: Path) -> Iterator[str]:
    forward, both, others = "h200-flash_attention", "h200-flash_attention[+-]grad.*", ("cudnn", "tokamax")
    causal, decode = "llama3-8b-8192-causal", "h200-flash_attention-decode"
    yield from rooflines(
        results,
        *((forward, "", name, others) for name in ("mha64-4096", "mha128-4096", "mha256-4096", causal)),
        (both, f"{causal}, forward + backward", causal, others),
        *((decode, "", f"llama3-8b-decode-{size}", others) for size in ("16x8192", "1x8192")),
    )


def quantized_matmul_roofline(results: Path) -> Iterator[str]:
    sizes = ("llama3-70b-gate_up-1", "llama3-8b-down-1", "llama3-8b-down-16", "llama3-8b-out-1", "llama3-70b-gate_up-64")
    names = ((f"h200-quantized_matmul-w{bits}", f"{size}-w{bits}") for bits in (8, 4) for size in sizes)
    yield from rooflines(results, *((benchmark, "", name, ("xla",)) for benchmark, name in names))


def grouped_matmul_roofline(results: Path) -> Iterator[str]:
    training, weights = "deepseek-v3-ep8-gate_up-4096-random", "qwen3-235b-gate_up-8192-even"
    decoding = ("mixtral-8x7b-gate_up-16-random", "mixtral-8x7b-down-128-random", "deepseek-v3-ep8-down-64-sparse")
    others = ("jax-pallas", "tokamax")
    yield from rooflines(
        results,
        *(("h200-grouped_matmul-training", "", name, others) for name in (training, weights)),
        ("h200-ragged_contraction", "", f"{weights}-drhs", others),
        *(("h200-grouped_matmul-decoding", "", name, others) for name in decoding),
    )


def matmul(results: Path) -> Iterator[str]:
    forward, both = problems(results, r"h200-matmul"), problems(results, r"h200-matmul\+grad")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "XLA (cuBLAS)", found, "xla")
        yield line(f"{what}, m >= 2048", "XLA (cuBLAS)", [p for p in found if p.shape[0] >= 2048], "xla")
        for m in sorted({p.shape[0] for p in found if p.shape[0] < 2048}):
            yield line(f"{what}, m = {m}", "XLA (cuBLAS)", [p for p in found if p.shape[0] == m], "xla")
    sampled, drawn = problems(results, r"h200-matmul", "jax-pallas"), problems(results, r"h200-matmul-anywhere")
    yield line("forward", "JAX's sample kernel, tuned", sampled, "jax-pallas")
    yield line("forward, random shapes, untuned", "XLA (cuBLAS)", drawn, "xla")
    sustained = problems(results, r"h200-matmul-sustained")
    yield line("without pause, m >= 4096", "XLA (cuBLAS)", sustained, "xla")
    yield from sources(*files(forward, both, sampled, drawn, sustained))


def grouped_matmul(results: Path) -> Iterator[str]:
    training, decoding = problems(results, "h200-grouped_matmul-training"), problems(results, "h200-grouped_matmul-decoding")
    dlhs, drhs = problems(results, "h200-grouped_matmul-dlhs"), problems(results, "h200-ragged_contraction")
    dense, jax, tokamax = "rate of one dense matmul (cuBLAS)", "JAX's kernel, tuned", "tokamax, tuned"
    yield from HEAD
    yield line("training", dense, training, "dense", ratio=of_dense)
    yield line("gradient of lhs", dense, dlhs, "dense", ratio=of_dense)
    yield line("gradient of rhs", dense, drhs, "dense", ratio=of_dense)
    yield line("training", jax, training, "jax-pallas")
    yield line("training", tokamax, training, "tokamax")
    yield line("training", "the faster of the two", training, "jax-pallas", "tokamax")
    yield line("gradient of lhs", jax, dlhs, "jax-pallas")
    yield line("gradient of lhs", tokamax, dlhs, "tokamax")
    yield line("gradient of rhs", jax, drhs, "jax-pallas")
    yield line("decoding", jax, decoding, "jax-pallas")
    yield line("decoding", tokamax, decoding, "tokamax")
    yield line("decoding", "the faster of the two", decoding, "jax-pallas", "tokamax")
    rates = [float(p.rows["mgpu_ops"]["gbs"]) / 1000 for p in decoding]
    yield f"\nDecoding moves {min(rates):.1f} to {max(rates):.1f} TB/s."
    yield from sources(*files(training, decoding, dlhs, drhs))


def grouped_problems(results: Path) -> Iterator[str]:
    """A line a problem: our rate over dense's, forward and both gradients; the fastest competitor's time over ours."""
    training = problems(results, "h200-grouped_matmul-training")
    gradients = [problems(results, what) for what in ("h200-grouped_matmul-dlhs", "h200-ragged_contraction")]
    rates = {p.name: of_dense(p) for found in gradients for p in found}
    yield "| problem | rows per group | forward of dense | x best competitor | dlhs of dense | drhs of dense |"
    yield "|---|---|---|---|---|---|"
    for p in training:
        (groups,) = re.findall(r" g=(\d+)", p.rows["mgpu_ops"]["problem"])
        best = min(p.us("jax-pallas"), p.us("tokamax")) / p.us("mgpu_ops")
        numbers = (of_dense(p), best, rates[f"{p.name}-dlhs"], rates[f"{p.name}-drhs"])
        yield f"| {p.name} | {p.shape[0] // int(groups)} | {' | '.join(f'{x:.2f}' for x in numbers)} |"


def flash_attention(results: Path) -> Iterator[str]:
    forward, both = problems(results, "h200-flash_attention"), problems(results, "h200-flash_attention[+-]grad.*")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "cuDNN", found, "cudnn")
        for dim in sorted({p.shape[-1] for p in found}):
            yield line(f"{what}, head dim {dim}", "cuDNN", [p for p in found if p.shape[-1] == dim], "cudnn")
    yield line("forward", "tokamax, tuned", forward, "tokamax")
    yield line("forward", "the faster of the two", forward, "cudnn", "tokamax")
    decoding = problems(results, "h200-flash_attention-decode")
    yield line("decoding, the kernel", "cuDNN", decoding, "cudnn")
    yield from sources(*files(forward, both, decoding))


def gated_matmul(results: Path) -> Iterator[str]:
    forward = problems(results, "h200-gated_matmul-.*")
    yield from HEAD
    yield line("forward", "XLA (two products, cuBLAS)", forward, "xla")
    yield from sources(*files(forward))


def quantized_matmul(results: Path) -> Iterator[str]:
    """Products with 8- and 4-bit weights, by rows of x: the share of the H200's bandwidth that the packed bytes reach."""
    yield "| weights | m | problems | least share of 4.8 TB/s | most | XLA's time over ours, mean |"
    yield "|---" * 6 + "|"
    found = {bits: problems(results, f"h200-quantized_matmul-w{bits}") for bits in (8, 4)}
    for bits, m in itertools.product(found, (1, 8, 16, 64)):
        here = [p for p in found[bits] if p.shape[0] == m]
        shares = sorted((float(p.rows["mgpu_ops"]["gbs"]) / 4800, p.name.rsplit("-", 2)[0]) for p in here)
        least, most = (f"{share:.2f} ({name})" for share, name in (shares[0], shares[-1]))
        yield f"| int{bits} | {m} | {len(here)} | {least} | {most} | {strip('', '', here, 'xla').mean:.2f}x |"
    yield from sources(*files(*found.values()))


def cross_entropy(results: Path) -> Iterator[str]:
    forward, gradient = problems(results, "h200-cross_entropy"), problems(results, "h200-cross_entropy-gradient")
    yield from HEAD
    yield line("forward", "XLA", forward, "xla")
    yield line("gradient", "XLA", gradient, "xla")
    rates = [float(p.rows["mgpu_ops"]["gbs"]) / 1000 for p in forward + gradient if p.shape[0] >= 4096]
    yield f"\nWith 4096 tokens the kernels move {min(rates):.1f} to {max(rates):.1f} TB/s."
    yield from sources(*files(forward, gradient))


def moe(results: Path) -> Iterator[str]:
    layers, both, every = layers_of_experts(results), layers_of_experts(results, "+grad"), problems(results, r"h200-moe\+grad")
    parts = "the faster of JAX's and tokamax's kernels for each product, and XLA"
    yield from HEAD
    yield line("whole layer, forward", parts, layers, "fastest-parts")
    yield line("whole layer, forward + backward", parts, both, "fastest-parts")
    yield line("whole layer, forward + backward", "arithmetic at the datasheet's rate", every, "roofline")
    yield from sources(*files(layers, both, every))


def layers_of_experts(results: Path, passes: str = "") -> list[Problem]:
    """Whole layers beside the fastest parts of others; passes: "+grad" with gradients."""
    return problems(results, f"h200-moe{re.escape(passes)}-fastest")


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


def training_steps(results: Path, gpu: str = "h200") -> Iterator[Strip]:
    """Training in 16 and in 8 bits beside XLA's in 16."""
    steps, _ = steps_of_programs(results, gpu)
    for bits, wanted, beside in ((16, "llama-step", "XLA and cuDNN"), (8, "llama-fp8-step", "XLA and cuDNN in 16 bits")):
        found = ((problem, by) for (op, problem), by in steps.items() if op == wanted)
        ratios = sorted((float(by["xla"]["median_us"]) / float(by["mgpu_ops"]["median_us"]), problem) for problem, by in found)
        yield Strip(f"a training step in {bits} bits", beside, ratios)


def program(results: Path) -> Iterator[str]:
    """Steps of a language model: milliseconds and the memory that XLA plans, beside XLA's in the same run."""
    steps, found = steps_of_programs(results)
    yield from _steps(sorted(steps.items(), key=_order_of_step), lambda op, problem: _step(op, problem))
    yield next(sources(*found))  # the page has pictures of its own


def program_models(results: Path) -> Iterator[str]:
    """The same of models that nothing is tuned for, by model."""
    steps, found = steps_of_programs(results, "h100", "llama-models")

    def order(item: tuple[tuple[str, str], Any]) -> tuple[str, Any]:
        return item[0][1].partition("-layers-")[0], _order_of_step(item)

    def what(op: str, problem: str) -> str:
        model, _, rest = problem.partition("-layers-")
        name, _, layers = model.rpartition("-")
        return f"{name}, {layers} layers: {_step(op, f'-layers-{rest}')}"

    yield from _steps(sorted(steps.items(), key=order), what)
    yield next(sources(*found))


def _steps(steps: Iterable[tuple[tuple[str, str], dict[str, Row]]], what: Callable[[str, str], str]) -> Iterator[str]:
    """A table of steps, a line of each. what: its title, of the op and the problem."""
    yield "| a step | XLA and cuDNN, ms | ours, ms | theirs over ours | XLA's memory, GB | ours, GB |"
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
    """Seconds from a function to an executable, by stage, beside those before kernels were compiled at the same time."""
    now, before = (sorted(results.glob(f"????-??-??-{gpu}-compile-times{when}.jsonl")) for when in ("", "-before"))
    if not now or not before:
        raise LookupError(f"{results} has no {gpu}-compile-times with its -before")
    times: list[dict[tuple[str, str, str], float]] = [
        {(row["case"], row["implementation"], row["stage"]): row["seconds"] for row in map(json.loads, lines.splitlines())}
        for lines in (before[-1].read_text(encoding="utf-8"), now[-1].read_text(encoding="utf-8"))
    ]
    yield "| what | whose | trace, s | lower, s | compile, s | all, s |"
    yield "|---" * 6 + "|"
    for case, implementation in dict.fromkeys(key[:2] for key in times[1]):
        cells = (
            " -> ".join(f"{of[key]:.2f}" for of in times if (key := (case, implementation, stage)) in of)
            for stage in _COMPILE_STAGES
        )
        yield f"| {_COMPILED[case]} | {_COMPILERS[implementation]} | {' | '.join(cells)} |"
    yield next(sources(before[-1], now[-1]))


_STEPS = {
    "llama-step": "training",
    "llama-fp8-step": "training with FP8 products",
    "llama-decode": "decoding",
    "llama-int8-decode": "decoding, int8 weights",
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


def size(n: int) -> str:
    return next(f"{n // scale} {unit}" for scale, unit in ((2**20, "MiB"), (2**10, "KiB"), (1, "B")) if n >= scale)


def collectives(results: Path) -> Iterator[str]:
    """Of what a call adds to a chain of calls: XLA's time over ours."""
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    found = {
        (int(row["devices"]), row["op"], int(row["bytes"])): p
        for p in problems(results, rf"h200(x\d+)?-({'|'.join(ops)})(-.*)?")
        if "bfloat16" in (row := p.rows["xla"])["problem"]
    }
    keys = sorted(found, key=lambda key: (key[0], ops.index(key[1]), key[2]))

    def cell(devices: int, op: str, payload: int, impl: str) -> str:
        p = found.get((devices, op, payload))
        if p is None or impl not in p.rows:
            return ""
        if impl == "mgpu_ops" and p.rows[impl]["config"].startswith(("algorithm=xla ", "xla")):
            return "XLA runs"
        return f"{p.us('xla') / p.us(impl):.2f}x"

    columns = list(
        dict.fromkeys((*key[:2], impl) for key in keys for impl in sorted(found[key].rows) if impl.startswith("mgpu_ops"))
    )
    columns.sort(key=lambda column: (column[0], ops.index(column[1])))
    titles = [f"{n} GPUs: {op}{impl.removeprefix('mgpu_ops')}" for n, op, impl in columns]
    yield f"| payload | {' | '.join(titles)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for payload in sorted({key[2] for key in keys}):
        yield f"| {size(payload)} | {' | '.join(cell(n, op, payload, impl) for n, op, impl in columns)} |"
    yield from sources(*(found[key].file for key in keys))


# --- all ops at a glance


def strips(results: Path) -> Iterator[Strip]:
    """An op or two lines of it, each beside the fastest that JAX users have."""
    matmuls, grads = problems(results, "h200-matmul"), problems(results, r"h200-matmul\+grad")
    attention, both = problems(results, "h200-flash_attention"), problems(results, "h200-flash_attention[+-]grad.*")
    few, gated = problems(results, "h200-flash_attention-decode"), problems(results, "h200-gated_matmul-.*")
    training, decoding = problems(results, "h200-grouped_matmul-training"), problems(results, "h200-grouped_matmul-decoding")
    weights = problems(results, "h200-ragged_contraction")
    yield strip("attention, forward", "faster of cuDNN, tokamax", attention, "cudnn", "tokamax")
    yield strip("attention, forward + backward", "cuDNN", both, "cudnn")
    yield from drawn_attention(results, "h200")
    yield strip("attention, decoding", "cuDNN", few, "cudnn")
    yield strip("grouped matmul, training", "faster of JAX's, tokamax", training, "jax-pallas", "tokamax")
    yield strip("grouped matmul, decoding", "faster of JAX's, tokamax", decoding, "jax-pallas", "tokamax")
    yield strip("grouped matmul, gradient of weights", "JAX's kernel", weights, "jax-pallas")
    yield strip("matmul, m = 128", "XLA (cuBLAS)", [p for p in matmuls if p.shape[0] == 128], "xla")
    yield strip("matmul, m >= 256", "XLA (cuBLAS)", [p for p in matmuls if p.shape[0] >= 256], "xla")
    yield strip("matmul, random shapes, untuned", "XLA (cuBLAS)", problems(results, "h200-matmul-anywhere"), "xla")
    yield strip("matmul, forward + backward", "XLA (cuBLAS)", grads, "xla")
    yield strip("gated matmul", "XLA (two products)", gated, "xla")
    yield from training_steps(results)
    yield strip("mixture of experts, forward", "fastest parts of others", layers_of_experts(results), "fastest-parts")
    grads = layers_of_experts(results, "+grad")
    yield strip("mixture of experts, forward + backward", "fastest parts of others", grads, "fastest-parts")
    yield strip("cross-entropy, forward", "XLA", problems(results, "h200-cross_entropy"), "xla")
    yield strip("cross-entropy, gradient", "XLA", problems(results, "h200-cross_entropy-gradient"), "xla")

    two, four = problems(results, "h200x2-all_reduce"), problems(results, "h200x4-all_reduce")
    workspace = "mgpu_ops, workspace"
    small = [p for p in two if workspace in p.rows]
    large = [p for p in two if p not in small]
    yield strip(
        "all_reduce, 2 GPUs, <= 1 MiB, workspace", "XLA, no NVLS", small, "xla", ratio=lambda p: p.us("xla") / p.us(workspace)
    )
    yield strip("all_reduce, 2 GPUs, >= 4 MiB", "XLA (NCCL, no NVLS)", large, "xla")
    yield strip("all_reduce, 4 GPUs, kernel", "XLA, no NVLS", [p for p in four if runs_kernel(p)], "xla")


def drawn_attention(results: Path, gpu: str) -> Iterator[Strip]:
    others, what = ("cudnn", "tokamax"), f"{gpu}-flash_attention-anywhere"
    drawn = [p for p in problems(results, what) if {*others} & p.rows.keys()]
    yield strip(
        "attention, random shapes, untuned",
        "faster of cuDNN, tokamax",
        drawn,
        ratio=lambda p: min(p.us(x) for x in others if x in p.rows) / p.us("mgpu_ops"),
    )
    yield strip("the same, forward + backward", "cuDNN", problems(results, f"{what}-grad"), "cudnn")


_OF_A_LAYER = ("gated_matmul", "rms_norm", "rotary", "embedding", "cross_entropy", "quantize")


def h100(results: Path) -> Iterator[str]:
    """What was timed on an H100, with the configs of the H200."""
    forward, both = problems(results, "h100-flash_attention-llm"), problems(results, r"h100-flash_attention\+grad-llm")
    products, grouped = problems(results, "h100-matmul-llm"), problems(results, "h100-grouped_matmul-training")
    rows, drawn = problems(results, "h100-matmul-llm-rows"), problems(results, "h100-matmul-anywhere")
    decoding = problems(results, "h100-grouped_matmul-decoding")
    yield from HEAD
    yield line("attention, forward", "cuDNN", forward, "cudnn")
    yield line("attention, forward + backward", "cuDNN", both, "cudnn")
    yield from map(line_of, drawn_attention(results, "h100"))
    yield line("matmul", "XLA (cuBLAS)", products, "xla")
    yield line("matmul, layers of Llama 3, 1 to 4096 rows", "XLA (cuBLAS)", rows, "xla")
    yield line("matmul, random shapes, untuned", "XLA (cuBLAS)", drawn, "xla")
    yield line("grouped matmul, training", "JAX's kernel", grouped, "jax-pallas")
    yield line("grouped matmul, decoding", "faster of JAX's, tokamax", decoding, "jax-pallas", "tokamax")
    others = [(op, problems(results, f"h100-{op}-anywhere")) for op in _OF_A_LAYER]
    for op, found in others:
        yield line(f"{op}, random shapes, untuned", "XLA", found, "xla")
    yield from map(line_of, training_steps(results, "h100"))
    _, steps = steps_of_programs(results, "h100")
    attention = (problems(results, f"h100-flash_attention-anywhere{kind}") for kind in ("", "-grad"))
    timed = (forward, both, *attention, products, rows, drawn, grouped, decoding, *(found for _, found in others))
    yield next(sources(*files(*timed), *steps))


def runs_kernel(p: Problem) -> bool:
    return not p.rows["mgpu_ops"]["config"].startswith("algorithm=xla ")


def summary(results: Path) -> Iterator[str]:
    yield from HEAD
    yield from map(line_of, strips(results))


_GLANCE = (  # of the `strips`, for a first look: each kind of op, tuned and untuned, and what is behind
    "attention, forward + backward",
    "attention, random shapes, untuned",
    "attention, decoding",
    "matmul, m >= 256",
    "matmul, random shapes, untuned",
    "grouped matmul, training",
    "a training step in 16 bits",
    "all_reduce, 4 GPUs, kernel",
)


def glance(results: Path) -> Iterator[str]:
    yield "| | beside | problems | mean | worst | best | earlier config |"
    yield "|---" * 7 + "|"
    by_what = {s.what: s for s in strips(results)}
    for s in (by_what[what] for what in _GLANCE):
        extremes = f"{s.ratios[0][0]:.2f}x | {s.ratios[-1][0]:.2f}x"
        earlier = "" if s.earlier is None else s.earlier
        yield f"| {s.what} | {s.beside} | {len(s.ratios)} | {s.mean:.2f}x | {extremes} | {earlier} |"


def picture(results: Path) -> str:
    """The `strips` as SVG."""
    return speed_picture.drawn([(s.what, s.beside, s.mean, s.ratios) for s in strips(results)])


_MODELLED = re.compile(
    r"(\w+)('s baseline)?, (.+): (\d+) problems, (\d+) times; error median ([\d.]+), 95th percentile ([\d.]+)"
    r"(?:; the model's choice over the fastest: mean ([\d.]+), worst ([\d.]+))?"
)


def model_error(results: Path) -> Iterator[str]:
    """How far the cost models are from what was measured (`scripts/model_error.py`). LookupError where no file says so."""
    paths = sorted(results.glob("????-??-??-h200-model-error.txt"))
    if not paths:
        raise LookupError(f"{results} has no model-error.txt")
    yield "| op | problems | times | error, median | p95 | the model's choice, mean | worst |"
    yield "|---" * 7 + "|"
    for line in paths[-1].read_text().splitlines():
        if (found := _MODELLED.fullmatch(line)) is None:
            continue
        op, baseline, what, problems_of_it, times, median, p95, mean, worst = found.groups()
        if baseline:
            op = f"{'cuDNN' if op.startswith('flash_attention') else 'XLA'}'s {op}"
        chosen = (mean, worst) if mean and times != problems_of_it else ("", "")
        yield (
            f"| {op}, {what} | {problems_of_it} | {times} | {100 * float(median):.1f} % | {100 * float(p95):.1f} % "
            f"| {chosen[0]} | {chosen[1]} |"
        )
    yield next(sources(paths[-1]))


# --- where they are shown


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "matmul_roofline": matmul_roofline,
    "matmul": matmul,
    "flash_attention_roofline": flash_attention_roofline,
    "gated_matmul": gated_matmul,
    "grouped_matmul_roofline": grouped_matmul_roofline,
    "grouped_matmul": grouped_matmul,
    "grouped_problems": grouped_problems,
    "flash_attention": flash_attention,
    "quantized_matmul_roofline": quantized_matmul_roofline,
    "quantized_matmul": quantized_matmul,
    "cross_entropy": cross_entropy,
    "moe": moe,
    "collectives": collectives,
    "program": program,
    "program_models": program_models,
    "program_kernels": program_kernels,
    "compile_times": compile_times,
    "h100": h100,
    "model_error": model_error,
    "summary": summary,
    "glance": glance,
}


def pages() -> list[Path]:
    """README.md and the pages of docs/ with marks `<!-- figures: NAME -->` and `<!-- end of figures -->`."""
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if MARKS.search(path.read_text())]


def filled(text: str, results: Path, up: str = "") -> str:
    """`text` with what is between its marks computed anew. up: the way from its folder to that of results/."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[2]](results)).replace("](results/", f"]({up}results/")
        return f"{match[1]}{lines}\n{match[3]}"

    return MARKS.sub(table, text)


def of_page(path: Path) -> str:
    return filled(path.read_text(), ROOT / "results", "../" * (len(path.relative_to(ROOT).parts) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    write = parser.parse_args().write
    jax.config.update("jax_platforms", "cpu")
    for name in [name for name in os.environ if name.startswith("MGPU_OPS_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as empty:  # only shipped entries count
        os.environ["MGPU_OPS_CONFIG_DIR"] = empty
        if write:
            for path in pages():
                path.write_text(of_page(path))
            PICTURE.parent.mkdir(exist_ok=True)
            PICTURE.write_text(picture(ROOT / "results"))
            return
        for name, table in TABLES.items():
            print(f"\n{name}\n\n" + "\n".join(table(ROOT / "results")))


if __name__ == "__main__":
    main()
