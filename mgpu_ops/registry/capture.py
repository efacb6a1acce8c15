"""Which problems a function would run, and how often, without running it.

While `capture` traces a function, a call of an op leaves a mark in the jaxpr where its kernel would be; the marks are counted
afterwards. A loop's length, a function that is jitted once and called often, what a gradient runs again and the shapes that a
device sees inside `jax.shard_map` are all in the jaxpr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray
from jax.interpreters import partial_eval

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.mesh import same_mesh_axes

if TYPE_CHECKING:
    from mgpu_ops.registry.spec import OpSpec, Problem

ASSUMED = "h200"  # the GPU that a function is captured for where there is none


@dataclasses.dataclass(frozen=True)
class Use:
    """A problem of an op, and how many times one call of the function runs it."""

    op: str
    problem: Problem
    count: int
    skipped: str | None  # why there is nothing to tune: it does not reach the kernel, or brings its own config; else None


@dataclasses.dataclass(frozen=True)
class Captured:
    """What `capture` found: each problem once, in the order of the program. `notes` tell what counts are not exact."""

    gpu: Gpu
    uses: tuple[Use, ...]
    notes: tuple[str, ...]

    @property
    def problems(self) -> tuple[Use, ...]:
        """Those that a config can make faster."""
        return tuple(use for use in self.uses if use.skipped is None)

    def __str__(self) -> str:
        width = max((len(str(use.count)) for use in self.uses), default=1)
        lines = [f"{use.count:{width}} x {use.op} {use.problem}" + f": {use.skipped}" * bool(use.skipped) for use in self.uses]
        return "\n".join([*lines, *self.notes]) or "no call of an op"


def capture(function: Callable[..., Any], gpu: Gpu | str | None = None) -> Callable[..., Captured]:
    """`capture(function)(*args, **kwargs)`: the problems that `function(*args, **kwargs)` would run on `gpu`, with counts.

    Nothing is computed and no GPU is needed. Arguments with a shape and a dtype (arrays, `jax.ShapeDtypeStruct`) stand for any
    values; all others are passed on as they are. `gpu` defaults to the one in use, else an H200.

    Counted are the calls that reach `dispatch.run`: under jit, grad, checkpoint, scan (times its length), vmap, `shard_map`
    (the shapes that one device sees) and `custom_vjp`. A while loop counts as one iteration and a cond as all its branches,
    which `notes` say. Of a jitted function, what its results do not need is left out, as XLA leaves it out; what runs outside
    of jit is not.

    Raises what tracing the function raises: it must be one that `jax.jit` could trace. TypeError for what is no function.
    """
    if not callable(function):
        raise TypeError(f"capture takes a function, not {function!r:.80}: capture(step)(x), not capture(step(x))")

    @functools.wraps(function)
    def captured(*args: Any, **kwargs: Any) -> Captured:
        target = gpus.find(gpu) if isinstance(gpu, str) else gpu or gpus.current() or gpus.find(ASSUMED)
        traced, arrays = of_arrays(function, *args, **kwargs)
        with gpus.target(target), _capturing(True):
            closed = jax.make_jaxpr(traced)(arrays)
        notes: dict[str, None] = {}
        counts = _counts(closed.jaxpr, notes, {})
        uses = (Use(op, problem, count, skipped) for (op, problem, skipped), count in counts.items())
        return Captured(target, tuple(uses), tuple(notes))

    return captured


def of_arrays(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Callable[..., list[Any]], dict[int, Any]]:
    """`function(*args, **kwargs)` as a function of its arrays, which returns the arrays among its results; and those arrays."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def traced(arrays: dict[int, Any]) -> list[Any]:
        again, named = jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return [x for x in jax.tree.leaves(function(*again, **named)) if isinstance(x, jax.Array)]

    return traced, arrays


# --- Marks

# A user context is part of jit's trace key: a function that was traced with marks is never run, nor the other way round.
_capturing: Any = jax.make_user_context(False)


def capturing() -> bool:
    """Whether calls of ops are to `mark` what they would run."""
    return _capturing.value


def shapes_only() -> contextlib.AbstractContextManager[None]:
    """Inside, calls of ops are marked, not run: for the shapes of their results."""
    return _capturing(True)


@functools.cache
def _mark() -> Any:
    from jax.extend.core import Primitive  # only here: it loads much of Pallas

    primitive = Primitive("mgpu_ops_call")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*arrays: Any, outputs: tuple[Any, ...], **what: Any) -> list[ShapedArray]:
        return [ShapedArray(shape, dtype) for shape, dtype in outputs]

    return primitive


def mark(
    spec: OpSpec, problem: Problem, skipped: str | None, arrays: Sequence[Any], reference: Callable[..., Any] | None = None
) -> Any:
    """Stands for the results of running `problem` on these arrays, abstractly, in a function that is being captured.

    `reference(*arrays)` has the results' shapes; None: the op's own.
    """
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    if reference is None and all(isinstance(length, int) for x in shapes for length in x.shape):
        known: Any = problem  # which is hashable
        outputs, structure = _results(spec, known, shapes, jax.config.jax_enable_x64)
    else:
        outputs, structure = _results_of(reference or functools.partial(spec.reference, problem), shapes)
    results = _mark().bind(*arrays, op=spec.name, problem=problem, skipped=skipped, outputs=outputs)
    return jax.tree.unflatten(structure, [same_mesh_axes(x, *arrays)[0] for x in results])


def _results_of(reference: Callable[..., Any], shapes: Sequence[Any]) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    """Shape and dtype of each array that `reference` returns, and the structure that they are in."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(reference, *shapes))
    return tuple((x.shape, x.dtype) for x in leaves), structure


@functools.lru_cache(maxsize=256)  # of calls that a program has in many layers
def _results(spec: OpSpec, problem: Problem, shapes: tuple[Any, ...], x64: bool) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    """Those of the op's own reference. x64: of JAX's config."""
    return _results_of(functools.partial(spec.reference, problem), shapes)


# --- Counting

_NOT_EXACT = {
    "while": "a while loop counts as one turn: how many it takes is not known before it runs",
    "cond": "a cond counts as all its branches: which one is taken is not known before it runs",
}


def _counts(jaxpr: Any, notes: dict[str, None], known: dict[int, Counter[Any]]) -> Counter[Any]:
    """How often each (op, problem, skipped) is marked in a jaxpr; `known` holds those of jaxprs that were counted before."""
    from jax.extend.core import jaxprs_in_params

    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found: Counter[Any] = Counter()
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if equation.primitive is _mark():
            found[parameters["op"], parameters["problem"], parameters["skipped"]] += 1
        inside: Counter[Any] = Counter()
        for inner in jaxprs_in_params(parameters):
            needed = partial_eval.dce_jaxpr(inner, True)[0] if name == "jit" else inner
            inside += _counts(needed, notes, known)
        if inside and name in _NOT_EXACT:
            notes[_NOT_EXACT[name]] = None
        times = parameters["length"] if name == "scan" else 1
        found += Counter({use: times * count for use, count in inside.items()})
    known[id(jaxpr)] = found
    return found
