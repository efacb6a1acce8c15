"""Benchmarks: an op through its public function beside other implementations, as CSV files of one schema for all ops.

All implementations of a problem are timed in turn within one run; ratios between rows of different
runs mean little. Collectives are measured by `between.py`, into rows of the same schema.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mgpu_ops
from mgpu_ops.attention.flash_attention import top_left_attention
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.model import SOFT_CAP
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import ptxas
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import dispatch, resolution
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench.implementations import PEERS, Peer, Task, Timer, brief, compiled, settings_in
from mgpu_ops.tuning.compile_pool import Pool
from mgpu_ops.tuning.labels import label, problem_of

OURS = "mgpu_ops"
ROOFLINE = "roofline"
BEST = "best peer"  # of a problem; stands for a peer's name where results are summed up
GRAD = "+grad"  # of an op's name: forward and backward
_LARGE = 2048  # rows of a matmul from which on it is bound by arithmetic
_GRAD_FACTOR = 3  # forward and backward are three products of the same size
_BACKWARD = {"flash_attention": "flash_attention_backward"}  # but for ops whose gradient is an op of its own


@dataclass(frozen=True)
class Row:
    """One implementation of one problem; the fields are the CSV file's columns, in this order.

    The kinds of time, all in microseconds:

    - `median_us`, what a call takes, which every ratio and rate is of. On one GPU: all kernels that a call launches, by CUPTI,
      after what the L2 held was pushed out of it. Of a collective: what one more call adds to a chain of calls in one jit, each
      waiting for the one before, by the clock on the wall; the host's part is in it where the host is slower than the GPUs.
    - `warm_us`, as `median_us` on one GPU, right after the same call with the same inputs.
    - `own_us` and `around_us`, of a collective, by CUPTI on the GPU that comes last, whose kernels wait for no other's start:
      the kernels that move data, and those before them (XLA's barrier of all GPUs, fills).
    - `chain_us`, of a collective, by the clock on the wall: a program of 16 calls alone, from its dispatch to its end.

    What was not measured, or is not of the op, is None: an empty cell.
    """

    op: str  # "matmul", or "matmul+grad"
    problem: str  # as `label` writes it
    impl: str  # "mgpu_ops", or a way of it as "mgpu_ops, workspace"; a peer, or "roofline"
    config: str
    median_us: float
    spread_us: float | None  # between the 10th and the 90th percentile of what median_us is the median of
    tflops: float
    gbs: float  # 10^9 bytes per second: inputs read once and outputs written once
    error: float | None  # measure.error against float32, NaN for infinities and NaN; None of a yardstick, which is no result
    gpu: str
    driver: str
    jax: str
    date: str
    warm_us: float | None = None
    cudnn: str = ""  # its version, as "9.19.0"
    cublas: str = ""
    ptxas: str = ""  # the newest PTX ISA that the ptxas of Mosaic GPU knows, as "9.3": that of CUDA 13.3
    devices: int | None = None  # of a collective, as all that follow
    bytes: int | None = None  # of the payload, on each device
    own_us: float | None = None
    around_us: float | None = None
    chain_us: float | None = None
    bus_gbs: float | None = None  # 10^9 bytes/s, as nccl-tests counts: bytes that must cross a device's link, by median_us


_FIELDS = dataclasses.fields(Row)
COLUMNS = tuple(field.name for field in _FIELDS)
_NEEDED = tuple(field.name for field in _FIELDS if field.default is dataclasses.MISSING)  # that every file has, first
_READ: dict[str, Callable[[str], Any]] = {  # annotations are text here
    field.name: {"str": str, "int": int, "float": float}[str(field.type).partition(" ")[0]] for field in _FIELDS
}
_ABOVE_ZERO = ("median_us", "warm_us", "chain_us", "devices", "bytes")
_MAY_BE_EMPTY = {field.name for field in _FIELDS if str(field.type).endswith("None")}


# --- Running --------------------------------------------------------------------------------------


def run(
    spec: OpSpec,
    problems: Mapping[str, Any],
    *,
    gpu: Gpu,
    against: Sequence[str],
    grad: bool,
    seconds: float,
    progress: Callable[[str], None],
    seed: int = 0,
    backend: dispatch.Backend | None = None,
    save: Callable[[list[Row]], None] | None = None,
    timer: Timer = measure.interleaved,
    warm: Timer = measure.warm,
    peer_seconds: float = 60.0,
    earlier: Iterable[Row] = (),
    pool: Pool | None = None,
) -> list[Row]:
    """Measures `problems` (name -> Problem) through the op's public function and its peers.

    Per problem: ours, each peer that can run it, and the roofline. With `grad`, forward and backward together, applied to a
    random cotangent. `seconds` is the time for the rounds of one problem with a cold L2, and half of it with a warm one.
    `progress` gets a line of text per problem, and one per peer that cannot run, wrong result, or problem that failed; the run
    goes on, and `failures` tells afterwards. `save` gets all rows so far after each problem. Peers take `peer_seconds` each to
    compile what they tune, in processes of the `pool` if there is one, and no time where `earlier` rows of the problem tell
    what won. ValueError for a peer that is not known, and for `grad` of an op that is a gradient itself.
    """
    if grad and spec.name in _BACKWARD.values():
        raise ValueError(f"{spec.name} is a gradient itself: measure it without --grad, or the forward op with it")
    peers = {name: _peer(spec, name) for name in against}
    backend = dispatch.requested_backend(backend)
    stamp = stamp_of(spec.name + GRAD * grad, gpu)
    won = {(row.op, row.problem, row.impl): settings_in(row.config) for row in earlier if row.gpu == gpu.name}
    rows: list[Row] = []
    for name, problem in problems.items():
        text = label(spec, name, problem)
        known = {peer: won.get((stamp["op"], text, peer), frozenset()) for peer in peers}
        case = _Case(spec, problem, gpu, grad, seconds, seed, backend, timer, warm, peer_seconds, known, pool)
        say = partial(_say, progress, text)
        try:
            with gpus.target(gpu):  # what is compiled is what `resolve` is asked for
                new = _measure(case, peers, {**stamp, "problem": text}, say)
        except Exception as error:
            say(f"failed: {brief(error)}")
            continue
        rows += new
        say(", ".join(f"{row.impl} {_us(row)}" for row in new))
        if save:
            save(rows)
    return rows


def stamp_of(name: str, gpu: Gpu) -> dict[str, Any]:
    """What all rows of a run have in common: op, GPU, date, and the versions of what runs."""
    return {
        "op": name,
        "gpu": gpu.name,
        "driver": gpus.driver_version() or "",
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **_libraries(),
    }


@functools.cache
def _libraries() -> dict[str, str]:
    """Versions of the libraries that XLA calls and of the assembler, "" of those that are not here."""
    from jax._src.lib import cuda_versions

    def version(name: str) -> str:
        try:
            number = getattr(cuda_versions, f"{name}_get_version")()
        except (AttributeError, RuntimeError):  # no CUDA plugin, no library, or no GPU
            return ""
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    isa = ptxas.isa()
    return {"cudnn": version("cudnn"), "cublas": version("cublas"), "ptxas": "" if isa is None else f"{isa // 10}.{isa % 10}"}


def failures(rows: Iterable[Row], spec: OpSpec, problems: Mapping[str, Any], *, grad: bool) -> list[str]:
    """The problems for which ours has no row or a wrong result: what an exit status should tell."""
    ours = [row for row in rows if row.op == spec.name + GRAD * grad and _way(row.impl) is not None]
    found = []
    for name, problem in problems.items():
        text, limit = label(spec, name, problem), _tolerance(spec, problem, grad)
        its = [row for row in ours if row.problem == text]
        if not its:
            found.append(f"{text}: no result")
        found += [
            f"{_with_way(text, _way(row.impl))}: error {row.error:.2g} is above {limit:.2g}"
            for row in its
            if not (row.error or 0.0) <= limit
        ]
    return found


def _way(impl: str) -> str | None:
    """Of an implementation that is ours, the way it is called: "" or, as of "mgpu_ops, workspace", "workspace"."""
    name, _, way = impl.partition(", ")
    return way if name == OURS else None


def _with_way(problem: str, way: str | None) -> str:
    return f"{problem} ({way})" if way else problem


@dataclass(frozen=True)
class _Case:
    """One problem, and how to measure it."""

    spec: OpSpec
    problem: Any
    gpu: Gpu
    grad: bool
    seconds: float
    seed: int
    backend: dispatch.Backend | None
    timer: Timer
    warm: Timer = measure.warm
    peer_seconds: float = 60.0
    known: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)  # a peer's settings of an earlier run
    pool: Pool | None = None


@dataclass(frozen=True)
class _Entrant:
    """A compiled implementation that has run once."""

    impl: str
    config: str
    call: Callable[[], Any]
    error: float | None


def _say(progress: Callable[[str], None], text: str, message: str) -> None:
    progress(f"{text}: {message}")


def _us(row: Row) -> str:
    return f"{row.median_us:.4g} us" + (f" ({row.warm_us:.4g} warm)" if row.warm_us is not None else "")


def _peer(spec: OpSpec, name: str) -> Peer:
    known = PEERS.get(spec.name, {})
    if name not in known:
        raise ValueError(f"{name!r} is no peer of {spec.name}: name one of {', '.join(known)}")
    return known[name]


def _measure(case: _Case, peers: Mapping[str, Peer], stamp: Mapping[str, Any], say: Callable[[str], None]) -> list[Row]:
    return [*_timed(case, _entrants(case, peers, say), stamp), _roofline(case, stamp)]


def _entrants(case: _Case, peers: Mapping[str, Peer], say: Callable[[str], None]) -> list[_Entrant]:
    """Ours and every peer that can run the problem, compiled and compared with float32."""
    key, key_g = jax.random.split(jax.random.key(case.seed))
    arrays = _public_arrays(case.spec, jax.jit(partial(case.spec.inputs, case.problem))(key))
    ours = _PUBLIC[case.spec.name](case.problem, case.backend)
    cotangent = functools.cache(partial(jax.random.normal, key_g))

    def operands_of(function: Callable[..., Any], arrays: tuple) -> tuple:
        if not case.grad:
            return arrays
        out = jax.eval_shape(function, *arrays)
        return *arrays, cotangent(out.shape, out.dtype)

    expected = _expected(case, operands_of(ours, arrays))
    limit = _tolerance(case.spec, case.problem, case.grad)

    def enter(impl: str, function: Callable[..., Any], config: str, arrays: tuple, yardstick: bool = False) -> _Entrant:
        call = compiled(_with_gradient(function) if case.grad else function, operands_of(function, arrays))
        answers = call()
        if yardstick:
            return _Entrant(impl, config, call, None)
        error = measure.error(answers, expected)
        if not error <= limit:
            say(f"WRONG RESULT of {impl}: error {error:.2g} is above {limit:.2g}")
        return _Entrant(impl, config, call, error)

    entrants = [enter(OURS, ours, _our_config(case), arrays)]
    for name, peer in peers.items():
        try:
            reason = _unavailable(case, peer)
            if reason is None:
                known = case.known.get(name, frozenset())
                theirs = arrays if peer.arrays is None else jax.jit(partial(peer.arrays, case.problem))(*arrays)
                task = Task(case.problem, case.gpu, theirs, case.timer, case.grad, case.peer_seconds, known, case.pool)
                entrants.append(enter(name, *peer.prepare(task), theirs, peer.yardstick))
            else:
                say(f"{name} {reason}")
        except Exception as error:
            say(f"{name} failed: {brief(error)}")
    return entrants


def _unavailable(case: _Case, peer: Peer) -> str | None:
    if case.grad and not peer.differentiable:
        return "is measured forward only"
    return peer.unavailable(case.problem, case.gpu)


def _timed(case: _Case, entrants: Sequence[_Entrant], stamp: Mapping[str, Any]) -> list[Row]:
    calls = [entrant.call for entrant in entrants]
    few = case.timer(calls, case.gpu, 3)
    flush_us = measure.FLUSHED * case.gpu.l2_bytes / case.gpu.memory_bytes_per_s * 1e6 + 10  # 10 us is for the launches
    once = sum(map(measure.median_us, few))
    samples = case.timer(calls, case.gpu, measure.rounds_for(case.seconds, once + len(calls) * flush_us))
    warm = case.warm(calls, case.gpu, measure.rounds_for(case.seconds / 2, 2 * once))
    return [
        _row(case, stamp, e.impl, e.config, measure.median_us(s), measure.spread_us(s), e.error, measure.median_us(w))
        for e, s, w in zip(entrants, samples, warm, strict=True)
    ]


def _roofline(case: _Case, stamp: Mapping[str, Any]) -> Row:
    """The least time by the datasheet: max(flops / tensor-core rate, bytes / memory bandwidth)."""
    flops, moved = _work(case)
    seconds = max(flops / case.gpu.bf16_flops, moved / case.gpu.memory_bytes_per_s)
    return _row(case, stamp, ROOFLINE, "datasheet", seconds * 1e6, 0.0, 0.0)


def _work(case: _Case) -> tuple[int, int]:
    """Operations and bytes."""
    flops, moved = case.spec.flops(case.problem), case.spec.bytes(case.problem)
    if not case.grad:
        return flops, moved
    if backward := _backward_of(case):
        spec, problem = backward
        return flops + spec.flops(problem), moved + spec.bytes(problem)
    return _GRAD_FACTOR * flops, _GRAD_FACTOR * moved


def _backward_of(case: _Case) -> tuple[OpSpec, Any] | None:
    """The op that computes the gradient, and the problem it then has, for ops that name one."""
    if case.spec.name not in _BACKWARD:
        return None
    spec = mgpu_ops.spec_of(_BACKWARD[case.spec.name])
    fields = dataclasses.asdict(case.problem)
    return spec, spec.Problem(**fields, bias_grad=fields["bias"] != "none")


def _row(
    case: _Case,
    stamp: Mapping[str, Any],
    impl: str,
    config: str,
    median_us: float,
    spread_us: float,
    error: float | None,
    warm_us: float | None = None,
) -> Row:
    flops, moved = _work(case)
    return Row(
        impl=impl,
        config=config,
        median_us=six_digits(median_us),
        spread_us=six_digits(spread_us),
        tflops=six_digits(flops / median_us / 1e6),
        gbs=six_digits(moved / median_us / 1e3),
        error=None if error is None else six_digits(error),
        warm_us=None if warm_us is None else six_digits(warm_us),
        **stamp,
    )


def six_digits(x: float) -> float:
    return float(f"{x:.6g}")


# --- What runs, and what it is checked against ----------------------------------------------------


def _matmul(problem: Any, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    call = partial(
        mgpu_ops.matmul,
        out_dtype=problem.out_dtype,
        transpose_a=problem.layout[0] == "t",
        transpose_b=problem.layout[1] == "t",
        backend=backend,
    )
    return call if problem.batch == 1 else jax.vmap(call)


def _grouped_matmul(problem: Any, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return mgpu_ops.grouped_matmul(
            lhs,
            rhs,
            sizes,
            bias=bias,
            activation=problem.activation,
            out_dtype=problem.out_dtype,
            transpose_rhs=problem.layout == "nt",
            spread=problem.spread,
            backend=backend,
        )

    return call


def _ragged_contraction(problem: Any, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    return partial(mgpu_ops.ragged_contraction, out_dtype=problem.out_dtype, spread=problem.spread, backend=backend)


def _flash_attention(problem: Any, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    p = problem
    if p.align == "top_left" and (p.segments or p.soft_cap):
        raise ValueError("dot_product_attention, which aligns first tokens, has neither segment ids nor a soft cap")

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
        inputs = Inputs.of(p, (None, *extra))
        lengths, segments = inputs.lengths or (None, None), inputs.segments or (None, None)
        left, right = (None if side < 0 else side for side in (p.window_left, p.window_right))
        shared: dict[str, Any] = {"bias": inputs.bias, "causal": p.causal, "window": (left, right), "backend": backend}
        shared |= {"q_lengths": lengths[0], "kv_lengths": lengths[1]}
        if p.align == "top_left":
            return top_left_attention(q, k, v, mask=None, scale=None, **shared)[0]
        cap = SOFT_CAP if p.soft_cap else None
        shared |= {"q_segment_ids": segments[0], "kv_segment_ids": segments[1]}
        out = mgpu_ops.flash_attention(q, k, v, soft_cap=cap, return_lse=False, **shared)
        assert isinstance(out, jax.Array)
        return out

    return call


def _flash_attention_backward(problem: Any, backend: dispatch.Backend | None) -> Callable[..., tuple[jax.Array, ...]]:
    """The op itself: the public function has it behind `jax.grad`."""
    spec = mgpu_ops.spec_of("flash_attention_backward")
    return lambda *arrays: dispatch.run(spec, problem, arrays, config=None, backend=backend)


_PUBLIC: dict[str, Callable[[Any, dispatch.Backend | None], Callable[..., Any]]] = {
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
    "ragged_contraction": _ragged_contraction,
    "flash_attention": _flash_attention,
    "flash_attention_backward": _flash_attention_backward,
}


def refusal(spec: OpSpec, problem: Any) -> str | None:
    """Why the public function raises for arrays of a problem that no kernel runs, as it says it; None: it runs through XLA.

    Nothing is computed. Collectives, whose arrays are of several GPUs, are not asked.
    """
    if spec.name not in _PUBLIC:
        return None
    if spec.name in _BACKWARD.values():  # the public function is the forward one
        spec = mgpu_ops.spec_of(next(forward for forward, backward in _BACKWARD.items() if backward == spec.name))
        fields = dataclasses.asdict(problem)
        problem = spec.Problem(**{field.name: fields[field.name] for field in dataclasses.fields(spec.Problem)})
    floats = dataclasses.replace(problem, dtype="bfloat16")  # random numbers of another dtype may have another way to be made
    try:
        arrays = jax.eval_shape(partial(spec.inputs, floats), jax.random.key(0))
    except (ArithmeticError, IndexError):  # nothing to make random numbers of
        return None
    as_asked = [jax.ShapeDtypeStruct(x.shape, problem.dtype) if x.dtype == jnp.bfloat16 else x for x in arrays]
    try:
        jax.eval_shape(_PUBLIC[spec.name](problem, "xla"), *_public_arrays(spec, tuple(as_asked)))
    except (TypeError, ValueError, OverflowError) as error:
        return brief(error)
    return None


def _public_arrays(spec: OpSpec, inputs: tuple) -> tuple:
    """What the public function takes of an op's inputs: not the numbers of attention, which are arguments of their own."""
    return (*inputs[:3], *inputs[4:]) if spec.name == "flash_attention" else inputs


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., tuple]:
    """The function with its gradients with respect to all inputs that are floats, group sizes not among them."""

    def forward_and_backward(*operands: jax.Array) -> tuple:
        *arrays, cotangent = operands
        which = [i for i, x in enumerate(arrays) if _is_float(x)]

        def of_floats(*floats: jax.Array) -> jax.Array:
            given = dict(zip(which, floats))
            return function(*(given.get(i, x) for i, x in enumerate(arrays)))

        out, pull = jax.vjp(of_floats, *(arrays[i] for i in which))
        return out, *pull(cotangent)

    return forward_and_backward


def _our_config(case: _Case) -> str:
    """The config and where it comes from; of a gradient that is an op of its own too. A gradient's products are not told."""
    if case.backend == "xla":
        return "backend=xla"
    text = f"{'forward ' * case.grad}{_resolved(case.spec, case.problem, case.gpu)}"
    if case.grad and (backward := _backward_of(case)):
        text += f" | backward {_resolved(*backward, case.gpu)}"
    return text


def _resolved(spec: OpSpec, problem: Any, gpu: Gpu) -> str:
    reason = spec.supports(problem, gpu)
    if reason is not None:
        return f"backend=xla, for {reason}"
    found = resolution.resolve(spec, problem, gpu)
    fields = dataclasses.asdict(found.config).items()
    return f"{' '.join(f'{key}={value}' for key, value in fields)}; source={found.source}"


def _wide(problem: Any) -> Any:
    """The same problem in float32."""
    names = {field.name for field in dataclasses.fields(problem)} & {"dtype", "out_dtype"}
    return dataclasses.replace(problem, **dict.fromkeys(names, "float32"))


def _expected(case: _Case, operands: tuple) -> tuple[jax.Array, ...]:
    """The answers in float32, by the public function through XLA at its highest precision, from the same inputs."""
    wide = tuple(x.astype(jnp.float32) if _is_float(x) else x for x in operands)
    function = _PUBLIC[case.spec.name](_wide(case.problem), "xla")
    if case.grad:
        function = _with_gradient(function)
    with jax.default_matmul_precision("highest"):
        answers = jax.jit(function)(*wide)
    return tuple(jax.tree.leaves(answers))


def _tolerance(spec: OpSpec, problem: Any, grad: bool) -> float:
    """The op's own; a gradient has the inputs' dtype, which may be coarser than the output's, or an op of its own."""
    limits = [spec.tolerance(problem)]
    backward = mgpu_ops.SPECS.get(f"{spec.name}_backward")
    if grad and backward is not None:
        limits.append(backward.tolerance(problem))
    if grad and hasattr(problem, "out_dtype"):
        limits.append(spec.tolerance(dataclasses.replace(problem, out_dtype=problem.dtype)))
    return max(limits)


# --- Files ----------------------------------------------------------------------------------------


def output_path(
    directory: str | os.PathLike[str],
    date: str,
    gpu_key: str,
    op: str,
    what: str | None = None,
    suffix: str = ".csv",
) -> Path:
    """directory/date-gpu-op[-what].csv, such as results/2025-01-31-h200-matmul-square.csv."""
    return Path(directory) / ("-".join(filter(None, (date, gpu_key, op, what))) + suffix)


def write_csv(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Replaces the file at `path`; floats keep every digit. No text may hold a carriage return."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(dataclasses.astuple, rows))
    temporary.replace(path)


def read_csv(path: str | os.PathLike[str]) -> list[Row]:
    """The rows that `write_csv` wrote, also of before it knew all of today's further columns: these are empty.

    ValueError, with path and line, for another file.
    """
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.reader(stream)
        header = tuple(next(reader, []))
        further = header[len(_NEEDED) :]
        if header[: len(_NEEDED)] != _NEEDED or not set(further) <= set(COLUMNS) or len(set(header)) != len(header):
            raise ValueError(f"{path}: has columns {list(header)}, not {list(COLUMNS)}: run the benchmark again")
        try:
            return [_parsed(path, reader.line_num, header, values) for values in reader]
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}: run the benchmark again") from None


def _parsed(path: str | os.PathLike[str], line: int, header: Sequence[str], values: Sequence[str]) -> Row:
    try:
        texts = dict(zip(header, values, strict=True))
        fields: dict[str, Any] = {c: None if text == "" and c in _MAY_BE_EMPTY else _READ[c](text) for c, text in texts.items()}
        if not all(fields[c] for c in ("op", "problem", "impl")):
            raise ValueError("op, problem and impl must not be empty")
        for c in _ABOVE_ZERO:
            if (value := fields.get(c)) is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{c}={texts[c]} must be a finite number above 0")
        for c, value in fields.items():
            if isinstance(value, float) and c != "error" and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{c}={texts[c]} must be a finite number, 0 or more")
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}: run the benchmark again") from None
    return Row(**fields)


def merge(*runs: Iterable[Row]) -> list[Row]:
    """The rows of several runs; those of an (op, problem, gpu) come from the last run with any.

    Rows of one problem stay together, as only times that were taken in turn may be compared.
    """
    latest: dict[tuple[str, str, str], list[Row]] = {}
    for rows in runs:
        latest |= _grouped(rows)
    return [row for rows in latest.values() for row in rows]


def _grouped(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.problem, row.gpu), []).append(row)
    return groups


# --- What the rows say ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One problem: ours, the peers that ran it by name, yardsticks among them, and the least time there could be."""

    op: str
    problem: str
    gpu: str
    ours: Row | None
    peers: dict[str, Row]
    roofline: Row | None

    @property
    def best(self) -> Row | None:
        """The fastest peer that is right; a yardstick is none."""
        return self._fastest(lambda row: row.median_us)

    def _fastest(self, us: Callable[[Row], float | None]) -> Row | None:
        right = [row for row in _rivals(self) if not wrong(row) and us(row) is not None]
        return min(right, key=lambda row: us(row) or 0.0, default=None)

    def ratio(self, peer: str, *, warm: bool = False) -> float | None:
        """The time of a peer, or of the `BEST`, over ours, above 1 where ours is faster. None unless both are right.

        `warm`: with a warm L2, where the best may be another; None where that was not measured.
        """

        def us(row: Row) -> float | None:
            return row.warm_us if warm else row.median_us

        theirs = self._fastest(us) if peer == BEST else self.peers.get(peer)
        if self.ours is None or theirs is None or wrong(self.ours) or wrong(theirs):
            return None
        mine, other = us(self.ours), us(theirs)
        return None if mine is None or other is None else other / mine


@dataclass(frozen=True)
class Summary:
    """Ours beside one peer, over the problems that both got right."""

    op: str
    gpu: str
    peer: str
    problems: int
    geomean: float  # of the peer's time over ours; NaN without a problem
    worst: float
    worst_problem: str
    wins: int  # problems where the ratio is at least 1
    wrong: int  # problems that are left out, as a result is wrong
    warm_geomean: float = math.nan  # as geomean, with a warm L2; NaN where that was not measured
    part: str = ""  # which of the op's problems, "" for all: as "m >= 2048"

    @property
    def losses(self) -> int:
        return self.problems - self.wins


# Until that day the error of attention was taken over the rms of a whole array. Tolerances since are of errors over the rms of
# a row, where that is larger: the small rows of a causal result are then no worse than the large ones.
_BY_ROW_SINCE = "2026-11-22"
_LIMIT_BEFORE = {"flash_attention": 0.15, "flash_attention+grad": 0.45, "flash_attention_backward": 0.45}


def wrong(row: Row) -> bool:
    """Whether the error is above the tolerance of the op and problem, so that its time says nothing; of a yardstick never.

    Rows of attention from before its error was taken by rows are held to the limits of then.

    `failures` asks the same. The largest tolerance of all problems that the op names stands for that of a problem that cannot
    be read, and the largest of all ops for that of an op that is not known.
    """
    if row.error is None:
        return False
    if row.date < _BY_ROW_SINCE and row.op in _LIMIT_BEFORE:
        return not row.error <= _LIMIT_BEFORE[row.op]
    return not row.error <= _limit(row.op, row.problem)


@functools.lru_cache(1024)
def _limit(name: str, text: str) -> float:
    base = name.removesuffix(GRAD)
    if base not in mgpu_ops.SPECS:
        return max(_largest(known) for known in mgpu_ops.SPECS)
    spec, grad = mgpu_ops.SPECS[base], name.endswith(GRAD)
    try:
        return _tolerance(spec, problem_of(spec, text), grad)
    except ValueError:
        return _largest(base, grad)


@functools.cache
def _largest(name: str, grad: bool = False) -> float:
    spec = mgpu_ops.SPECS[name]
    return max(_tolerance(spec, problem, grad) for problem in spec.shapes.values())


def lines(rows: Iterable[Row]) -> list[Line]:
    """One Line for each (op, problem, gpu), in the order of the rows.

    Where ours ran in several ways, as with a workspace and without, each has a Line of its own, beside the same peers.
    """
    found = []
    for (name, problem, gpu), group in _grouped(rows).items():
        by_impl = {row.impl: row for row in group}
        ours = {way: by_impl.pop(impl) for impl in list(by_impl) if (way := _way(impl)) is not None}
        roof = by_impl.pop(ROOFLINE, None)
        ways: dict[str, Row | None] = {**ours} or {"": None}
        found += [Line(name, _with_way(problem, way), gpu, row, by_impl, roof) for way, row in ways.items()]
    return found


def compared(every: Iterable[Line]) -> list[str]:
    """What the lines are compared with: peers, the `BEST` of them where there are several, and last the yardsticks."""
    peers = {name: row.error is None for line in every for name, row in line.peers.items()}
    rivals = [name for name, yardstick in peers.items() if not yardstick]
    return rivals + [BEST] * (len(rivals) > 1) + [name for name, yardstick in peers.items() if yardstick]


def yardsticks(every: Iterable[Line]) -> set[str]:
    """The peers that compute something else of the same cost."""
    return {name for line in every for name, row in line.peers.items() if row.error is None}


def summary(rows: Iterable[Row]) -> list[Summary]:
    """For each op, GPU and what it is `compared` with: the geometric mean of its time / our time, worst and wins."""
    return _summaries(lines(rows), "")


def split(rows: Iterable[Row]) -> list[Summary]:
    """As `summary`, of the parts of an op's problems: matmul from 2048 rows on and below, attention by its head dim.

    None of an op whose problems are all of one part.
    """
    parts: dict[str, dict[str, list[Line]]] = {}
    for line in lines(rows):
        if part := _part(line):
            parts.setdefault(line.op, {}).setdefault(part, []).append(line)
    several = (by_part for by_part in parts.values() if len(by_part) > 1)
    return [one for by_part in several for part, of_part in by_part.items() for one in _summaries(of_part, part)]


def _part(line: Line) -> str | None:
    spec = mgpu_ops.SPECS.get(line.op.removesuffix(GRAD))
    if spec is None:
        return None
    try:
        problem = problem_of(spec, line.problem)
    except ValueError:
        return None
    if spec.name == "matmul":
        return f"m {'>=' if problem.m >= _LARGE else '<'} {_LARGE}"
    return f"head dim {problem.head_dim}" if hasattr(problem, "head_dim") else None


def _summaries(every: Iterable[Line], part: str) -> list[Summary]:
    sets: dict[tuple[str, str], list[Line]] = {}
    for line in every:
        sets.setdefault((line.op, line.gpu), []).append(line)
    found = []
    for (name, gpu), both in sets.items():
        for peer in compared(both):
            ran = [line for line in both if line.ours and (peer in line.peers or (peer == BEST and _rivals(line)))]
            found += [_summary(name, gpu, peer, ran, part)] if ran else []
    return found


def _rivals(line: Line) -> list[Row]:
    return [row for row in line.peers.values() if row.error is not None]


def _summary(name: str, gpu: str, peer: str, both: Sequence[Line], part: str) -> Summary:
    ratios = [(ratio, line.problem) for line in both if (ratio := line.ratio(peer)) is not None]
    worst, worst_problem = min(ratios, default=(math.nan, ""))
    return Summary(
        op=name,
        gpu=gpu,
        peer=peer,
        problems=len(ratios),
        geomean=_geomean([ratio for ratio, _ in ratios]),
        worst=worst,
        worst_problem=worst_problem,
        wins=sum(ratio >= 1.0 for ratio, _ in ratios),
        wrong=len(both) - len(ratios),
        warm_geomean=_geomean([ratio for line in both if (ratio := line.ratio(peer, warm=True)) is not None]),
        part=part,
    )


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
