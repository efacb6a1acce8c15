"""all_reduce, reduce_scatter and all_gather between the GPUs of a host, for use inside `jax.shard_map`, on NVIDIA Hopper.

- `problem.py`: what is computed, and which configs can run it; `model.py`: which configs are worth trying
- `plan.py`: transport, backend and config of a call; `topology.py`: how devices reach each other
- `kernel.py`: layout of the payload, and launch; `layout.py`: what a kernel is given
- `schedules.py`: the algorithms; `executor.py`: the kernel that carries one out; `ll.py`: its LL loads and stores
- `workspace.py`: memory for small collectives; `rendezvous.py`: devices that meet on the host

Here are the public functions with their gradient and batching rules, and the ops' SPECs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike

from mgpu_ops import flags, floats
from mgpu_ops.collectives import layout, model, rendezvous, topology
from mgpu_ops.collectives import problem as problems
from mgpu_ops.collectives.layout import LLMemory
from mgpu_ops.collectives.plan import Call, Plan, plan, plan_in_workspace
from mgpu_ops.collectives.problem import REDUCTIONS, SHAPES, SUITES, TRANSPORTS, XLA, Config, Problem
from mgpu_ops.collectives.schedules import Kind
from mgpu_ops.collectives.topology import axes_of, split
from mgpu_ops.collectives.workspace import Workspace, collective_workspace
from mgpu_ops.core import mesh
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.registry import capture, dispatch
from mgpu_ops.registry.dispatch import Backend
from mgpu_ops.registry.spec import Baseline, OpSpec

type Reduction = Literal["add", "min", "max"]
type Transport = Literal["peer", "multimem", "xla"]


def all_reduce(
    x: ArrayLike,
    axis_name: str | Sequence[str],
    op: Reduction = "add",
    *,
    transport: Transport | None = None,
    across: str | Sequence[str] | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    backend: Backend | None = None,
    debug: bool = False,
) -> jax.Array:
    """out[i] = x_0[i] + x_1[i] + ...: x of all devices of a mesh axis, summed, on each of them. `jax.lax.psum` for use inside
    `jax.shard_map`.

    16-bit floats are summed in float32, in the order of the devices, and rounded once (a ring rounds at each device), so that
    all devices and all runs give the same bits.

    Args:
      x: of any shape. bfloat16, float16, float32, int32 or uint32 for the kernel; other dtypes run through XLA.
      axis_name: the axis of the mesh, or several.
      op: "add", "min" or "max".
      transport: "peer" (kernels that read and write peers' memory over NVLink), "multimem" (the NVLink switch adds and copies;
        compiled and simulated, never yet run on hardware by us), or "xla". By default the kernels run where a config is stored
        for as many GPUs and about as many bytes, unless it says that XLA is faster; else XLA. NCCL_NVLS_ENABLE=0 and
        MGPU_OPS_MULTICAST=0 forbid multimem.
      across: which of several axes lie between hosts; by default found from the job's processes. Each host reduces and
        scatters, XLA's all-reduce sums the parts across hosts, and each host gathers.
      config: runs the kernel with this CollectiveConfig instead of the database's.
      workspace: of `collective_workspace`, for this axis, open. A payload that fits in it is reduced by one plain kernel, the
        fastest way for small x, without a gradient. Larger ones, and other machines, do not use it.
      backend: "mosaic", "interpret" (any machine, slow, finds data races) or "xla".
      debug: each device reports on the host that it has arrived, and waits for the others there first. Where one does not come
        within $MGPU_OPS_DEBUG_TIMEOUT seconds (default 60), the call ends in an error that names it, instead of a hang. The
        same holds where an LL kernel, as in a workspace, waits that long for another GPU's data.

    Returns:
      an array like x, equal on all devices of the axis.

    Works under jit, grad (reverse mode), vmap, scan, and on a part of a mesh's axes. For "min" and "max", equal elements share
    the gradient.

    Raises:
      ValueError: an unknown axis, op, transport or backend; a transport or config that cannot run.

    Source: schedules in schedules.py; measurements in docs/kernels/all_reduce.md.
    """
    x = floats.any_array("all_reduce", "x", x, "numbers")
    call = _call("all_reduce", axis_name, op, transport, config, backend, workspace)
    inner, outer = split(call.axes, across)
    if flags.checked("debug", debug):
        x, call = _arrived(call, x)
    if not outer or not inner:
        transport = "xla" if outer else transport
        return _collective(dataclasses.replace(call, equal=True, transport=transport), x, workspace if inner else None)
    # Each host reduces and scatters, equal parts reduce across hosts, each host gathers.
    n = math.prod(size for _, size in inner)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
    part = _collective(dataclasses.replace(call, kind="reduce_scatter", axes=inner), flat)
    part = _collective(dataclasses.replace(call, axes=outer, transport="xla", backend=None, equal=True), part)
    whole = _collective(dataclasses.replace(call, kind="all_gather", axes=inner, equal=True), part)
    return whole.reshape(-1)[: x.size].reshape(x.shape)


def reduce_scatter(
    x: ArrayLike,
    axis_name: str | Sequence[str],
    op: Reduction = "add",
    *,
    dimension: int = 0,
    transport: Transport | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    backend: Backend | None = None,
    debug: bool = False,
) -> jax.Array:
    """out[d] = the d-th of n equal parts of x_0 + x_1 + ..., cut along `dimension`, on the d-th of n devices.
    `jax.lax.psum_scatter(..., tiled=True)` for use inside `jax.shard_map`.

    Summed and rounded as by `all_reduce`.

    Args:
      x: of any shape whose `dimension` is a multiple of n; dtypes as for `all_reduce`.
      dimension: the one that is cut, counted from the end if negative.
      axis_name, op, transport, config, workspace, backend, debug: as for `all_reduce`.

    Returns:
      an array of x's dtype and shape, but for `dimension`, which is an n-th.

    Works under what `all_reduce` works under.

    Raises:
      ValueError: a dimension that x has not, or that n does not divide; an unknown axis, op, transport or backend; a transport
        or config that cannot run.
      TypeError: a dimension that is no integer.
    """
    x = floats.any_array("reduce_scatter", "x", x, "numbers")
    call = _call("reduce_scatter", axis_name, op, transport, config, backend, workspace)
    n = call.devices
    dimension = _dimension("reduce_scatter", x, dimension)
    if x.shape[dimension] % n:
        raise ValueError(
            f"x{x.shape} has {x.shape[dimension]} in dimension {dimension}, no multiple of the {n} devices: pad it"
        )
    if flags.checked("debug", debug):
        x, call = _arrived(call, x)
    parts = x.reshape(*x.shape[:dimension], n, x.shape[dimension] // n, *x.shape[dimension + 1 :])
    return _collective(call, jnp.moveaxis(parts, dimension, 0), workspace)


def all_gather(
    x: ArrayLike,
    axis_name: str | Sequence[str],
    *,
    dimension: int = 0,
    transport: Transport | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    backend: Backend | None = None,
    debug: bool = False,
) -> jax.Array:
    """out = x_0, x_1, ... of all n devices, one after the other along `dimension`, on each of them.
    `jax.lax.all_gather(..., tiled=True)` for use inside `jax.shard_map`.

    Args:
      x: of any shape with at least one dimension; dtypes as for `all_reduce`.
      dimension: the one along which they are joined, counted from the end if negative.
      axis_name, transport, config, workspace, backend, debug: as for `all_reduce`.

    Returns:
      an array of x's dtype and shape, but for `dimension`, which is n times as long; equal on all devices of the axis.

    Works under what `all_reduce` works under.

    Raises:
      ValueError: a dimension that x has not; an unknown axis, transport or backend; a transport or config that cannot run.
      TypeError: a dimension that is no integer.
    """
    x = floats.any_array("all_gather", "x", x, "numbers")
    call = _call("all_gather", axis_name, "add", transport, config, backend, workspace)
    dimension = _dimension("all_gather", x, dimension)
    if flags.checked("debug", debug):
        x, call = _arrived(call, x)
    parts = jnp.moveaxis(_collective(call, x, workspace), 0, dimension)
    return parts.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])


def _call(
    kind: Kind,
    axis_name: str | Sequence[str],
    reduction: str,
    transport: str | None,
    config: Config | None,
    backend: Backend | None,
    workspace: Workspace | None,
) -> Call:
    """The call, of arguments that fit each other; TypeError or ValueError for others."""
    axes = axes_of(kind, axis_name)
    if reduction not in REDUCTIONS:
        raise ValueError(f"op={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if transport not in (None, *TRANSPORTS, XLA):
        raise ValueError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}, {XLA}")
    check_config("config", config, Config, "CollectiveConfig")
    backend = dispatch.requested_backend(backend)
    if backend not in (None, "xla") and transport == XLA:
        raise ValueError(f"transport='xla' does not run on backend={backend!r}: leave one of them out")
    call = Call(kind, axes, reduction, transport, config, backend, no_multicast=topology.multicast_forbidden())
    if workspace is not None:
        _check_workspace(call, workspace)
    return call


def _check_workspace(call: Call, workspace: Workspace) -> None:
    """Raises TypeError or ValueError for a workspace that the call cannot use."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}: pass what mgpu_ops.collective_workspace returns, opened")
    if not workspace.opened:
        raise ValueError("the workspace is closed: pass workspace.open(), called once at the start of what shard_map runs")
    if workspace.axis_name != call.names:
        raise ValueError(
            f"the workspace is for axis_name={workspace.axis_name}, and {call.kind} runs over {call.names}: each needs its own"
        )
    here = jax.sharding.get_abstract_mesh()
    if workspace.mesh != tuple(here.shape.items()):
        raise ValueError(f"the workspace is of a mesh {dict(workspace.mesh)}, and {call.kind} runs on {dict(here.shape)}")
    if call.transport not in (None, "peer") or call.config is not None:
        raise ValueError(f"a workspace goes with transport='peer' and no config: leave {call.transport or call.config} out")
    if _checked(call):
        raise ValueError("a workspace needs jax.shard_map(..., check_vma=False): JAX types no ref that differs between devices")


def _arrived(call: Call, x: jax.Array) -> tuple[jax.Array, Call]:
    """For debug=True: x, once all devices have arrived, and the call with a timeout for its kernel."""
    return rendezvous.wait_for_all(call.kind, call.axes, x), dataclasses.replace(call, timeout=rendezvous.timeout())


def _dimension(name: str, x: jax.Array, dimension: int) -> int:
    """`dimension`, counted from the first one of x. ValueError for one that x has not, TypeError for no integer."""
    if isinstance(dimension, bool) or not isinstance(dimension, int | np.integer):
        raise TypeError(f"dimension={dimension!r:.80} is no integer: {name} works along one of x's {x.ndim} dimensions")
    if not -x.ndim <= dimension < x.ndim:
        raise ValueError(f"dimension={dimension} is none of x{x.shape}: {name} works along one of its {x.ndim} dimensions")
    return dimension % x.ndim


# --- Gradients and batches. all_reduce: x -> x; reduce_scatter: [n, ...] -> [...]; all_gather: [...] -> [n, ...].


def _collective(call: Call, x: jax.Array, workspace: Workspace | None = None) -> jax.Array:
    """The collective, differentiable; in the workspace, and not differentiable, where that is possible."""
    if workspace is not None:
        chosen = plan_in_workspace(call, SPECS[call.kind], _problem(call, x), workspace)
        if chosen is not None:
            return _in_workspace(call, chosen)(_without_gradient(_varying(call, x)), workspace)
    if set(call.names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return _differentiable(call, _varying(call, x))
    return _run(call, x)  # an axis of vmap or pmap, which XLA reduces over, with JAX's own gradients


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    return x


@_without_gradient.defjvp
def _(*_: Any) -> Any:
    raise ValueError("a collective in a workspace has no gradient: leave workspace= out where gradients are taken")


def _varying(call: Call, x: jax.Array) -> jax.Array:
    """x, typed as differing between the devices of the axes, as far as `jax.shard_map` checks such types (check_vma)."""
    return mesh.same_mesh_axes(x, lax.axis_index(call.names))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: Call, x: jax.Array) -> jax.Array:
    return _batchable(call)(x)


def _forward(call: Call, x: jax.Array) -> Any:
    y = _differentiable(call, x)
    return y, None if call.reduction == "add" else (x, y)


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[jax.Array]:
    """The gradient of x. A sum's is its transpose; of a minimum or maximum, the elements equal to it share g."""
    plain = dataclasses.replace(call, reduction="add", config=None, equal=False)
    reduces = dataclasses.replace(plain, kind="all_reduce", equal=True)
    scatters, gathers = (dataclasses.replace(plain, kind=kind) for kind in ("reduce_scatter", "all_gather"))

    def spread(y: jax.Array) -> jax.Array:
        """A result, in the shape of x: for reduce_scatter, all parts gathered."""
        return _collective(gathers, y) if call.kind == "reduce_scatter" else _varying(call, y)

    if call.kind == "all_gather":
        return (_collective(scatters, g),)
    if call.kind == "all_reduce" and not _checked(call):
        g = _collective(reduces, g)  # without these types, each device's result adds to the gradient
    if saved is None:
        return (spread(g),)
    x, y = saved
    mine = (x == spread(y)).astype(g.dtype)
    shares = _collective(reduces if call.kind == "all_reduce" else scatters, mine)
    return (spread(g / shares) * mine,)


_differentiable.defvjp(_forward, _backward)


def _checked(call: Call) -> bool:
    """Whether `jax.shard_map` checks over which axes values differ (check_vma)."""
    return bool(jax.typeof(lax.axis_index(call.names)).manual_axis_type.varying)


@functools.cache
def _batchable(call: Call) -> Callable[[jax.Array], jax.Array]:
    """The call as a function of x. vmap makes it one call with a larger payload."""
    run = jax.custom_batching.custom_vmap(functools.partial(_run, call))
    run.def_vmap(functools.partial(_batch, call, run))
    return run


@functools.cache
def _in_workspace(call: Call, plan: Plan) -> Callable[[jax.Array, Workspace], jax.Array]:
    """The same in a workspace. The call of a batch is planned anew, because it may be too large for the workspace."""

    @jax.custom_batching.custom_vmap
    def run(x: jax.Array, workspace: Workspace) -> jax.Array:
        return launch(call, plan, x.reshape(-1), memory=workspace.memory).reshape(_result(call, x))

    run.def_vmap(functools.partial(_batch, call, functools.partial(_collective, call)))
    return run


def _batch(
    call: Call, run: Callable[..., jax.Array], size: int, batched: Sequence[Any], x: jax.Array, *workspace: Workspace
) -> tuple[jax.Array, bool]:
    if call.kind == "reduce_scatter":
        return run(jnp.moveaxis(x, 0, 1), *workspace), True
    if call.kind == "all_gather":
        return jnp.moveaxis(run(x, *workspace), 1, 0), True
    return run(x, *workspace), True


# --- From a call to a backend


def _result(call: Call, x: jax.Array) -> tuple[int, ...]:
    return {"all_reduce": x.shape, "reduce_scatter": x.shape[1:], "all_gather": (call.devices, *x.shape)}[call.kind]


def _problem(call: Call, x: jax.Array) -> Problem:
    return Problem(x.size * (call.devices if call.kind == "all_gather" else 1), call.devices, x.dtype.name, call.reduction)


def _run(call: Call, x: jax.Array) -> jax.Array:
    """The collective as `plan` decides. While `capture` traces, nothing runs: the call is marked."""
    flat, shape = x.reshape(-1), _result(call, x)
    if call.devices == 1 or not x.size:
        return _through_xla(call, flat).reshape(shape)
    spec = SPECS[call.kind]
    chosen = plan(call, spec, _problem(call, x))
    if capture.capturing():
        skipped = chosen.choice.skipped(call.config)
        out = capture.mark(spec, chosen.problem, skipped, (flat,), functools.partial(_through_xla, call))
        return (_typed_equal(call, out) if call.equal else out).reshape(shape)  # a mark is not typed as equal
    if chosen.backend == XLA:
        return _through_xla(call, flat).reshape(shape)
    run = _interpreted if chosen.backend == "interpret" else launch
    return run(call, chosen, flat).reshape(shape)


def launch(call: Call, plan: Plan, x: jax.Array, *, memory: LLMemory | None = None) -> jax.Array:
    """`kernel.launch`, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.collectives import kernel

    return kernel.launch(call, plan, x, memory=memory)


def _interpreted(call: Call, plan: Plan, x: jax.Array) -> jax.Array:
    """The kernel in JAX's interpreter, once for all devices."""
    elements = {"all_reduce": x.size, "reduce_scatter": x.size // call.devices, "all_gather": x.size * call.devices}
    out = jax.ShapeDtypeStruct((elements[call.kind],), x.dtype)
    own = rendezvous.interpret_on_all(call.axes, out, functools.partial(launch, call, plan), x)
    return _typed_equal(call, own) if call.equal else own


def _typed_equal(call: Call, x: jax.Array) -> jax.Array:
    """x, which is equal on all devices, with a type that says so: a sum of the first device's bits and the others' zeros."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    first = jnp.where(lax.axis_index(call.names) == 0, bits, 0)
    return lax.bitcast_convert_type(lax.psum(first, call.names), x.dtype)


def _through_xla(call: Call, x: jax.Array) -> jax.Array:
    """The same through XLA (NCCL, or a kernel of XLA's own), of a flat x."""
    reduce = {"add": lax.psum, "min": lax.pmin, "max": lax.pmax}[call.reduction]
    if call.kind == "all_reduce":
        return reduce(x, call.names)
    if call.kind == "all_gather":
        if call.equal:
            own = jnp.zeros((call.devices, *x.shape), x.dtype).at[lax.axis_index(call.names)].set(x)
            return lax.psum(_varying(call, own), call.names).reshape(-1)
        return lax.all_gather(x, call.names, tiled=True)
    if call.reduction == "add":
        return lax.psum_scatter(x, call.names, tiled=True)
    whole = reduce(x, call.names).reshape(call.devices, -1)
    return _varying(call, lax.dynamic_index_in_dim(_varying(call, whole), lax.axis_index(call.names), keepdims=False))


# --- The ops, for the tuner, the benchmarks and the tests: on arrays of all devices, [devices, elements]


def _on_all(kind: Kind, problem: Problem, config: Config, gpu: Gpu, x: jax.Array, *, interpret: bool = False) -> jax.Array:
    call = Call(kind, (("device", problem.devices),), problem.reduction)
    chosen = Plan(problem, dispatch.Choice("interpret" if interpret else "mosaic", gpu, None), config)
    if interpret:
        return launch(call, chosen, x)
    run = _through_xla if config.algorithm == XLA else functools.partial(launch, plan=chosen)
    return _sharded(call, lambda own: run(call, x=own), x)


def _xla_on_all(kind: Kind, problem: Problem, x: jax.Array) -> jax.Array:
    call = Call(kind, (("device", problem.devices),), problem.reduction)
    return _sharded(call, functools.partial(_through_xla, call), x)


def _sharded(call: Call, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    devices = AbstractMesh((call.devices,), ("device",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("device")
    run = jax.shard_map(lambda own: function(own[0])[None], mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    return run(x)


def reference(kind: Kind, problem: Problem, x: jax.Array) -> jax.Array:
    """What all devices should have, [devices, elements]: in float32 in the order of the devices, rounded once."""
    n = problem.devices
    if kind == "all_gather":
        return jnp.broadcast_to(x.reshape(-1), (n, problem.size))
    total = layout.reduced(problem.reduction, x)
    return jnp.broadcast_to(total, (n, problem.size)) if kind == "all_reduce" else total.reshape(n, -1)


def _spec(kind: Kind) -> OpSpec:
    of: Any = lambda function: functools.partial(function, kind)  # noqa: E731
    return OpSpec(
        name=kind,
        version=1,
        Problem=Problem,
        Config=Config,
        shapes=SHAPES,
        suites=SUITES,
        space=of(model.space),
        supports=of(problems.supports),
        check=of(problems.check),
        candidates=of(model.candidates),
        default=of(model.default),
        cost=of(model.cost),
        distance=problems.distance,
        flops=of(problems.flops),
        bytes=of(problems.bytes_moved),
        inputs=of(problems.inputs),
        run=of(_on_all),
        reference=of(reference),
        tolerance=problems.tolerance,
        baseline=lambda problem: Baseline("xla", of(_xla_on_all)),
        unmeasured=lambda problem: "nothing was measured for this problem or one near it",
        leaves_to_xla=lambda config: config.algorithm == XLA,
        devices=lambda problem: problem.devices,
    )


SPECS: dict[str, OpSpec] = {kind: _spec(kind) for kind in problems.KINDS}

__all__ = ["SPECS", "Config", "Problem", "Workspace", "all_gather", "all_reduce", "collective_workspace", "reduce_scatter"]
