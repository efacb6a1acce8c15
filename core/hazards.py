"""Checks of a traced kernel for faults and races on a GPU that neither the compiler nor the interpreter sees.

`engine.kernel` calls `check` at the end of a kernel's body. It reads what was traced, once for each warpgroup of a block and
with what is known of integers (bounds, and what they are multiples of), and raises UnsafeKernel for:

- a TMA copy whose place in shared memory may not begin at a multiple of 128 bytes, or of 16 for a plain bulk copy. Source: PTX
  ISA, "cp.async.bulk.tensor" and "cp.async.bulk". Mosaic aligns each buffer to 1024 bytes, after which all swizzles repeat, and
  swizzle tiles are 8 rows of the swizzle: only what a kernel indexes a buffer by can break the rule;
- a TMA copy that may begin elsewhere than at a multiple of 16 bytes of a row in global memory. NVIDIA documents it for the
  array and its strides; an H200 refused a copy that began 4 bytes into a row as an illegal instruction;
- a plain bulk copy that may reach beyond a dimension of the array. Mosaic chooses it for windows that lie contiguous in global
  memory, but for loads that fill with zeros, the default. It goes on in the next row, and is cut at the array's end alone;
- reductions across warps in several warpgroups of a block. Mosaic gives them all the same shared memory.

The last two are not found in every case. A window whose length divides the dimension passes, as blocks begin at multiples of
it; so do indices, and in a branch a window whose start nothing bounds. Warps are taken to share out rows, as in
wgmma's layout: reductions over the last dimension alone pass, as layouts are inferred only when a kernel is lowered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax._src import core as jax_core
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.state import indexing
from jax.experimental.mosaic.gpu import launch_context

BULK_BYTES = 16  # a plain bulk copy's place in shared memory begins at a multiple of so many
TENSOR_BYTES = 128  # likewise a tensor copy's
GLOBAL_BYTES = 16  # likewise of both, in a row of global memory
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")


class UnsafeKernel(RuntimeError):
    """A kernel would fault, race or write out of place on a GPU."""


def check(axes: Mapping[str, int], warpgroups: int) -> None:
    """Checks what has been traced of a kernel until here, at the end of its body.

    axes: sizes of the grid's and the cluster's axes by name. warpgroups: of a block, whose axis is "wg".
    """
    eqns = jax_core.trace_ctx.trace.frame.get_eqns()  # type: ignore[attr-defined]
    reducing = []
    for wg in range(warpgroups):
        found = _Warpgroup({**{name: _Known(0, size - 1) for name, size in axes.items()}, "wg": _constant(wg)}, axes)
        found.run(eqns, {})
        reducing += found.reductions[:1]
    if len(reducing) > 1:
        raise UnsafeKernel(
            f"{reducing[0].primitive.name} over axes {reducing[0].params['axes']} of {reducing[0].invars[0].aval.str_short()} "
            f"at {_line(reducing[0])} goes across warps, and {len(reducing)} warpgroups of a block do such: Mosaic gives them "
            "the same shared memory, a race. Launch one warpgroup a block, let one warpgroup do it, or reduce each row, the "
            "last dimension alone, which stays within a warp"
        )


# --- What is known of an integer


@dataclasses.dataclass(frozen=True, eq=False)
class _Name:
    """What is computed by a function of values with these names. There is one of each."""

    of: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Known:
    """A scalar integer or bool lies in lo..hi and is a multiple of `step` (0: it is 0).

    name: a variable, a number, or a _Name. Equal names are equal values.
    """

    lo: float = -math.inf
    hi: float = math.inf
    step: int = 1
    name: Any = None

    @property
    def value(self) -> int | None:
        return int(self.lo) if self.lo == self.hi else None

    def named(self, name: Any) -> _Known:
        return _Known(self.lo, self.hi, self.step, name)


_ANY = _Known()


def _constant(value: int) -> _Known:
    return _Known(value, value, abs(value), value)


def _either(*parts: _Known) -> _Known:
    return _Known(min(p.lo for p in parts), max(p.hi for p in parts), math.gcd(*(p.step for p in parts)))


def _add(x: _Known, y: _Known) -> _Known:
    return _Known(x.lo + y.lo, x.hi + y.hi, math.gcd(x.step, y.step))


def _neg(x: _Known) -> _Known:
    return _Known(-x.hi, -x.lo, x.step)


def _mul(x: _Known, y: _Known) -> _Known:
    corners = [0 if 0 in (a, b) else a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    return _Known(min(corners), max(corners), x.step * y.step)


def _div(x: _Known, y: _Known) -> _Known:
    """Rounds toward zero."""
    by = y.value
    if by is None or by <= 0:
        return _ANY
    lo, hi = (end if math.isinf(end) else int(abs(end)) // by * (1 if end > 0 else -1) for end in (x.lo, x.hi))
    return _Known(lo, hi, x.step // by if x.step % by == 0 else 1)


def _rem(x: _Known, y: _Known) -> _Known:
    """With the sign of x."""
    by = y.value
    if by is None or by <= 0:
        return _ANY
    if x.lo >= 0 and x.hi < by:
        return x
    return _Known(0 if x.lo >= 0 else 1 - by, min(x.hi, by - 1) if x.hi > 0 else 0, math.gcd(x.step, by))


def _min(x: _Known, y: _Known) -> _Known:
    return _Known(min(x.lo, y.lo), min(x.hi, y.hi), math.gcd(x.step, y.step))


def _max(x: _Known, y: _Known) -> _Known:
    return _Known(max(x.lo, y.lo), max(x.hi, y.hi), math.gcd(x.step, y.step))


def _truth(always: bool, never: bool) -> _Known:
    return _constant(1) if always else _constant(0) if never else _Known(0, 1)


def _same(x: _Known, y: _Known) -> _Known:
    return _truth(x.value is not None and x.value == y.value, x.hi < y.lo or y.hi < x.lo)


def _not(x: _Known) -> _Known:
    return _truth(x.value == 0, x.value == 1)


def _less(x: _Known, y: _Known) -> _Known:
    return _truth(x.hi < y.lo, x.lo >= y.hi)


_RULES: dict[str, Callable[..., _Known]] = {
    "add": _add,
    "sub": lambda x, y: _add(x, _neg(y)),
    "mul": _mul,
    "neg": _neg,
    "div": _div,
    "rem": _rem,
    "min": _min,
    "max": _max,
    "clamp": lambda lo, x, hi: _min(_max(x, lo), hi),
    "convert_element_type": lambda x: x,
    "eq": _same,
    "ne": lambda x, y: _not(_same(x, y)),
    "lt": _less,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _not(_less(x, y)),
    "le": lambda x, y: _not(_less(y, x)),
    "select_n": lambda which, *cases: _either(*cases) if which.value is None else cases[which.value],
}
_LOGIC: dict[str, Callable[..., _Known]] = {"and": _min, "or": _max, "not": _not}  # of bools


def _within(x: _Known, lo: float, hi: float) -> _Known:
    """x where it is also known to lie in lo..hi; x itself where that cannot be."""
    lo, hi = max(x.lo, lo), min(x.hi, hi)
    return _Known(lo, hi, x.step, x.name) if lo <= hi else x


_COMPARISONS = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}  # and what holds where one does not


# --- A kernel, as one warpgroup runs it

type _Env = dict[Any, _Known]


class _Warpgroup:
    """Follows what a warpgroup may run. `reductions`: those across warps that it comes by."""

    def __init__(self, indices: Mapping[str, _Known], sizes: Mapping[str, int]):
        self._indices, self._sizes = indices, sizes
        self._names: dict[Any, _Name] = {}
        self._compared: dict[Any, tuple[str, _Known, _Known]] = {}  # by the name of the comparison
        self._facts: dict[Any, tuple[float, float]] = {}  # bounds, by name, that hold in the branch that is run
        self._undecided = 0  # branches, each in the one before, that it may run or not
        self.reductions: list[Any] = []

    def run(self, eqns: Sequence[Any], env: _Env) -> None:
        for eqn in eqns:
            name = eqn.primitive.name
            if name in ("copy_gmem_to_smem", "copy_smem_to_gmem"):
                _check_copy(eqn, env, self._sizes, sure=not self._undecided)
            elif name in _REDUCTIONS and _across_warps(eqn):
                self.reductions.append(eqn)
            if results := self._results(eqn, env):
                env.update(zip(eqn.outvars, results, strict=False))

    def _results(self, eqn: Any, env: _Env) -> list[_Known]:
        """What is known of an equation's results; runs the functions within it."""
        name, params = eqn.primitive.name, eqn.params
        if name in _RULES or name in _LOGIC:
            return self._computed(eqn, env)
        if name == "axis_index":
            axis = params["axis_name"]
            index = self._indices.get(axis, _ANY) if isinstance(axis, str) else _ANY
            return [index if index.name is not None else index.named((name, axis))]
        if name == "cond":
            return self._branches(params["branches"], _all_of(env, eqn))
        if name in ("scan", "while"):
            self._loop(eqn, _all_of(env, eqn))
        elif jaxprs := list(jax_core.jaxprs_in_params(params)):
            return self._call(jaxprs, _all_of(env, eqn))
        return []

    def _computed(self, eqn: Any, env: _Env) -> list[_Known]:
        """What is known of the result of arithmetic."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        limits = _limits(aval) if aval.shape == () else None
        rule = _RULES.get(name) or (_LOGIC[name] if limits == (0, 1) else None)
        if rule is None or limits is None:
            return []
        known = _all_of(env, eqn)
        result = rule(*known)
        if any(not math.isinf(end) and not limits[0] <= end <= limits[1] for end in (result.lo, result.hi)):
            return []  # it may wrap around
        if result.name is None:
            of = (name, *(part.name for part in known))
            result = result.named(self._names.setdefault(of, _Name(of)))
        if name in _COMPARISONS:
            self._compared[result.name] = (name, *known)  # type: ignore[assignment]
        return [self._refined(result)]

    def _refined(self, x: _Known) -> _Known:
        return _within(x, *self._facts[x.name]) if x.name in self._facts else x

    def _holds(self, name: Any, true: bool) -> None:
        """Adds to the facts what follows from a condition."""
        match name.of if isinstance(name, _Name) else ():
            case ("not", part):
                self._holds(part, not true)
            case ("and" | "or" as both, *parts) if true == (both == "and"):
                for part in parts:
                    self._holds(part, true)
            case _ if name in self._compared:
                relation, x, y = self._compared[name]
                relation = relation if true else _COMPARISONS[relation]
                if relation in ("gt", "ge"):
                    relation, x, y = {"gt": "lt", "ge": "le"}[relation], y, x
                self._bound(relation, x, y)

    def _bound(self, relation: str, x: _Known, y: _Known) -> None:
        """Adds what x < y, x <= y, x == y or x != y says of both."""
        if relation in ("lt", "le"):
            apart = relation == "lt"
            bounds = [(x, -math.inf, y.hi - apart), (y, x.lo + apart, math.inf)]
        elif relation == "eq":
            bounds = [(x, y.lo, y.hi), (y, x.lo, x.hi)]
        else:
            bounds = [(a, a.lo + (a.lo == b.value), a.hi - (a.hi == b.value)) for a, b in ((x, y), (y, x))]
        for part, lo, hi in bounds:
            if part.name is not None and part.value is None:
                before = self._facts.get(part.name, (-math.inf, math.inf))
                self._facts[part.name] = (max(before[0], lo), min(before[1], hi))

    def _branches(self, branches: Sequence[Any], known: list[_Known]) -> list[_Known]:
        which, *operands = known
        if which.value is not None:
            return self._call([branches[which.value].jaxpr], operands)
        results, before = [], self._facts
        self._undecided += 1
        for number, branch in enumerate(branches):
            self._facts = dict(before)
            if len(branches) == 2:
                self._holds(which.name, bool(number))
            results.append(self._call([branch.jaxpr], [self._refined(x) for x in operands]))
        self._facts = before
        self._undecided -= 1
        return [_either(*parts) for parts in zip(*results, strict=True)]

    def _call(self, jaxprs: Sequence[Any], known: list[_Known]) -> list[_Known]:
        """Runs functions; the results of one whose parameters, or the values it captures, are these operands."""
        results: list[_Known] = []
        for jaxpr in jaxprs:
            env: _Env = {}
            for variables in (jaxpr.invars, jaxpr.constvars):
                if len(variables) == len(known):
                    env.update(zip(variables, known, strict=True))
            self.run(jaxpr.eqns, env)
            results = [_of(env, atom) for atom in jaxpr.outvars]
        return results if len(jaxprs) == 1 else []

    def _loop(self, eqn: Any, known: list[_Known]) -> None:
        """Runs a loop's body with what holds in every turn: of what stays as it is, and of what counts the turns."""
        params = eqn.params
        if eqn.primitive.name == "scan":
            body, turns = params["jaxpr"].jaxpr, params["length"]
            consts = len(body.invars) - len(body.outvars)
            if any(of.aval.shape != whole.aval.shape for of, whole in zip(body.invars, eqn.invars, strict=True)) or any(
                of.aval.shape != whole.aval.shape for of, whole in zip(body.outvars, eqn.outvars, strict=True)
            ):  # it goes along arrays
                self.run(body.eqns, {})
                return
            first, carried = known[:consts], known[consts:]
        else:
            body, turns = params["body_jaxpr"].jaxpr, math.inf
            before, consts = params["cond_nconsts"], params["body_nconsts"]
            first, carried = known[before : before + consts], known[before + consts :]
        variables = body.invars[consts : consts + len(carried)]
        defined = {out: one for one in body.eqns for out in one.outvars}
        env: _Env = dict(zip(body.invars, first, strict=False))
        for variable, out, start in zip(variables, body.outvars, carried, strict=False):
            env[variable] = _in_every_turn(variable, out, start, defined.get(out) if _is_variable(out) else None, turns)
        self.run(body.eqns, env)


def _in_every_turn(variable: Any, out: Any, start: _Known, defined: Any, turns: float) -> _Known:
    if out is variable:
        return start
    if defined is not None and defined.primitive.name == "add" and defined.invars[0] is variable:
        by = _of({}, defined.invars[1])
        if by.value is not None and by.value > 0:
            return _Known(start.lo, start.hi + (turns - 1) * by.value, math.gcd(start.step, by.step))
    return _ANY


def _of(env: _Env, atom: Any) -> _Known:
    """What is known of an equation's operand, or of a number."""
    if isinstance(atom, int):
        return _constant(atom)
    if _is_variable(atom):
        known = env.get(atom, _ANY)
        return known if known.name is not None else known.named(atom)
    value = getattr(atom, "val", None)
    if getattr(value, "shape", ()) != () or not _integer(atom.aval):
        return _ANY
    return _constant(int(value))  # type: ignore[arg-type]


def _all_of(env: _Env, eqn: Any) -> list[_Known]:
    return [_of(env, atom) for atom in eqn.invars]


def _is_variable(atom: Any) -> bool:
    return isinstance(atom, jax_core.Var)


def _limits(aval: Any) -> tuple[int, int] | None:
    """The least and the greatest value of an integer or bool, else None."""
    dtype = getattr(aval, "dtype", None)
    return None if dtype is None else _limits_of(dtype)


@functools.cache
def _limits_of(dtype: Any) -> tuple[int, int] | None:
    if not jnp.issubdtype(dtype, jnp.integer):
        return (0, 1) if jnp.issubdtype(dtype, jnp.bool_) else None
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)


def _integer(aval: Any) -> bool:
    return _limits(aval) is not None


def _across_warps(eqn: Any) -> bool:
    """Whether a reduction leaves one number, or reduces more than the last dimension."""
    shape = eqn.invars[0].aval.shape
    axes = {axis for axis in eqn.params["axes"] if shape[axis] > 1}
    return bool(axes - {len(shape) - 1}) or (bool(axes) and len(eqn.params["axes"]) == len(shape))


def _line(eqn: Any) -> str:
    """Where a kernel has an equation: the innermost line outside of the engine."""
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    places = [frame for frame in frames if Path(frame.file_name).parent != Path(__file__).parent] or frames
    return f"{places[0].file_name}:{places[0].start_line}" if places else "a line of JAX"


# --- Copies


@dataclasses.dataclass(frozen=True)
class _Dimension:
    """A dimension of a ref as it is indexed until now."""

    size: int  # of the whole
    stride: int  # in elements; of a tiled dimension that of a tile
    start: _Known = dataclasses.field(default_factory=lambda: _constant(0))
    length: int | None = 0  # None: an index
    tile: int = 1


@dataclasses.dataclass(frozen=True)
class _Place:
    """What a copy reads or writes. tiled: by tiles, with or without swizzle."""

    dimensions: tuple[_Dimension, ...]
    itemsize: int
    tiled: bool = False

    @property
    def alignment(self) -> int:
        """Bytes of which the first element's place in the buffer is a multiple; 0 where that is the buffer's begin."""
        parts = (_div(d.start, _constant(d.tile)).step if d.start.step % d.tile == 0 else 1 for d in self.dimensions)
        return math.gcd(*(p * d.stride for p, d in zip(parts, self.dimensions, strict=True))) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the window lies without gaps, as Mosaic sees it: indices first, then slices."""
        order = [d for d in self.dimensions if d.length is None] + [d for d in self.dimensions if d.length is not None]
        if not order or order[-1].stride != 1:
            return False
        expected = 1
        for dimension in reversed(order):
            length = dimension.length or 1
            if length != 1 and dimension.stride != expected:
                return False
            expected *= length
        return True


def _place(aval: Any, transforms: Sequence[Any], env: _Env) -> _Place | None:
    """What a ref with transforms stands for; None for transforms that are not followed here."""
    shape = aval.shape
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    place = [_Dimension(size, stride, length=size) for size, stride in zip(shape, strides, strict=True)]
    tiled = False
    for transform in transforms:
        match transform:
            case gpu_core.UnswizzleRef() | gpu_core.PeerMemRef() | gpu_core.MulticastRef():
                pass
            case gpu_core.UntilingTransform(tiling=tiling):
                n, tiled = len(tiling), True
                counts = place[-2 * n : -n]
                tiles = [
                    dataclasses.replace(d, size=d.size * t, length=d.size * t, tile=t)
                    for d, t in zip(counts, tiling, strict=True)
                ]
                place = place[: -2 * n] + tiles
            case indexing.NDIndexer():
                place = _indexed(place, transform.indices, env)
            case _:
                return None
    return _Place(tuple(place), jnp.dtype(aval.dtype).itemsize, tiled)


def _indexed(place: Sequence[_Dimension], indices: Sequence[Any], env: _Env) -> list[_Dimension]:
    remaining, found = iter(indices), []
    for dimension in place:
        if dimension.length is None:
            found.append(dimension)
            continue
        index = next(remaining)
        if isinstance(index, indexing.Slice):
            start, length = _of(env, index.start), int(index.size)
        else:
            start, length = (_of(env, index) if not getattr(index, "shape", ()) else _ANY), None
        found.append(dataclasses.replace(dimension, start=_add(dimension.start, start), length=length))
    return found


def _check_copy(eqn: Any, env: _Env, axes: Mapping[str, int], *, sure: bool) -> None:
    """Checks a TMA copy's alignment, and that it ends where its array does if nothing clips it.

    sure: the copy is in no branch that may not run.
    """
    params, (first, second, *operands) = eqn.params, eqn.invars
    loads = eqn.primitive.name == "copy_gmem_to_smem"
    if loads and params.get("has_barrier", True):
        operands = operands[1:]
    count = params["src_transforms_treedef"].num_leaves
    src = params["src_transforms_treedef"].unflatten(operands[:count])
    dst = params["dst_transforms_treedef"].unflatten(operands[count : count + params["dst_transforms_treedef"].num_leaves])
    of_src, of_dst = _place(first.aval, src, env), _place(second.aval, dst, env)
    gmem, smem = (of_src, of_dst) if loads else (of_dst, of_src)
    if gmem is None or smem is None:
        return
    shared = math.prod(axes.get(axis, 1) for axis in params.get("collective_axes") or ())
    outside = params.get("oob_mode")
    if outside is None and loads:  # as JAX lowers it
        outside = launch_context.OOBFillMode.ZEROS
    plain = (
        gmem.contiguous
        and not smem.tiled
        and shared == 1
        and not params.get("reduction_op")
        and outside is not launch_context.OOBFillMode.ZEROS
    )
    unit = BULK_BYTES if plain else TENSOR_BYTES
    if smem.alignment % unit:
        buffer = (second if loads else first).aval
        raise UnsafeKernel(
            f"the {eqn.primitive.name} at {_line(eqn)} begins at multiples of {smem.alignment} bytes of its buffer "
            f"{buffer.dtype}{list(buffer.shape)} in shared memory, and TMA needs multiples of {unit}: "
            "CUDA_ERROR_MISALIGNED_ADDRESS. Pad what lies behind the index, such as a stage, to a multiple of "
            f"{unit} bytes"
        )
    _check_begin(eqn, gmem)
    if plain:
        _check_ends(eqn, gmem, sure=sure)


def _check_begin(eqn: Any, gmem: _Place) -> None:
    """Where a window begins in a row of global memory: Hopper's TMA takes multiples of 16 bytes, of tensor maps too."""
    last = gmem.dimensions[-1]
    if last.length is not None and last.start.step * gmem.itemsize % GLOBAL_BYTES:
        begins = last.start.step * gmem.itemsize
        raise UnsafeKernel(
            f"the {eqn.primitive.name} at {_line(eqn)} begins at multiples of {begins} bytes of a row in "
            f"global memory, and TMA needs multiples of {GLOBAL_BYTES}: CUDA_ERROR_ILLEGAL_INSTRUCTION, or MISALIGNED_ADDRESS. "
            f"Begin it at such a multiple, {GLOBAL_BYTES // gmem.itemsize} elements, and copy more"
        )


def _check_ends(eqn: Any, gmem: _Place, *, sure: bool) -> None:
    for axis, d in enumerate(gmem.dimensions):
        if d.length is None or d.start.hi + d.length <= d.size or d.size % d.length == 0:
            continue
        if d.start.hi == math.inf and not sure:
            continue  # the branch may be there for this
        raise UnsafeKernel(
            f"the {eqn.primitive.name} at {_line(eqn)} of {d.length} elements may reach beyond dimension {axis} of size "
            f"{d.size}: the window lies contiguous in global memory, and so TMA copies it as plain bytes and goes on in what "
            f"follows. Begin it at jnp.minimum(start, {d.size - d.length}), pad the array to whole windows, or copy a window "
            "that divides the dimension"
        )
