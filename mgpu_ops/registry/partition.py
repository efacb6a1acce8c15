"""How an op is split over the GPUs of a program that `jax.jit` partitions: `partitioned`, by a `Rule`.

XLA cannot look into a kernel. What it knows of one is the rule that the op declares, from which Shardy propagates shardings
through the program, as through XLA's own operations; and for each call, once the shardings are known, the function that one
device runs on its part. That function is traced for the part's shape, so that the config is the one for that shape. There is
one mechanism for each kind of mesh axes (`jax.sharding.AxisType`):

- Auto: `jax.experimental.custom_partitioning`, when XLA partitions the program. An operation of our own stands for the call
  until it is lowered: for one device, inside `jax.shard_map` and in an exported program it is the call itself.
- Explicit: the shardings are in the types of the arrays, and `jax.shard_map` is put around the call while it is traced.
- Manual (inside `jax.shard_map`): nothing is left to split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.jax_names import custom_partitioning, parse_flatten_op_sharding, primitives_with_devices
from mgpu_ops.registry import capture, resolution

_log = logging.getLogger("mgpu_ops")
_HELP = "docs/howto/train.md#several-gpus"
_said: set[str] = set()

type Axes = tuple[str, ...]  # of a mesh, over which one dimension is split, the first one outermost


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which dimensions of an op's arrays belong together, and which of them may be split over devices.

    name: of the op, for messages.
    dimensions: of operands and results, as "m k, k n -> m n". Dimensions of one name are split alike, those in capitals not at
      all: arrays that are split along them are gathered. What a result lacks is summed: where it is split, the devices' results
      are added up.
    largest: numbers of results of which the largest is taken over devices instead of the sum.
    logarithms: numbers of results that are logarithms of sums: what is added up over devices are the sums.
    partial: the call whose results are added up, where a dimension is split that results lack; default: the call itself.
    finish: makes the call's results of the sums: `finish(results, *arrays)`. Default: they are the sums.
    counted, of_part: a dimension, and the call where that is split, whose results are added up if they lack the dimension:
      `of_part(parts, number, *arrays)` on part `number` (traced int32) of `parts`.
    """

    name: str
    dimensions: str
    largest: tuple[int, ...] = ()
    logarithms: tuple[int, ...] = ()
    partial: Callable[..., Any] | None = None
    finish: Callable[..., Any] | None = None
    counted: str = ""
    of_part: Callable[..., Any] | None = None

    @functools.cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        return _names(self.dimensions.partition("->")[0])

    @functools.cached_property
    def results(self) -> tuple[tuple[str, ...], ...]:
        return _names(self.dimensions.partition("->")[2])

    @functools.cached_property
    def whole(self) -> tuple[str, ...]:
        """The dimensions that are not split."""
        return tuple(dict.fromkeys(n for dims in (*self.operands, *self.results) for n in dims if n.isupper()))

    @functools.cached_property
    def summed(self) -> tuple[str, ...]:
        """The dimensions that no result has."""
        kept = {name for dims in self.results for name in dims}
        return tuple(dict.fromkeys(n for dims in self.operands for n in dims if n not in kept and n not in self.whole))


def _names(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(one.split()) for one in text.split(","))


def partitioned(function: Callable[..., Any], rule_of: Callable[..., Rule], backend: str | None) -> Callable[..., Any]:
    """`function`, an op's call of arrays, split over devices by `rule_of(*arrays)`, where XLA partitions the program.

    The arrays may be pytrees, of whose leaves the rule speaks, or None. With the interpreter automatic axes split nothing.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not applies(backend, *args):
            return function(*args)
        leaves, structure = jax.tree.flatten(args)
        over = mesh.mesh_of(leaves)
        explicit = mesh.explicit_axes(over)
        made = _Call(function, structure, rule_of(*args), resolution.overrides(), gpus.targeted(), jax.config.jax_enable_x64)
        results, outputs = jax.tree.flatten(_shapes(function, args))
        found = _under_shard_map(made, over, leaves, results) if explicit else made.bound(results, *leaves)
        return jax.tree.unflatten(outputs, found)

    return call


def with_first(function: Callable[..., Any], rule_of: Callable[..., Rule], first: int, *args: Any) -> Any:
    """`function(*args)`, an op made of others; over explicit axes split by `rule_of(*args)`, if one of the first args is.

    JAX refuses parts of such a call there. Otherwise each of the others is split by a rule of its own.
    """
    explicit = mesh.explicit_axes(mesh.mesh_of(jax.tree.leaves(args)))
    return (partitioned(function, rule_of, None) if explicit and applies(None, *args[:first]) else function)(*args)


def applies(backend: str | None, *args: Any) -> bool:
    """Whether a `partitioned` call of these arrays may be split; it may not in a process with one device."""
    leaves = jax.tree.leaves(args)
    over = mesh.mesh_of(leaves)
    if capture.capturing():
        return False
    if mesh.explicit_axes(over):
        return any(axes for x in leaves for axes in _spec(jax.typeof(x).sharding.spec, x.ndim))
    return backend != "interpret" and mesh.may_be_partitioned(over)


def _shapes(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Shapes and dtypes of the results, for which no kernel is traced."""
    with capture.shapes_only():
        return jax.eval_shape(function, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that is traced later, for its part of the arrays, as it would have been where it was made.

    structure: of the function's arguments. overrides, target, x64: what its tracing depends on but its arguments.
    """

    function: Callable[..., Any]
    structure: Any
    rule: Rule
    overrides: Any = None
    target: Any = None
    x64: bool = False

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with resolution.overridden(self.overrides), gpus.target(self.target), jax.enable_x64(self.x64):
            yield

    def leaves(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results, in order."""
        with self.context():
            return jax.tree.leaves(_jitted(self.function)(*jax.tree.unflatten(self.structure, arrays)))

    def bound(self, results: Sequence[Any], *arrays: jax.Array) -> list[jax.Array]:
        """The same as an operation that is traced when it is lowered: without the effects that references in the call have."""
        found: list[jax.Array] = _operation().bind(*arrays, call=self, outputs=tuple((x.shape, x.dtype) for x in results))
        return found

    def shapes(self, *arrays: jax.Array) -> list[Any]:
        """Those of the results."""
        with self.context():
            return jax.tree.leaves(_shapes(self.function, jax.tree.unflatten(self.structure, arrays)))

    def part(self, split: _Split, bound: bool, *arrays: jax.Array) -> list[jax.Array]:
        """The results of one device, of its parts of the arrays."""
        rule, is_sum, call, own = self.rule, any(split.sums), self, arrays
        if (axes := split.axes.get(rule.counted)) and rule.of_part:
            function = functools.partial(rule.of_part, math.prod(lax.axis_size(axis) for axis in axes))
            call = dataclasses.replace(self, function=function, structure=_with_first(self.structure))
            own = lax.axis_index(axes), *arrays
        elif is_sum and rule.partial:
            call = dataclasses.replace(self, function=rule.partial)
        results = call.bound(call.shapes(*own), *own) if bound else call.leaves(*own)
        if not is_sum:
            return results
        results = [split.total(i, x) for i, x in enumerate(results)]
        if rule.finish is None:
            return results
        return jax.tree.leaves(rule.finish(*results, *jax.tree.unflatten(self.structure, arrays)))


def _with_first(structure: Any) -> Any:
    """The structure of a call's arguments, with one array before them."""
    return jax.tree.structure((0, *jax.tree.unflatten(structure, [0] * structure.num_leaves)))


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traced once for each shape of a part, however often a program calls it."""
    return jax.jit(lambda *args: function(*args))


# --- Which device has what


@dataclasses.dataclass(frozen=True)
class _Split:
    """Over which mesh axes the dimensions of a rule are split.

    scattered: of each result, the axes over which its sum is scattered, by its dimension's index.
    """

    rule: Rule
    axes: dict[str, Axes]
    scattered: tuple[dict[int, Axes], ...]

    @functools.cached_property
    def sums(self) -> tuple[Axes, ...]:
        """Of each result, the axes over which the devices' results are added up."""
        return tuple(
            tuple(axis for name, axes in self.axes.items() if name not in dims for axis in axes) for dims in self.rule.results
        )

    def total(self, index: int, x: jax.Array) -> jax.Array:
        scattered = self.scattered[index]
        rest = tuple(axis for axis in self.sums[index] if not any(axis in axes for axes in scattered.values()))
        if rest:
            x = self._over(index, x, rest)
        for dimension, axes in scattered.items():
            x = lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
        return x

    def _over(self, index: int, x: jax.Array, axes: Axes) -> jax.Array:
        if index in self.rule.largest:
            return lax.pmax(x, axes)
        if index not in self.rule.logarithms:
            return lax.psum(x, axes)
        most = lax.pmax(x, axes)
        most = lax.select(lax.is_finite(most), most, lax.full_like(most, 0))
        return most + lax.log(lax.psum(lax.exp(x - most), axes))

    def operand_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(self.axes.get(name) or None for name in dims)) for dims in self.rule.operands)

    def result_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(
            PartitionSpec(*((self.axes.get(name, ()) + scattered.get(i, ())) or None for i, name in enumerate(dims)))
            for dims, scattered in zip(self.rule.results, self.scattered, strict=True)
        )


def _split(
    rule: Rule,
    sizes: dict[str, int],
    operands: Sequence[tuple[Axes, ...]],
    results: Sequence[tuple[Axes, ...]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> _Split:
    """How to split a call whose operands are sharded so, and whose results are wanted so (each a tuple of axes, or none known).

    First the sums for which all operands are split already, which need no other copy; then what results want, then what
    operands have. An axis splits one dimension, and only one of which each device gets as much.
    """
    lengths, found = _lengths(rule, shapes), dict[str, Axes]()

    def take(name: str, axes: Axes) -> None:
        if name in found or name in rule.whole or not axes:
            return
        used = {axis for taken in found.values() for axis in taken}
        free: Axes = ()
        for axis in axes:
            parts = math.prod(sizes[a] for a in (*free, axis))
            if axis in used or any(length % parts for length in lengths[name]):
                break
            free = (*free, axis)
        if free:
            found[name] = free

    for name in rule.summed:
        here = [axes[dims.index(name)] for dims, axes in zip(rule.operands, operands, strict=True) if name in dims]
        if len(set(here)) == 1:
            take(name, here[0])
    for kind, sharded in ((rule.results, results), (rule.operands, operands)):
        for dims, axes in zip(kind, sharded, strict=False):
            for name, one in zip(dims, axes, strict=True):
                take(name, one)
    plain = _Split(rule, found, ({},) * len(rule.results))
    if rule.finish is not None:
        return plain
    scattered: list[dict[int, Axes]] = [{} for _ in rule.results]
    for index, axes in enumerate(results):
        summed = set(plain.sums[index])
        for i, (name, wanted) in enumerate(zip(rule.results[index], axes, strict=True)):
            own = found.get(name, ())
            extra = () if index in (*rule.largest, *rule.logarithms) else wanted[len(own) :]
            parts = math.prod(sizes[a] for a in wanted)
            if extra and wanted[: len(own)] == own and summed.issuperset(extra) and shapes[1][index][i] % parts == 0:
                scattered[index][i] = extra
                summed -= set(extra)
    return _Split(rule, found, tuple(scattered))


def _lengths(rule: Rule, shapes: Sequence[Sequence[tuple[int, ...]]]) -> dict[str, list[int]]:
    """Of each dimension, its length in each operand and result that has it."""
    lengths: dict[str, list[int]] = {}
    for kind, of_kind in zip((rule.operands, rule.results), shapes, strict=True):
        for dims, shape in zip(kind, of_kind, strict=True):
            for name, length in zip(dims, shape, strict=True):
                lengths.setdefault(name, []).append(length)
    return lengths


def _spec(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """The axes of each dimension."""
    axes = [(x,) if isinstance(x, str) else () if x is None or x is PartitionSpec.UNCONSTRAINED else tuple(x) for x in spec]
    return (*axes, *((),) * (rank - len(axes)))


# --- Explicit axes


def _under_shard_map(call: _Call, over: Any, arrays: Sequence[jax.Array], results: Sequence[Any]) -> list[jax.Array]:
    """The results of the call inside `jax.shard_map` over the explicit axes, which the arrays' types say how to split."""
    explicit = mesh.explicit_axes(over)
    operands = [_spec(jax.typeof(x).sharding.spec, x.ndim) for x in arrays]
    shapes = [x.shape for x in arrays], [x.shape for x in results]
    split = _split(call.rule, {name: over.shape[name] for name in explicit}, operands, (), shapes)
    own = split.operand_specs()
    for number, (x, spec, axes) in enumerate(zip(arrays, own, operands, strict=True)):
        if _spec(spec, x.ndim) != axes:
            raise ValueError(
                f"{call.rule.name} ({call.rule.dimensions}; in capitals what is not split): operand {number} is "
                f"{jax.typeof(x)}, and beside the others it has to be {spec}. Over explicit axes of a mesh nothing is moved "
                f"unasked: pass jax.sharding.reshard(x, {spec}), or shard the operands otherwise ({_HELP})"
            )
    run = jax.shard_map(
        functools.partial(call.part, split, False),
        mesh=over,
        in_specs=own,
        out_specs=list(split.result_specs()),
        axis_names=set(explicit),
        check_vma=False,
    )
    with mesh.all_axes():
        found: list[jax.Array] = run(*arrays)
        return found


# --- Auto axes


@functools.cache
def _operation() -> Any:
    """The operation that stands for a call until its program is lowered."""
    from jax.core import ShapedArray
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("mgpu_ops_partitioned")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*arrays: Any, call: _Call, outputs: tuple[Any, ...]) -> list[ShapedArray]:
        over = next((x.sharding.mesh for x in arrays if not x.sharding.mesh.empty), None)
        if over is None:
            return [ShapedArray(shape, dtype) for shape, dtype in outputs]
        # Later calls are to see the mesh.
        return [
            ShapedArray(shape, dtype, sharding=NamedSharding(over, PartitionSpec(*(None,) * len(shape))))
            for shape, dtype in outputs
        ]

    @primitive.def_impl
    def _(*arrays: Any, call: _Call, outputs: tuple[Any, ...]) -> list[jax.Array]:
        return call.leaves(*arrays)

    def lower(ctx: Any, *values: Any, call: _Call, outputs: tuple[Any, ...]) -> Any:
        if not mesh.is_partitioned(ctx.module_context):
            with mesh.within_part(ctx.module_context):
                return mlir.lower_fun(call.leaves, multiple_results=True)(ctx, *values)
        results = mlir.lower_fun(_custom(call, outputs), multiple_results=True)(ctx, *values)
        _name(results[0].owner, call)
        return results

    mlir.register_lowering(primitive, lower)
    primitives_with_devices.add(primitive)  # for the mesh
    return primitive


def _name(operation: Any, call: _Call) -> None:
    """Tells calls of different functions apart in JAX's compilation cache, where that leaves out their place in memory."""
    from jax.extend.mlir import ir

    if operation.name == "stablehlo.custom_call":
        text = repr([_words(call.function), _words(call.rule), call.overrides, call.target, call.x64])
        name = ir.StringAttr.get(hashlib.sha256(text.encode()).hexdigest())
        operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"mgpu_ops": name})


def _words(x: Any) -> Any:
    """What a function computes, as far as its name and what it closes over say."""
    if isinstance(x, functools.partial):
        return [_words(y) for y in (x.func, *x.args, *x.keywords.items())]
    if isinstance(x, Rule):
        calls = [_words(call) for call in (x.partial, x.finish, x.of_part)]
        return [x.name, x.dimensions, x.largest, x.logarithms, x.counted, *calls]
    if hasattr(x, "__wrapped__"):
        return _words(x.__wrapped__)
    if hasattr(x, "__qualname__"):
        cells = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        return [x.__module__, x.__qualname__, *map(_words, cells)]
    return repr(x)


def _custom(call: _Call, outputs: tuple[Any, ...]) -> Callable[..., list[jax.Array]]:
    """The call as XLA's partitioner takes it."""
    rule = call.rule

    def whole(*arrays: jax.Array) -> list[jax.Array]:  # never compiled: XLA asks for the parts
        return [jax.numpy.zeros(shape, dtype) for shape, dtype in outputs]

    def part(over: Any, arrays: Any, results: Any) -> Any:
        found, wanted = ([_decoded(x.sharding, over, len(x.shape)) for x in of] for of in (arrays, results))
        shapes = [x.shape for x in arrays], [x.shape for x in results]
        nothing = [[((),) * len(shape) for shape in of] for of in shapes]
        own, made = ([x or y for x, y in zip(*of, strict=True)] for of in zip((found, wanted), nothing, strict=True))
        split = _split(rule, dict(over.shape), own, made, shapes)
        _warn_of_copies(split, dict(over.shape), found, _lengths(rule, shapes))
        takes, gives = ([NamedSharding(over, x) for x in of] for of in (split.operand_specs(), split.result_specs()))
        return over, functools.partial(call.part, split, True), gives, tuple(takes)

    custom: Any = custom_partitioning(whole)
    custom.def_partition(
        part,
        decode_shardings=False,
        sharding_rule=rule.dimensions,
        reduction_factors=rule.summed,
        need_replication_factors=rule.whole,
    )
    return custom


def _decoded(sharding: Any, over: Any, rank: int) -> tuple[Axes, ...] | None:
    """The axes of each dimension, of a sharding as XLA has it. None: it splits along a part of an axis, which has no name."""
    try:
        return _spec(parse_flatten_op_sharding(sharding._hlo_sharding, over)[0], rank)
    except (ValueError, AssertionError):  # the second one where it is split along parts of a dimension in another order
        return None


def _warn_of_copies(
    split: _Split, sizes: dict[str, int], sharded: Sequence[tuple[Axes, ...] | None], lengths: dict[str, list[int]]
) -> None:
    """Says once of an op's operand that it is gathered along axes that split nothing of the call: devices compute the same.

    Also of one that is split along a part of an axis, where only the operand may be gathered.
    """
    rule, used = split.rule, {axis for axes in split.axes.values() for axis in axes}

    def say(number: int, how: str, alike: Sequence[str]) -> None:
        if (said := f"{rule.name} {number} {sharded[number] is None} {alike}") in _said:
            return
        _said.add(said)
        computed = f"all devices along {', '.join(alike)} compute the same" if alike else "the work is split nevertheless"
        _log.warning(
            "%s: operand %d of '%s' is split over %s: it is gathered, and %s. Shard it otherwise, or put jax.shard_map around "
            "the op (%s)",
            rule.name, number, rule.dimensions, how, computed, _HELP,
        )  # fmt: skip

    for number, axes in enumerate(sharded):
        if axes is None:
            say(number, "a part of an axis of the mesh", [x for x, size in sizes.items() if size > 1 and x not in used])
            continue
        for name, one in zip(rule.operands[number], axes, strict=True):
            if idle := [axis for axis in one if axis not in used]:
                parts = math.prod(sizes[axis] for axis in one)
                odd = next((length for length in lengths[name] if length % parts), None)
                why = "where the sharding of another array goes first"
                if name in rule.whole:
                    why = "which the op does not split as it is called"
                elif odd is not None:
                    why = f"of which there are {odd}, no multiple of {parts} devices"
                say(number, f"{', '.join(idle)} along {name}, {why}", idle)
