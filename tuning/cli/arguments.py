"""What the commands are asked: problems, times and numbers.

The parsers know the ops by the tables here, and import none: that takes JAX and a second, and `--help` answers at once. A test
holds the tables to the ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.models import MODELS
from mgpu_ops.tuning.cli.shared import UsageError, say

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}
_DTYPES |= {"i32": "int32", "u32": "uint32"}  # of collectives

SUITES: dict[str, tuple[str, ...]] = {  # of each op
    "matmul": ("llm", "square", "llama3-8b", "llama3-70b", "llama3-8b-backward"),
    "grouped_matmul": (
        "moe",
        "training",
        "decoding",
        "dlhs",
        "mixtral-8x7b",
        "deepseek-v3-ep8",
        "qwen3-30b",
        "qwen3-235b",
    ),
    "ragged_contraction": ("moe", "mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b"),
    "flash_attention": ("llm", "d64", "d128", "d256"),
    "flash_attention_backward": ("llm", "d64", "d128", "d256"),
    "all_reduce": ("2-gpus", "4-gpus", "8-gpus"),
    "reduce_scatter": ("2-gpus", "4-gpus", "8-gpus"),
    "all_gather": ("2-gpus", "4-gpus", "8-gpus"),
}
COMPETITORS: dict[str, tuple[str, ...]] = {  # what `bench` times beside each op
    "matmul": ("xla", "jax-pallas"),
    "grouped_matmul": ("dense", "jax-pallas", "tokamax", "lax"),
    "ragged_contraction": ("dense", "jax-pallas", "tokamax", "lax"),
    "flash_attention": ("cudnn", "tokamax", "jax-pallas"),
    "flash_attention_backward": ("cudnn",),
}
BACKENDS = ("mosaic", "interpret", "xla")
_SHAPES = "square-2048 of matmul, mixtral-8x7b-gate_up-2048-even of grouped_matmul, llama3-8b-8192-causal of flash_attention"


def problem_arguments(parser: argparse.ArgumentParser, many: bool = False, every_op: bool = False) -> None:
    """`many`: also suites. `every_op`: the op may be left out where suites or files name it, see `work_of`."""
    if every_op:
        parser.add_argument("op", nargs="?", help=f"{', '.join(SUITES)}; of a suite or a file, all by default")
    else:
        parser.add_argument("op", help=", ".join(SUITES))
    group = parser.add_argument_group("problem", "a named one, or its sides")
    group.add_argument("--shape", metavar="NAME", help=f"of a real model, e.g. {_SHAPES}")
    if many:
        suites = "; ".join(f"{op}: {', '.join(names)}" for op, names in SUITES.items())
        group.add_argument(
            "--suite", metavar="NAME", help=f"a model ({', '.join(MODELS)}), or named shapes together ({suites})"
        )
        group.add_argument(
            "--tokens",
            type=positive_ints,
            metavar="N,N",
            help="of a model: rows of its products, e.g. 1,16,4096 (default: "
            "what the op has by that name, else 128,256,4096); the attention is that of a causal sequence, from 128 on",
        )
        group.add_argument(
            "--bytes",
            type=byte_sizes,
            metavar="A:B",
            help="of a collective: payloads from A to B, each four times the one before, e.g. 1KiB:256MiB",
        )
    if every_op:
        group.add_argument("--grad", action="store_true", help="of a model: also the problems of the backward pass")
        group.add_argument("--from", dest="file", type=Path, metavar="FILE", help="what `mgpu-tune capture --output` wrote")
    for name, options in problem_fields().items():
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is more than an array can have, 2**63 - 1")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Numbers of "1,16,4096", each once, in order."""
    return tuple(dict.fromkeys(positive_int(part.strip()) for part in text.split(",")))


def byte_sizes(text: str) -> tuple[int, ...]:
    """Sizes of "1KiB:256MiB", in steps of four from the first while they are not above the last; of "64KiB", that one."""
    first, _, last = text.partition(":")
    size, end = _bytes(first), _bytes(last or first)
    if size > end:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end: write the smaller size first")
    return tuple(size * 4**i for i in range(40) if size * 4**i <= end)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    value = int(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2] or "B"] if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 4096, 64KiB or 1MiB")
    return value


def _bound(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -2
    if value < -1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0, or -1 for no bound")
    return value


def workers_argument(parser: argparse.ArgumentParser) -> None:
    """`devices_for` takes it."""
    parser.add_argument(
        "--workers", type=_workers, default=1, metavar="N", help="GPUs of this machine to measure on, or all (default 1)"
    )


def _workers(text: str) -> int | None:
    return None if text == "all" else positive_int(text)


def seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2**32 - 1")
    return int(text)


def dtype(text: str) -> str:
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return name


def seconds(text: str) -> float:
    """Seconds of "90", "60s", "2m" or "1h"; finite and above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|m|h)?", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite time above 0 such as 60s, 2m or 1h")
    return value


def problem_fields() -> dict[str, dict[str, Any]]:
    """The fields of all ops' problems, and how each is given."""
    size: dict[str, Any] = {"type": positive_int}
    flag: dict[str, Any] = {"action": "store_true", "default": None}
    return {
        "m": size,
        "n": size,
        "k": size,
        "dtype": {"type": dtype, "help": "bf16 (default), f16; of collectives also f32, i32, u32"},
        "out_dtype": {"type": dtype, "help": "default: dtype; or f32"},
        "layout": {"choices": ("nn", "nt", "tn", "tt"), "help": "of both operands: n as written (default nn), t transposed"},
        "batch": size | {"help": "products in one launch (default 1); of attention, sequences"},
        "groups": size | {"help": "how many the rows of m belong to"},
        "bias": {
            "nargs": "?",
            "const": True,
            "type": dtype,
            "metavar": "DTYPE",
            "help": "with a bias of each group; of attention, of the scores, in this dtype (default: dtype)",
        },
        "activation": {"choices": ("none", "relu", "silu", "gelu"), "help": "of the result (default none)"},
        "spread": {"choices": ("even", "random", "skewed", "sparse"), "help": "of the rows over the groups (default random)"},
        "q_tokens": size,
        "kv_tokens": size,
        "q_heads": size,
        "kv_heads": size,
        "head_dim": size | {"help": "columns of a head of q, k and v"},
        "causal": flag | {"help": "no row sees a later key"},
        "window_left": {"type": _bound, "help": "keys before its own that a row sees (default -1: all)"},
        "window_right": {"type": _bound, "help": "keys after its own that a row sees (default -1: all)"},
        "align": {
            "choices": ("bottom_right", "top_left"),
            "help": "which query has the same place as which key: the last ones (default), the first",
        },
        "lengths": flag | {"help": "each sequence has token counts of its own"},
        "segments": flag | {"help": "a row sees its own segment only"},
        "soft_cap": flag | {"help": "scores are capped"},
        "deterministic": flag | {"help": "gradients bitwise equal from run to run"},
        "bias_grad": flag | {"help": "with the gradient of the bias"},
        "size": size | {"help": "elements of a collective's payload on each device"},
        "devices": size | {"help": "GPUs of a collective"},
        "reduction": {"choices": ("add", "min", "max"), "help": "of a collective (default add)"},
        "transport": {
            "choices": ("peer", "multimem"),
            "help": "how the GPUs of a collective reach each other: NVLink (default), or the switch reduces and copies",
        },
    }


def problems_of(spec: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Name -> Problem of what the arguments ask for."""
    from mgpu_ops.registry.spec import problem_of
    from mgpu_ops.tuning.labels import describe

    fields = {name: getattr(arguments, name, None) for name in problem_fields()}
    given = {k: v for k, v in fields.items() if v is not None}
    if "bias" in given:
        given["bias"] = _bias(spec, given["bias"], given.get("dtype", "bfloat16"))
    needed = [f.name for f in dataclasses.fields(spec.Problem) if f.default is dataclasses.MISSING]
    suite, tokens = getattr(arguments, "suite", None), getattr(arguments, "tokens", None)
    if getattr(arguments, "bytes", None):
        return _payloads(spec, arguments, given)
    if sum(map(bool, (given, arguments.shape, suite))) != 1:
        raise UsageError(f"name the problem in one way: {flags(needed)}, or --shape NAME, or --suite NAME")
    if tokens and suite not in MODELS:
        raise UsageError(f"--tokens is for --suite with a model ({', '.join(MODELS)}), not for {suite or 'one problem'}")
    if suite:
        if suite in MODELS and (tokens or suite not in spec.suites):
            from mgpu_ops.tuning.problems import TOKENS, of_model

            return {work.name: work.problem for work in of_model(suite, tokens or TOKENS, op=spec.name)}
        if suite not in spec.suites:
            models = [model for model in MODELS if model not in spec.suites]
            raise UsageError(f"suite {suite!r} is not one of {', '.join([*spec.suites, *models])}")
        names: dict[Any, str] = {}  # a problem once, by its first name
        for name in spec.suites[suite]:
            names.setdefault(spec.shapes[name], name)
        return {name: problem for problem, name in names.items()}
    if arguments.shape:
        if arguments.shape not in spec.shapes:
            raise UsageError(f"shape {arguments.shape!r} is not one of {', '.join(spec.shapes)}")
        return {arguments.shape: spec.shapes[arguments.shape]}
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"{flags(missing)} missing: a {spec.name} problem has {flags(needed)}")
    problem = problem_of(spec, given)  # refuses what the op's problems do not have
    if (held := spec.bytes(problem)) >= 2**63:
        raise UsageError(f"the arrays of {spec.name} {describe(problem)} would hold {held:.3g} bytes: no array has 2**63")
    return {describe(problem): problem}


def _payloads(spec: Any, arguments: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
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


def work_of(arguments: argparse.Namespace) -> list[Any]:
    """The tuning jobs that the arguments ask for: of a captured program, a model, one op, or every op that has a suite."""
    from mgpu_ops import spec_of
    from mgpu_ops.tuning import problems

    op, suite = arguments.op, arguments.suite
    if op is not None:
        spec_of(op)  # refuses what is none
    if arguments.file:
        if (
            suite
            or arguments.shape
            or arguments.bytes
            or any(getattr(arguments, name, None) is not None for name in problem_fields())
        ):
            raise UsageError(f"--from {arguments.file} names the problems: leave out --suite, --shape and sides")
        found = [work for work in problems.read(arguments.file) if op in (None, work.op)]
        if not found:
            raise UsageError(f"{arguments.file} has no problem of {op or 'any op'}: nothing to tune")
        return found
    if suite in MODELS and (op is None or arguments.grad):
        return problems.of_model(suite, arguments.tokens or problems.TOKENS, op=op, grad=arguments.grad)
    if arguments.grad:
        raise UsageError(f"--grad is for --suite with a model ({', '.join(MODELS)})")
    return [
        problems.TuningJob(spec.name, problem, 1, name)
        for spec in _specs_of(op, suite)
        for name, problem in problems_of(spec, arguments).items()
    ]


def runnable(work: Sequence[Any], gpu: Any) -> list[Any]:
    """The same, what takes most time first. Of several problems, those that no kernel runs on `gpu` are said and left out."""
    from mgpu_ops.tuning import problems

    if len(work) == 1:
        return list(work)
    reasons = {w: w.spec.supports(w.problem, gpu) for w in work}
    for w, reason in reasons.items():
        if reason is not None:
            say(f"left out, it runs through XLA: {w.op} {w.name}: {reason}")
    left = problems.by_time((w for w in work if reasons[w] is None), gpu)
    if not left:
        raise UsageError(f"no kernel runs any of these problems on {gpu.name}: nothing to tune")
    return left


def _specs_of(op: str | None, suite: str | None) -> list[Any]:
    """The op, or every op that has the suite."""
    from mgpu_ops import SPECS, spec_of

    if op is not None:
        return [spec_of(op)]
    if suite is None:
        raise UsageError(f"name an op ({', '.join(SPECS)}), or --suite NAME of all that have it, or --from FILE")
    found = [spec for spec in SPECS.values() if suite in spec.suites]
    if not found:
        known = dict.fromkeys([*MODELS, *(name for spec in SPECS.values() for name in spec.suites)])
        raise UsageError(f"suite {suite!r} is not one of {', '.join(known)}")
    return found


def _bias(spec: Any, given: bool | str, dtype: str) -> bool | str:
    """The bias of a problem of an op that says whether there is one, or of one that names its dtype."""
    default = {f.name: f.default for f in dataclasses.fields(spec.Problem)}.get("bias")
    if isinstance(default, str):
        return dtype if given is True else given
    if given is not True:
        raise UsageError(f"--bias of {spec.name} takes no dtype: leave {given} out")
    return True


def flags(names: Sequence[str]) -> str:
    """ "--m, --n and --k" """
    *most, last = (f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(most)} and {last}" if most else last
