"""What an op is: `OpSpec`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import result_dtype


class Record(Protocol):
    """A frozen dataclass whose fields are `int`, `str` or `bool`: an op's Problem or Config."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


type Problem = Record
type Config = Record


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another implementation of an op, beside which its kernel is timed: `run(problem, *arrays)`.

    The arrays are the op's inputs. Or `arrays(problem, *inputs)` makes them in advance, untimed: for a gradient, say, what the
    baseline's own forward pass leaves.

    differs: how its result differs from the op's, so that no call may run it instead; None where it computes the same, with
      sums in float32 and results of the same dtypes. Then a call runs it where it is the faster (`winner.py`).
    missing: why the machine at hand cannot run it, or None; where no GPU is in use, None.
    """

    name: str
    run: Callable[..., Any]
    arrays: Callable[..., tuple] | None = None
    differs: str | None = None
    missing: Callable[[], str | None] = lambda: None


@dataclasses.dataclass(frozen=True, eq=False)
class OpSpec:
    """Everything that a call, the tuner and the contract tests need to know of one op.

    `Problem` and `Config` are frozen dataclasses whose fields are `int`, `str` or `bool`. Only fields of a Config that
    came later have a default: what entries without them were measured with.
    All functions are pure; none touches a GPU except `run` and `reference`. A Problem with a field that no call has (of
    another type, negative) raises ValueError when it is made. For any other Problem `supports`, `check` and `distance` return;
    `default`, `cost` and `baseline_cost` may raise ValueError if `supports` gives a reason.
    """

    name: str
    version: int  # of the kernel: raised when a stored config would mean something else
    Problem: type
    Config: type
    shapes: Mapping[str, Any]  # named problems of real models: name -> Problem
    suites: Mapping[str, Sequence[str]]  # named lists of `shapes`
    space: Callable[[Any, Gpu], dict[str, Sequence]]  # field of Config -> its choices, ordered
    supports: Callable[[Any, Gpu], str | None]  # why no config can run this problem, or None
    check: Callable[[Any, Any, Gpu], str | None]  # why this config cannot run, or None
    candidates: Callable[[Any, Gpu], list[Any]]  # analytic choices that pass `check`, the most promising first
    default: Callable[[Any, Gpu], Any]  # the one that runs where nothing is tuned
    cost: Callable[[Any, Any, Gpu], float]  # modelled time in seconds
    distance: Callable[[Any, Any], float | None]  # how far two problems are; None: a config does not carry over
    flops: Callable[[Any], int]
    bytes: Callable[[Any], int]  # each input read once, each output written once
    inputs: Callable[[Any, Any], tuple]  # (problem, jax key) -> random arguments
    run: Callable[..., Any]  # run(problem, config, gpu, *inputs, interpret=False): the kernel
    reference: Callable[..., Any]  # reference(problem, *inputs): the same through XLA
    tolerance: Callable[[Any], float]  # largest allowed error(problem) of `run` against `reference`
    baseline: Callable[[Any], Baseline | None] | None = None  # of a problem; None: the reference (`baseline_of`)
    baseline_cost: Callable[[Any, Gpu], float | None] | None = None  # modelled seconds of the baseline; None: no model
    # By the models, the baseline runs unless the kernel takes less than so much of its time.
    modelled_margin: float | Callable[[Any], float] = 0.95
    sustained_margin: Callable[[Any], float] | None = None  # the same of programs at the power cap; None: no other
    baseline_keeps_sms: bool = False  # whether the baseline's kernels hold all SMs to their end, as cuBLAS's large products
    unmeasured: Callable[[Any], str | None] = lambda problem: None  # why calls run XLA until the kernel was measured, or None
    spills_outside_loops: Callable[[Any], int] = lambda config: 0  # bytes a thread that it may spill where no loop reads them
    leaves_to_xla: Callable[[Any], bool] = lambda config: False  # whether a config says that XLA runs, and nothing of a kernel
    thrifty: Callable[[Any, Gpu], list[Any]] = lambda problem, gpu: []  # candidates that may take less energy
    plain: Callable[[Any], Any] = lambda problem: problem  # a problem whose entries count as this one's, if it has none itself
    devices: Callable[[Any], int] = lambda problem: 1  # GPUs of one host that a problem takes; inputs are [devices, ...] then


def baseline_of(spec: OpSpec, problem: Any) -> Baseline:
    """The baseline of a problem: the op's own, else the reference, which is named "xla"."""
    return (spec.baseline and spec.baseline(problem)) or Baseline("xla", spec.reference)


def problem_of(spec: OpSpec, fields: Mapping[str, Any]) -> Any:
    """A Problem from some of its fields: the rest have their defaults, out_dtype that of dtype (bfloat16 of 8-bit floats).

    ValueError names the field that is missing, unknown, of another type or too small.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{fields!r} is no {spec.name} problem: give its fields as a mapping, or a {spec.Problem.__qualname__}"
        )
    known = {field.name: field.default for field in dataclasses.fields(spec.Problem)}
    unknown = sorted(map(str, fields.keys() - known.keys()))
    if unknown:
        raise ValueError(f"{spec.name} problems have no {', '.join(unknown)}: the fields are {', '.join(sorted(known))}")
    missing = [name for name, default in known.items() if default is dataclasses.MISSING and name not in fields]
    if missing:
        raise ValueError(f"{dict(fields)} is no {spec.name} problem: it needs {', '.join(missing)} too")
    # a whole number of numpy's, as a computed size is, is one
    given = {name: operator.index(value) if isinstance(value, np.integer) else value for name, value in fields.items()}
    if "dtype" in given and "out_dtype" in known:
        given.setdefault("out_dtype", result_dtype(str(given["dtype"])) if isinstance(given["dtype"], str) else given["dtype"])
    try:
        return spec.Problem(**given)
    except TypeError as e:
        raise ValueError(f"{given} is no {spec.name} problem: {e}") from None
