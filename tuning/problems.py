"""What to tune: the problems of a user's program, as `mgpu-tune capture` writes them, and of models (`mgpu_ops.models`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mgpu_ops.attention.problem import Problem as FlashAttentionProblem
from mgpu_ops.core.gpu import Gpu, find
from mgpu_ops.grouped.grouped_matmul import Problem as GroupedMatmulProblem
from mgpu_ops.grouped.ragged_contraction import Problem as RaggedContractionProblem
from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.models import MODELS
from mgpu_ops.ops import spec_of
from mgpu_ops.registry.capture import Captured
from mgpu_ops.registry.spec import OpSpec

SCHEMA = 1
TOKENS = (128, 256, 4096)  # that a model is tuned for unless it is said
SHORTEST = 128  # tokens of a sequence whose attention is a problem of a model; decoding depends on how long the context is
BACKWARD = ("flash_attention_backward", "ragged_contraction")  # ops that only gradients run

# --- Files of problems

Fields = dict[str, int | str | bool]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ProblemEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem of an op and how many times one call of the function runs it."""

    op: str
    problem: Fields
    count: Count


class Skipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that no config can make faster, and why: it runs through XLA, or brings its own config."""

    op: str
    problem: Fields
    count: Count
    reason: str


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a function would run on one GPU. `notes` tell what counts are not exact."""

    schema: Annotated[int, msgspec.Meta(ge=1, le=SCHEMA)]
    gpu: str  # Gpu.key
    function: str  # "module:function"
    problems: tuple[ProblemEntry, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TuningJob:
    """A problem to tune, how often it runs, and what to call it."""

    op: str
    problem: Any
    count: int
    name: str

    @property
    def spec(self) -> OpSpec:
        return spec_of(self.op)


def of(captured: Captured) -> list[TuningJob]:
    """What there is to tune of a captured function; the problem that takes most time first."""
    return by_time((_job(use.op, use.problem, use.count) for use in captured.problems), captured.gpu)


def _job(op: str, problem: Any, count: int) -> TuningJob:
    from mgpu_ops.tuning.labels import describe

    return TuningJob(op, problem, count, describe(problem))


def to_file(captured: Captured, function: str) -> File:
    """What to write of a captured function."""
    return File(
        SCHEMA,
        captured.gpu.key,
        function,
        tuple(ProblemEntry(work.op, dataclasses.asdict(work.problem), work.count) for work in of(captured)),
        tuple(Skipped(u.op, dataclasses.asdict(u.problem), u.count, u.skipped) for u in captured.uses if u.skipped),
        captured.notes,
    )


def write(path: Path, file: File) -> None:
    """Writes a file that `read` takes, one problem a line. ValueError where the disk refuses."""
    head, items = msgspec.json.encode(msgspec.structs.replace(file, problems=())), file.problems
    lines = ",\n".join(msgspec.json.encode(item).decode() for item in items)
    text = head.decode().replace('"problems":[]', f'"problems":[\n{lines}\n]', 1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}): name another file with --output") from None


def read(path: Path, gpu: Gpu | None = None) -> list[TuningJob]:
    """The problems of a file of `mgpu-tune capture`: each once, the one that takes most time first.

    Time is count times the modelled time of the default config on `gpu`, which is the file's own by default. ValueError, naming
    the file and the way out, for what is no such file or holds a problem that its op does not have.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=File)
        counts: dict[tuple[str, Any], int] = {}
        for item in file.problems:
            key = item.op, _problem(spec_of(item.op), item.problem)
            counts[key] = counts.get(key, 0) + item.count
        return by_time((_job(op, problem, n) for (op, problem), n in counts.items()), gpu or find(file.gpu))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}): write it with `mgpu-tune capture --output`") from None
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise ValueError(f"{path}: {error}: capture again with `mgpu-tune capture --output`") from None


def _problem(spec: OpSpec, fields: Fields) -> Any:
    """The op's Problem of all its fields, or of those without a default; sizes are at least 1."""
    known = {field.name: field for field in dataclasses.fields(spec.Problem)}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(f"{spec.name} problems have no {', '.join(unknown)}")
    problem: Any = msgspec.convert(fields, spec.Problem)
    for name, field in known.items():
        if field.default is dataclasses.MISSING and getattr(problem, name) < 1:
            raise ValueError(f"{name}={getattr(problem, name)} of {spec.name} must be at least 1")
    return problem


def by_time(work: Iterable[TuningJob], gpu: Gpu) -> list[TuningJob]:
    """In the order of what can be won: count times modelled time, longest first; last what no kernel runs on `gpu`."""

    def time(w: TuningJob) -> float:
        if w.spec.supports(w.problem, gpu) is not None:
            return 0.0
        return w.count * w.spec.cost(w.problem, w.spec.default(w.problem, gpu), gpu)

    return sorted(work, key=time, reverse=True)


# --- Models


def of_model(model: str, tokens: Sequence[int] = TOKENS, *, op: str | None = None, grad: bool = False) -> list[TuningJob]:
    """What a model runs with each of these numbers of tokens, in bfloat16, for one op or all that it concerns.

    `tokens` are the rows of its products: a sequence in training or prefill, whose attention is causal, or as many sequences
    that decode a token each, below `SHORTEST`, whose attention is left out. With `grad`, and of an op that only gradients run,
    also the problems of the backward pass.
    """
    found: dict[tuple[str, Any], TuningJob] = {}
    for backward, work in (product for count in tokens for product in _products(model, count)):
        if op in (None, work.op) and (grad or not backward or op in BACKWARD):
            same = found.get((work.op, work.problem))  # two products may be one problem
            found[work.op, work.problem] = work if same is None else dataclasses.replace(same, count=same.count + work.count)
    if not found:
        raise ValueError(f"model {model} has no problem of {op} with {', '.join(map(str, tokens))} tokens: name others")
    return list(found.values())


def _products(name: str, tokens: int) -> Iterator[tuple[bool, TuningJob]]:
    """Each with whether it is of the backward pass."""
    model, m = MODELS[name], tokens
    for what, p in model.projections.items():
        label = f"{name}-{what}-{m}"
        yield False, TuningJob("matmul", MatmulProblem(m, p.n, p.k), p.count, label)
        yield True, TuningJob("matmul", MatmulProblem(m, p.k, p.n, layout="nt"), p.count, f"{label}-da")
        yield True, TuningJob("matmul", MatmulProblem(p.k, p.n, m, layout="tn"), p.count, f"{label}-db")
    for what, e in model.experts.items():
        label = f"{name}-experts-{what}-{m}"
        forward = GroupedMatmulProblem(e.rows * m, e.n, e.k, e.groups)
        dlhs = dataclasses.replace(forward, n=e.k, k=e.n, layout="nt")
        drhs = RaggedContractionProblem(e.rows * m, e.n, e.k, e.groups)
        yield False, TuningJob("grouped_matmul", forward, e.count, label)
        yield True, TuningJob("grouped_matmul", dlhs, e.count, f"{label}-dlhs")
        yield True, TuningJob("ragged_contraction", drhs, e.count, f"{label}-drhs")
    for what, a in model.attention.items() if m >= SHORTEST else ():
        label = f"{name}-{what}-{m}"
        left = -1 if a.window is None else a.window - 1
        heads = (a.q_heads, a.kv_heads, a.head_dim)
        attention = FlashAttentionProblem(1, m, m, *heads, causal=True, window_left=left, soft_cap=a.soft_cap, sinks=a.sinks)
        backward = spec_of("flash_attention_backward").Problem(**dataclasses.asdict(attention))
        yield False, TuningJob("flash_attention", attention, a.count, label)
        yield True, TuningJob("flash_attention_backward", backward, a.count, f"{label}-backward")
