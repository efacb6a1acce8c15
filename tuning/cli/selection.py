"""The problems that a command line asks for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_ops.models import MODELS
from mgpu_ops.tuning.cli.arguments import FIELDS
from mgpu_ops.tuning.cli.shared import UsageError, say

if TYPE_CHECKING:
    from mgpu_ops.core.gpu import Gpu
    from mgpu_ops.registry.spec import OpSpec, Problem
    from mgpu_ops.tuning.problems import TuningJob

Problems = dict[str, "Problem"]  # by name


def problems_of(spec: OpSpec, arguments: argparse.Namespace) -> Problems:
    """The problems of one op that the arguments ask for: by --shape, --suite or --bytes, or by fields that have options."""
    given = _fields_of(spec, arguments)
    needed = [f.name for f in dataclasses.fields(spec.Problem) if f.default is dataclasses.MISSING]
    suite, tokens = getattr(arguments, "suite", None), getattr(arguments, "tokens", None)
    if getattr(arguments, "bytes", None):
        return _payloads(spec, arguments, given)
    by_fields = FIELDS.keys() >= set(needed)
    if sum(map(bool, (given, arguments.shape, suite))) != 1 or (given and not by_fields):
        ways = [flags(needed)] * by_fields + ["--shape NAME", "--suite NAME"]
        raise UsageError(f"name the problem in one way: {', or '.join(ways)}")
    if tokens and suite not in MODELS:
        raise UsageError(f"--tokens is for --suite with a model ({', '.join(MODELS)}), not for {suite or 'one problem'}")
    if suite:
        return _suite(spec, suite, tokens)
    if arguments.shape:
        return {arguments.shape: shape_of(spec, arguments.shape)}
    return _by_fields(spec, given, needed)


def shape_of(spec: OpSpec, name: str) -> Problem:
    """The op's problem of that name."""
    from mgpu_ops.tuning import suites

    problem = suites.named(spec, name)
    if problem is None:
        raise UsageError(f"shape {name!r} is not one of {', '.join(spec.shapes)}")
    return problem


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a problem that are given."""
    return {name: value for name in FIELDS if (value := getattr(arguments, name, None)) is not None}


def _fields_of(spec: OpSpec, arguments: argparse.Namespace) -> dict[str, Any]:
    """Those of a problem of this op."""
    given = _fields(arguments)
    if "bias" in given:
        given["bias"] = _bias(spec, given["bias"], given.get("dtype", "bfloat16"))
    return given


def _bias(spec: OpSpec, given: bool | str, dtype: str) -> bool | str:
    """The field `bias`: of attention the dtype of the bias, of other ops True."""
    default = {f.name: f.default for f in dataclasses.fields(spec.Problem)}.get("bias")
    if isinstance(default, str):
        return dtype if given is True else given
    if given is not True:
        raise UsageError(f"--bias of {spec.name} takes no dtype: leave {given} out")
    return True


def _suite(spec: OpSpec, suite: str, tokens: Sequence[int] | None) -> Problems:
    """The op's problems of that list, or of that model with these numbers of tokens."""
    from mgpu_ops.tuning import suites

    known = suites.names(spec)
    if suite in MODELS and (tokens or suite not in known):
        from mgpu_ops.tuning.problems import TOKENS, of_model

        return {job.name: job.problem for job in of_model(suite, tokens or TOKENS, op=spec.name)}
    if suite not in known:
        raise UsageError(f"suite {suite!r} is not one of {', '.join(dict.fromkeys([*known, *MODELS]))}")
    return suites.problems(spec, suite)


def _by_fields(spec: OpSpec, given: Mapping[str, Any], needed: Sequence[str]) -> Problems:
    from mgpu_ops.registry.spec import problem_of
    from mgpu_ops.tuning.labels import describe

    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"{flags(missing)} missing: a {spec.name} problem has {flags(needed)}")
    problem = problem_of(spec, given)  # refuses fields that the op's problems do not have
    if (size := spec.bytes(problem)) >= 2**63:
        raise UsageError(f"the arrays of {spec.name} {describe(problem)} would hold {size:.3g} bytes: no array has 2**63")
    return {describe(problem): problem}


def _payloads(spec: OpSpec, arguments: argparse.Namespace, given: dict[str, Any]) -> Problems:
    """Problems of a collective, one for each size of --bytes."""
    from mgpu_ops.registry.spec import problem_of
    from mgpu_ops.tuning.labels import describe

    if "size" not in {f.name for f in dataclasses.fields(spec.Problem)}:
        raise UsageError(f"--bytes is for collectives, not for {spec.name}")
    if arguments.shape or arguments.suite or "size" in given:
        raise UsageError("--bytes names the payloads: leave out --size, --shape and --suite")
    if "devices" not in given:
        raise UsageError(f"--devices missing: of how many GPUs is the {spec.name}?")
    itemsize = {"bfloat16": 2, "float16": 2}.get(given.get("dtype", "bfloat16"), 4)
    sizes = [bytes_ // itemsize for bytes_ in arguments.bytes if bytes_ % (itemsize * given["devices"]) == 0]
    if not sizes:
        raise UsageError(f"--bytes: no size holds whole elements of {itemsize} bytes for each of {given['devices']} GPUs")
    made = [problem_of(spec, {**given, "size": size}) for size in sizes]
    names = {problem: name for name, problem in spec.shapes.items()}
    return {names.get(problem, describe(problem)): problem for problem in made}


def jobs_of(arguments: argparse.Namespace) -> list[TuningJob]:
    """The tuning jobs that the arguments ask for: of a captured program, a model, one op, or every op that has a suite."""
    from mgpu_ops import spec_of
    from mgpu_ops.tuning import problems

    op, suite = arguments.op, arguments.suite
    if op is not None:
        spec_of(op)  # refuses an unknown one
    if arguments.file:
        return _captured(arguments)
    if suite in MODELS and (op is None or arguments.grad):
        if given := _fields(arguments):
            raise UsageError(f"--suite {suite} names the problems of a model: leave out {flags(given)}")
        return problems.of_model(suite, arguments.tokens or problems.TOKENS, op=op, grad=arguments.grad)
    if arguments.grad:
        raise UsageError(f"--grad is for --suite with a model ({', '.join(MODELS)})")
    return [
        problems.TuningJob(spec.name, problem, 1, name)
        for spec in _specs_of(op, suite)
        for name, problem in problems_of(spec, arguments).items()
    ]


def _captured(arguments: argparse.Namespace) -> list[TuningJob]:
    """The jobs of the file of --from, of the op if one is named."""
    from mgpu_ops.tuning import problems

    options = ("suite", "shape", "bytes", "grad", "tokens")
    if given := [*(name for name in options if getattr(arguments, name)), *_fields(arguments)]:
        raise UsageError(f"--from {arguments.file} names the problems: leave out {flags(given)}")
    found = [job for job in problems.read(arguments.file) if arguments.op in (None, job.op)]
    if not found:
        raise UsageError(f"{arguments.file} has no problem of {arguments.op or 'any op'}: nothing to tune")
    return found


def _specs_of(op: str | None, suite: str | None) -> list[OpSpec]:
    """The op, or every op that has the suite."""
    from mgpu_ops import SPECS, spec_of
    from mgpu_ops.tuning import suites

    if op is not None:
        return [spec_of(op)]
    if suite is None:
        raise UsageError(f"name an op ({', '.join(SPECS)}), or --suite NAME of all that have it, or --from FILE")
    found = [spec for spec in SPECS.values() if suite in suites.names(spec)]
    if not found:
        known = dict.fromkeys([*MODELS, *(name for spec in SPECS.values() for name in suites.names(spec))])
        raise UsageError(f"suite {suite!r} is not one of {', '.join(known)}")
    return found


def runnable(jobs: Sequence[TuningJob], gpu: Gpu) -> list[TuningJob]:
    """The jobs that a kernel runs on `gpu`, the one that takes most time first; says which are left out.

    One job alone is never left out: tuning it says why it cannot be.
    """
    from mgpu_ops.tuning import problems

    if len(jobs) == 1:
        return list(jobs)
    left = problems.by_time(supported(jobs, [gpu]), gpu)
    if not left:
        raise UsageError(f"no kernel runs any of these problems on {gpu.name}: nothing to tune")
    return left


def supported(jobs: Iterable[TuningJob], gpus: Sequence[Gpu]) -> list[TuningJob]:
    """The jobs that a kernel runs on one of these GPUs; says which are left out."""
    found = []
    for job in jobs:
        reasons = [job.spec.supports(job.problem, gpu) for gpu in gpus]
        if None in reasons:
            found.append(job)
        else:
            say(f"left out, it runs through XLA: {job.op} {job.name}: {reasons[0]}")
    return found


def flags(names: Iterable[str]) -> str:
    """ "--m, --n and --k" """
    *most, last = (f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(most)} and {last}" if most else last
