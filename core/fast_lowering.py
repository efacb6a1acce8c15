"""Lowers kernels in less time: patches of Mosaic GPU and Pallas after which these come to the same code.

| patch | what it changes |
|---|---|
| `compare_unprinted` | variables of layouts are compared without printing the kernel, with jax 0.11 |
| `remember_sites` | what is asked of a variable of a layout is found out once |
| `reduce_changed` | of the constraints on layouts, those are looked at again whose variables have got a value |
| `merge_by_group` | what tiles must divide is merged once for all variables that are equal |
| `find_by_hash` | whether a layout is wanted is looked up and not searched for |
| `trust_layouts` | that each operation has its layouts is not checked again |
| `classify_once` | which kinds of values an operation has is found out once |
| `remember_attributes` | a layout is made of its attribute once for a kernel |
| `remember_layouts` | the layouts of warp-level MMA are made once |
| `remember_transfers` | whether a layout can be loaded or stored so is found out once |
| `index_untraced` | buffers of tiles are indexed without a trace for each use |
| `check_ungenerated` | that a buffer of tiles can be indexed is checked without code, which nothing would use |
| `generate_once` | an integer, and the number of the thread, is generated once for a kernel |
| `remember_classes` | a class of a function is made once |

Layouts are inferred by a solver of constraints, such as that two variables are equal, or that the tiles of one divide a number.
All patches hold for all Mosaic GPU kernels of the process, but for the two that change the code which is generated on the way:
`check_ungenerated` and `generate_once` hold for those of `engine.kernel`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import api_util, dtypes, flattree
from jax._src.interpreters import partial_eval
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.state import indexing
from jax.experimental.mosaic.gpu import (
    MMALayouts,
    constraints,
    dialect_lowering,
    fragmented_array,
    inference_utils,
    layout_inference,
    layouts,
    utils,
)
from jax.extend.mlir import ir


def lower_fast(is_ours: Callable[[Any], bool]) -> None:
    """Applies all of them. is_ours: whether a LaunchContext is that of a kernel of `engine.kernel`."""
    for patch in (
        compare_unprinted,
        remember_sites,
        reduce_changed,
        merge_by_group,
        find_by_hash,
        trust_layouts,
        classify_once,
        remember_attributes,
        remember_layouts,
        remember_transfers,
        index_untraced,
        functools.partial(check_ungenerated, is_ours),
        functools.partial(generate_once, is_ours),
        remember_classes,
    ):
        patch()


# --- The solver

# To infer layouts of a kernel, jax 0.11 sorts the variables that are equal to others by what is printed of their operations.
# Of a large kernel that takes a quarter of the time to lower it, as a loop prints with all that is in it. jax 0.12 has them in
# the order in which they appear.


def compare_unprinted() -> None:
    """With jax 0.11, equal variables are found, in the order in which they appear, without printing them."""
    if jax.__version_info__ < (0, 12):
        constraints.compute_transitively_equal_vars = _equal_variables


def _equal_variables(system: Any) -> dict[Any, list[Any]]:
    """For each variable that a constraint says to be equal to another, all that are equal to it, through others too."""
    return {x: [other for other in group if other != x] for x, group in _groups(system).items()}


def _groups(system: Any) -> dict[Any, list[Any]]:
    """For each such variable, the group of all that are equal, itself among them: one list."""
    groups: dict[Any, list[Any]] = {}
    for one in system.constraints:
        if isinstance(one, constraints.Equals) and all(isinstance(x, constraints.Variable) for x in (one.lhs, one.rhs)):
            left, right = (groups.setdefault(x, [x]) for x in (one.lhs, one.rhs))
            if left is not right:
                left += right
                groups.update(dict.fromkeys(right, left))
    return groups


def remember_sites() -> None:
    """The value, shape and memory of a ValueSite, and a Variable's hash, are found out once: an operation keeps its types."""
    site: Any = layout_inference.ValueSite
    for name in ("value", "shape", "memory_space"):
        once: Any = functools.cached_property(vars(site)[name].fget)
        once.__set_name__(site, name)
        setattr(site, name, once)
    kinds: tuple[Any, ...] = (site, constraints.Variable)
    for kind in kinds:
        kind.__hash__ = _hashed_once(kind.__hash__)


def _hashed_once(compute: Any) -> Any:
    @functools.wraps(compute)
    def hash_once(self: Any) -> int:
        known = self.__dict__
        if "_hash" not in known:
            known["_hash"] = compute(self)
        value: int = known["_hash"]
        return value

    return hash_once


def reduce_changed() -> None:
    """A constraint that was reduced stays as it is until one of its variables has a value."""
    reduce: Any = constraints.reduce_constraint

    @functools.wraps(reduce)
    def reduce_constraint(constraint: Any, assignments: dict[Any, Any]) -> Any:
        free = constraint.__dict__.get("_free")  # variables of what was reduced before
        if free is not None and not any(x in assignments for x in free):
            return constraint
        reduced: Any = reduce(constraint, assignments)
        if dataclasses.is_dataclass(reduced):
            vars(reduced)["_free"] = tuple(_variables(reduced))
        return reduced

    ours: Any = reduce_constraint
    constraints.reduce_constraint = ours


def _variables(expression: Any) -> Iterator[Any]:
    for field in dataclasses.fields(expression):
        value = getattr(expression, field.name)
        if isinstance(value, constraints.Variable):
            yield value
        elif type(value).__module__ == constraints.__name__ and dataclasses.is_dataclass(value):
            yield from _variables(value)


def merge_by_group() -> None:
    """Constraints of divisibility are merged for each group of equal variables, and not for each of its variables."""
    saturate = constraints.saturate_divides_constraints_for_equal_vars
    constraints.saturate_divides_constraints_for_equal_vars = functools.wraps(saturate)(_saturated)


def _saturated(system: Any) -> Any:
    groups = _groups(system)
    others: list[Any] = []
    merged: dict[Any, Any] = {}  # by variable that has such a constraint, or is equal to one
    multiples: dict[Any, Any] = {}  # by the first variable of a group
    for one in system.constraints:
        if not isinstance(one, constraints.Divides) or not isinstance(one.expr, constraints.Variable):
            others.append(one)
            continue
        group = groups.get(one.expr, (one.expr,))
        first = group[0]
        known, found = multiples.get(first), constraints.Divides(first, one.tiling_multiple)
        multiples[first] = found if known is None else constraints.merge_divides_constraints(known, found)
        if known is None:
            merged.update(dict.fromkeys((one.expr, *group), first))
    divides = [constraints.Divides(x, multiples[first].tiling_multiple) for x, first in merged.items()]
    return dataclasses.replace(system, constraints=[*others, *divides])


class _Unknowns(list[Any]):
    """Variables in their order, and by hash."""

    def __init__(self, variables: Sequence[Any]):
        super().__init__(variables)
        self._all = frozenset(variables)

    def __contains__(self, variable: object) -> bool:
        return variable in self._all


def find_by_hash() -> None:
    """The search for layouts, which goes on in itself, finds its unknowns by hash."""
    find: Any = layout_inference.find_assignments_for

    @functools.wraps(find)
    def find_assignments_for(unknowns: Any, system: Any, **options: Any) -> Any:
        return find(unknowns if isinstance(unknowns, _Unknowns) else _Unknowns(unknowns), system, **options)

    ours: Any = find_assignments_for
    layout_inference.find_assignments_for = ours


def trust_layouts() -> None:
    """Mosaic GPU does not check of itself, twice, that each operation was given as many layouts as it has values."""
    check = layout_inference._ensure_all_layouts_are_set
    layout_inference._ensure_all_layouts_are_set = functools.wraps(check)(lambda op: None)


# --- Kinds of values

_KINDS = {"layout": 1, "transforms": 2, "tmem_layout": 4}  # bits


class _Seen(threading.local):
    """The operation that was asked for last, and the kinds of its operands, and of its results 3 bits higher."""

    op: Any = None
    kinds = 0


_seen = _Seen()
_types: dict[Any, int] = {}  # kinds by type, of the kernel that is being lowered


def classify_once() -> None:
    """Whether an operation has vectors, buffers in shared memory, or in tensor memory: asked several times, found out once."""
    for name, bit in _KINDS.items():
        for side, bits in (("in_", bit), ("out_", bit << 3), ("", bit | bit << 3)):
            ask = f"should_have_{side}{name}"
            setattr(
                inference_utils, ask, functools.update_wrapper(functools.partial(_has, bits), getattr(inference_utils, ask))
            )


def _has(bits: int, op: Any) -> bool:
    if _seen.op is not op:
        _seen.kinds = _kinds(op.operands) | _kinds(op.results) << 3
        _seen.op = op
    return bool(_seen.kinds & bits)


def _kinds(values: Any) -> int:
    kinds = 0
    for value in values:
        of = value.type
        if (known := _types.get(of)) is None:
            known = _types[of] = _kind(value, of)
        kinds |= known
    return kinds


def _kind(value: Any, of: Any) -> int:
    if isinstance(of, ir.VectorType):
        return _KINDS["layout"]
    if not isinstance(of, ir.MemRefType):
        return 0
    tensor_memory = utils.is_tmem_ref(value) and _KINDS["tmem_layout"]
    return tensor_memory | (inference_utils.is_transformable_smem_memref(value) and _KINDS["transforms"])


# --- What is made or asked again and again
#
# The layouts of an operation's values are its attributes. Each is read, and made of it, as often as a value is used.

_layouts: dict[Any, Any] = {}  # by attribute, of the kernel that is being lowered


def remember_attributes() -> None:
    """A layout is made of its attribute once for a kernel."""
    make = layouts.from_layout_attr

    @functools.wraps(make)
    def from_layout_attr(attribute: Any) -> Any:
        if (known := _layouts.get(attribute)) is None:
            known = _layouts[attribute] = make(attribute)
        return known

    ours: Any = from_layout_attr
    layouts.from_layout_attr = ours


def forget_kernel() -> None:
    """Lets go of what is remembered of a kernel, which would keep all of it."""
    _seen.op = None
    for known in (_types, _layouts, _moves):
        known.clear()


# For each load and store of a tile that may use ldmatrix or stmatrix, Mosaic GPU makes 18 layouts of warp-level MMA to compare.
# They follow from the bits of an element and a number of warps.


def remember_layouts() -> None:
    """Layouts of warp-level MMA are made once for each number of bits and of warps."""
    make = MMALayouts.__init__
    known: dict[tuple[int, int], dict[str, Any]] = {}

    @functools.wraps(make)
    def make_once(self: Any, element_type: Any, *, m_warps: int = 4) -> None:
        is_type = isinstance(element_type, ir.Type)
        key = (utils.bitwidth(element_type) if is_type else dtypes.itemsize_bits(element_type), m_warps)
        if key not in known:
            make(self, element_type, m_warps=m_warps)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    setattr(MMALayouts, "__init__", make_once)  # noqa: B010 - mypy has a type of its own for it


# Whether registers of a layout can be transferred to or from shared memory of a layout is found out by generating the code.


def remember_transfers() -> None:
    """It is asked once for each pair of layouts, shape and element."""
    transferable: Any = constraints.IsTransferableSmemRegisters
    ask = transferable._is_supported_smem_transfer
    known: dict[Any, bool] = {}

    @functools.wraps(ask)
    def ask_once(self: Any, smem_layout: Any, reg_layout: Any) -> bool:
        key = (utils._infer_arch(), smem_layout, reg_layout, self.shape, self.strides, self.bitwidth, self.optimized)
        if key not in known:
            known[key] = ask(self, smem_layout, reg_layout)
        return known[key]

    transferable._is_supported_smem_transfer = ask_once


# Pallas moves the index of a ref before its swizzle and its tiling, by tracing and lowering a function of both: for each use of
# a buffer, and before a swizzle to no effect, as the two change places as they are.

# By function and types, the jaxpr and the types of its results, of the kernel that is being lowered.
_moves: dict[Any, Any] = {}


def index_untraced() -> None:
    """An index and a swizzle change places without a trace, an index and a tiling with one for all of the same types."""
    lower = lowering._lower_fn_with_avals

    @functools.wraps(lower)
    def lower_function(function: Any, avals: Any) -> Any:
        (ref,) = function.args
        if _checking.now:
            return lambda ctx, *transforms: (_moved(function, avals),) * 2
        if isinstance(avals[1], indexing.NDIndexer) and isinstance(avals[0], gpu_core.UnswizzleRef):
            return lambda ctx, *transforms: (function(*transforms), function(*avals))
        if isinstance(ref, gpu_core.AbstractRefUnion) or not isinstance(avals[0], gpu_core.UntilingTransform):
            return lower(function, avals)
        return functools.partial(_lower_move, function, avals)

    lowering._lower_fn_with_avals = lower_function


def _lower_move(function: Any, avals: Any, ctx: Any, *transforms: Any) -> Any:
    """As the function that JAX's `_lower_fn_with_avals` returns. function: a partial."""
    jaxpr, results = _traced_move(function, avals)
    lowered = lowering.lower_jaxpr_to_mosaic_gpu(
        ctx.module_ctx, ctx.launch_ctx, jaxpr, jax.tree.leaves(transforms), jaxpr.consts
    )
    return results.tree.unflatten(lowered), results.unflatten()


def _moved(function: Any, avals: Any) -> Any:
    """What `function` makes of types."""
    if isinstance(avals[1], indexing.NDIndexer) and isinstance(avals[0], gpu_core.UnswizzleRef):
        return function(*avals)
    return _traced_move(function, avals)[1].unflatten()


def _traced_move(function: Any, avals: Any) -> Any:
    if isinstance(function.args[0], gpu_core.AbstractRefUnion):  # it has no hash where it is part of another
        return _trace_move(function, avals)
    leaves, tree = jax.tree.flatten(avals)
    key = function.func, function.args, tuple(leaves), tree
    if (traced := _moves.get(key)) is None:
        traced = _moves[key] = _trace_move(function, avals)
    return traced


def _trace_move(function: Any, avals: Any) -> Any:
    about = api_util.debug_info("mgpu_ops_move", function, ("",) * len(avals), {}).with_unknown_names()
    return partial_eval.trace_to_jaxpr(function, flattree.flatten_args(*avals), debug_info=about, requires_low=True)


# Where layouts are inferred, Pallas moves the index before swizzle and tiling for nothing but to raise where it cannot.


def check_ungenerated(is_ours: Callable[[Any], bool]) -> None:
    """That an index and the swizzle and tiling before it can change places is told by their types."""
    move = lowering._bubble_up_transforms_for_lowering
    tiles = (gpu_core.UntilingTransform, gpu_core.UnswizzleRef)

    @functools.wraps(move)
    def check_or_move(ctx: Any, aval: Any, transforms: Any, avals: Any, **options: Any) -> Any:
        inferred = ctx.module_ctx.lowering_semantics == lowering.mgpu.LoweringSemantics.Warpgroup
        if not is_ours(ctx.launch_ctx) or not inferred or not transforms or not isinstance(transforms[0], tiles):
            return move(ctx, aval, transforms, avals, **options)
        _checking.now = True
        try:
            return move(ctx, aval, avals, avals, **options)
        finally:
            _checking.now = False

    ours: Any = check_or_move
    lowering._bubble_up_transforms_for_lowering = ours


class _Checking(threading.local):
    now = False


_checking = _Checking()


# --- What generated code has once
#
# An operation of Mosaic's dialect becomes tens or hundreds of LLVM's. A third of them were integers, and numbers of the thread,
# 19 operations each. MLIR's canonicalizer leaves one of each integer, and LLVM one number of the thread, as each kernel begins
# with it.


class _Once(threading.local):
    """Of the kernel that is being lowered: its integers by type and value, its launch, and the number of its thread.

    before: the last number of the thread that was generated until there is one for all.
    """

    integers: dict[Any, Any] | None = None
    launch: Any = None
    thread: Any = None
    before: Any = None


_once = _Once()


def generate_once(is_ours: Callable[[Any], bool]) -> None:
    """While Mosaic's dialect is lowered, integers are generated once, before the launch, the thread's number at its start."""
    arith: Any = dialect_lowering.arith
    lower, begin = dialect_lowering.lower_mgpu_dialect, dialect_lowering._lowering_context
    constant, thread_idx = arith.constant, utils.thread_idx

    @functools.wraps(constant)
    def number(result: Any, value: Any, *, loc: Any = None, ip: Any = None) -> Any:
        known = _once.integers
        if known is None or type(value) is not int or ip is not None:
            return constant(result, value, loc=loc, ip=ip)
        if (found := known.get((result, value))) is None:
            if ir.InsertionPoint.current.block == _once.launch.block:  # the host's code, which may go before all this
                return constant(result, value, loc=loc)
            found = known[result, value] = constant(result, value, loc=loc, ip=_once.launch)
        return found

    @functools.wraps(thread_idx)
    def thread() -> Any:
        if _once.thread is not None:
            return _once.thread
        found = thread_idx()
        if _once.integers is not None:
            _once.before = found
        return found

    @functools.wraps(begin)
    def begin_with_thread(*args: Any) -> Any:
        context = begin(*args)
        _once.thread = _once.before  # of the last predicate that this generates at the start of the kernel
        return context

    @functools.wraps(lower)
    def lower_sharing(module: Any, context: Any, *args: Any, **options: Any) -> Any:
        if not is_ours(context):
            return lower(module, context, *args, **options)
        _once.integers, _once.launch = {}, ir.InsertionPoint(dialect_lowering._gpu_launch_op(module))
        try:
            return lower(module, context, *args, **options)
        finally:
            _once.integers = _once.launch = _once.thread = _once.before = None

    patched: tuple[Any, ...] = lower_sharing, begin_with_thread, thread
    arith.constant = number
    dialect_lowering.lower_mgpu_dialect, dialect_lowering._lowering_context, utils.thread_idx = patched


# --- Classes


def remember_classes() -> None:
    """The dataclass that Mosaic GPU defines in a function that stores tiles is made once, and not by each call."""
    known: dict[str, type] = {}

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return functools.partial(dataclass, **options)
        if "<locals>" not in cls.__qualname__:
            return dataclasses.dataclass(cls, **options)
        if cls.__qualname__ not in known:
            known[cls.__qualname__] = dataclasses.dataclass(cls, **options)
        return known[cls.__qualname__]

    module: Any = fragmented_array
    module.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "dataclass": dataclass})
