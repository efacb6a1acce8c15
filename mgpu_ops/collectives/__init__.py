"""all_reduce, reduce_scatter and all_gather between the GPUs of a host, for use inside `jax.shard_map`, on NVIDIA Hopper.

`problem.py` says what is computed and which configs can run it, `model.py` which are worth trying, `transport.py` how devices
reach each other, `kernel.py` lays the payload out and launches; what the kernel does is a schedule (`schedules.py`),
which `executor.py` carries out. Here are the public functions with their gradient and batching rules, and the ops' SPECs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike

from mgpu_ops.collectives import exchange, model, rendezvous, topology
from mgpu_ops.collectives import problem as problems
from mgpu_ops.collectives.exchange import Axes
from mgpu_ops.collectives.problem import REDUCTIONS, SHAPES, SUITES, TRANSPORTS, XLA, Config, Problem
from mgpu_ops.collectives.schedules import Kind
from mgpu_ops.collectives.transport import axes_of, split, unable, unreachable
from mgpu_ops.collectives.workspace import Workspace, collective_workspace, config_for, unusable
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import capture, dispatch, resolution
from mgpu_ops.registry.dispatch import Backend
from mgpu_ops.registry.spec import Baseline, OpSpec

type Reduction = Literal["add", "min", "max"]
type Transport = Literal["peer", "multimem", "xla"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call says beside its array."""

    kind: Kind
    axes: Axes
    reduction: str = "add"
    transport: str | None = None
    config: Config | None = None
    backend: str | None = None
    equal: bool = False  # the result is the same on all devices, and typed so
    seconds: float | None = None  # that kernels in lines wait at most: with debug
    forbidden: str | None = None  # what forbids multicast; here, because JAX keeps what it traced for equal calls

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.axes)


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
      across: those of several axes that lie between hosts; by default what the job's processes say. Hosts reduce by themselves
        first, then XLA's all-reduce goes across, each device with its part.
      config: runs the kernel with this CollectiveConfig instead of the database's.
      workspace: of `collective_workspace`, for this axis, open. What fits in it is one plain kernel, the fastest way for small
        x, and has no gradient; the rest, and other machines, do without it.
      backend: "mosaic", "interpret" (any machine, slow, finds data races) or "xla".
      debug: each device reports on the host that it has arrived, and waits for the others there first. Where one does not come
        within $MGPU_OPS_DEBUG_TIMEOUT seconds (default 60), the call ends in an error that names it, instead of a hang. So it
        does where a kernel in lines, as in a workspace, waits for another GPU's data that long.

    Returns:
      an array like x, equal on all devices of the axis.

    Works under jit, grad (reverse mode), vmap, scan, and on a part of a mesh's axes. For "min" and "max", equal elements share
    the gradient.

    Raises:
      ValueError: an unknown axis, op, transport or backend; a transport or config that cannot run.

    Source: schedules in schedules.py; measurements in docs/kernels/all_reduce.md.
    """
    x = jnp.asarray(x)
    call = _call("all_reduce", axis_name, op, transport, config, backend, workspace)
    inner, outer = split(call.axes, across)
    if debug:
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
    """The d-th of n equal parts of `all_reduce(x)` on device d, cut along `dimension`: `jax.lax.psum_scatter(..., tiled=True)`.

    Args, errors and what it works under as for `all_reduce`; x.shape[dimension] must be a multiple of n.
    """
    x = jnp.asarray(x)
    call = _call("reduce_scatter", axis_name, op, transport, config, backend, workspace)
    n = call.devices
    dimension = _dimension("reduce_scatter", x, dimension)
    if x.shape[dimension] % n:
        raise ValueError(
            f"x{x.shape} has {x.shape[dimension]} in dimension {dimension}, no multiple of the {n} devices: pad it"
        )
    if debug:
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
    """x of all n devices, one after the other along `dimension`: `jax.lax.all_gather(..., tiled=True)`.

    Args, errors and what it works under as for `all_reduce`.
    """
    x = jnp.asarray(x)
    call = _call("all_gather", axis_name, "add", transport, config, backend, workspace)
    dimension = _dimension("all_gather", x, dimension)
    if debug:
        x, call = _arrived(call, x)
    parts = jnp.moveaxis(_collective(call, x, workspace), 0, dimension)
    return parts.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])


def _call(kind: Kind, axis_name: Any, reduction: str, transport: Any, config: Any, backend: Any, workspace: Any) -> _Call:
    axes = axes_of(kind, axis_name)
    if reduction not in REDUCTIONS:
        raise ValueError(f"op={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if transport not in (None, *TRANSPORTS, XLA):
        raise ValueError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}, {XLA}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is {config!r}: pass a mgpu_ops.CollectiveConfig")
    backend = dispatch.requested_backend(backend)
    if backend not in (None, "xla") and transport == XLA:
        raise ValueError(f"transport='xla' does not run on backend={backend!r}: leave one of them out")
    call = _Call(kind, axes, reduction, transport, config, backend, forbidden=topology.multicast_forbidden())
    if workspace is not None:
        if not isinstance(workspace, Workspace):
            raise TypeError(
                f"workspace is a {type(workspace).__name__}: pass what mgpu_ops.collective_workspace returns, opened"
            )
        if not workspace.opened:
            raise ValueError("the workspace is closed: pass workspace.open(), called once at the start of what shard_map runs")
        if workspace.axis_name != call.names:
            raise ValueError(
                f"the workspace is for axis_name={workspace.axis_name}, and {kind} runs over {call.names}: each needs its own"
            )
        here = jax.sharding.get_abstract_mesh()
        if workspace.mesh != tuple(here.shape.items()):
            raise ValueError(f"the workspace is of a mesh {dict(workspace.mesh)}, and {kind} runs on {dict(here.shape)}")
        if transport not in (None, "peer") or config is not None:
            raise ValueError(f"a workspace goes with transport='peer' and no config: leave {transport or config} out")
        if _checked(call):
            raise ValueError(
                "a workspace needs jax.shard_map(..., check_vma=False): JAX types no ref that differs between devices"
            )
    return call


def _arrived(call: _Call, x: jax.Array) -> tuple[jax.Array, _Call]:
    """For debug=True: x, once all devices have come, and the call with a limit to what its kernel waits."""
    return rendezvous.all_arrive(call.kind, call.axes, x), dataclasses.replace(call, seconds=rendezvous.seconds())


def _dimension(name: str, x: jax.Array, dimension: int) -> int:
    if not -x.ndim <= dimension < x.ndim:
        raise ValueError(f"dimension={dimension} is none of x{x.shape}: {name} works along one of its {x.ndim} dimensions")
    return dimension % x.ndim


# --- Gradients and batches. all_reduce: x -> x; reduce_scatter: [n, ...] -> [...]; all_gather: [...] -> [n, ...].


def _collective(call: _Call, x: jax.Array, workspace: Workspace | None = None) -> jax.Array:
    if workspace is not None and _config_in(call, x, workspace) is not None:
        return _in_workspace(call)(_without_gradient(_varying(call, x)), workspace)
    if set(call.names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return _differentiable(call, _varying(call, x))
    return _run(call, x)  # an axis of vmap or pmap, which XLA reduces over, with JAX's own gradients


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    return x


@_without_gradient.defjvp
def _(*_: Any) -> Any:
    raise ValueError("a collective in a workspace has no gradient: leave workspace= out where gradients are taken")


def _varying(call: _Call, x: jax.Array) -> jax.Array:
    """x, typed as differing between the devices of the axes, as far as `jax.shard_map` checks such types (check_vma)."""
    return mesh.same_mesh_axes(x, lax.axis_index(call.names))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, x: jax.Array) -> jax.Array:
    return _batchable(call)(x)


def _forward(call: _Call, x: jax.Array) -> Any:
    y = _differentiable(call, x)
    return y, None if call.reduction == "add" else (x, y)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array]:
    """The transpose of a sum; for min and max, g shared out among the elements that are the result."""
    plain = dataclasses.replace(call, reduction="add", config=None, equal=False)
    reduces = dataclasses.replace(plain, kind="all_reduce", equal=True)
    scatters, gathers = (dataclasses.replace(plain, kind=kind) for kind in ("reduce_scatter", "all_gather"))

    def spread(y: jax.Array) -> jax.Array:
        """From a result to the shape of x: what all_gather does to the parts of reduce_scatter."""
        return _collective(gathers, y) if call.kind == "reduce_scatter" else _varying(call, y)

    if call.kind == "all_gather":
        return (_collective(scatters, g),)
    if call.kind == "all_reduce" and not _checked(call):
        g = _collective(reduces, g)  # without types, every device's result counts by itself
    if saved is None:
        return (spread(g),)
    x, y = saved
    mine = (x == spread(y)).astype(g.dtype)
    shares = _collective(reduces if call.kind == "all_reduce" else scatters, mine)
    return (spread(g / shares) * mine,)


_differentiable.defvjp(_forward, _backward)


def _checked(call: _Call) -> bool:
    """Whether `jax.shard_map` checks over which axes values differ (check_vma)."""
    return bool(jax.typeof(lax.axis_index(call.names)).manual_axis_type.varying)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of x; a batch of them is one call."""
    run = jax.custom_batching.custom_vmap(functools.partial(_run, call))
    run.def_vmap(functools.partial(_batch, call, run))
    return run


@functools.cache
def _in_workspace(call: _Call) -> Any:
    """The same in a workspace, which a batch may be too large for."""
    run = jax.custom_batching.custom_vmap(functools.partial(_run_in_workspace, call))
    run.def_vmap(functools.partial(_batch, call, functools.partial(_collective, call)))
    return run


def _batch(call: _Call, run: Any, size: int, batched: Sequence[Any], x: jax.Array, *workspace: Workspace) -> Any:
    if call.kind == "reduce_scatter":
        return run(jnp.moveaxis(x, 0, 1), *workspace), True
    if call.kind == "all_gather":
        return jnp.moveaxis(run(x, *workspace), 1, 0), True
    return run(x, *workspace), True


# --- From a call to a backend


def _result(call: _Call, x: jax.Array) -> tuple[int, ...]:
    return {"all_reduce": x.shape, "reduce_scatter": x.shape[1:], "all_gather": (call.devices, *x.shape)}[call.kind]


def _problem(call: _Call, x: jax.Array) -> Problem:
    return Problem(x.size * (call.devices if call.kind == "all_gather" else 1), call.devices, x.dtype.name, call.reduction)


def _config_in(call: _Call, x: jax.Array, workspace: Workspace) -> Config | None:
    """With which the call runs in the workspace, or None where that cannot be."""
    device, problem = gpus.current(), _problem(call, x)
    if device is None or call.devices == 1 or call.backend in ("xla", "interpret") or capture.capturing():
        return None
    if SPECS[call.kind].supports(problem, device) or unable(call.axes, "peer") or unreachable(call.forbidden, "peer"):
        return None
    return config_for(call.kind, problem, workspace) if unusable() is None else None


def _run_in_workspace(call: _Call, x: jax.Array, workspace: Workspace) -> jax.Array:
    config, device = _config_in(call, x, workspace), gpus.current()
    assert config is not None
    assert device is not None
    flat = x.reshape(-1)
    given: Any = {"memory": workspace.memory, "equal": call.equal, "seconds": call.seconds}
    out = launch(call.kind, call.axes, _problem(call, x), config, device, flat, **given)
    return out.reshape(_result(call, x))


def _run(call: _Call, x: jax.Array) -> jax.Array:
    n = call.devices
    shape = _result(call, x)
    if n == 1 or not x.size:
        return _through_xla(call, None, x.reshape(-1)).reshape(shape)
    spec = dataclasses.replace(
        SPECS[call.kind],
        run=functools.partial(_through_kernel, call),
        reference=functools.partial(_through_xla, call),
    )
    problem, reason = _choose(call, spec, _problem(call, x))
    backend = call.backend if call.transport != XLA else XLA
    out = dispatch.run(spec, problem, (x.reshape(-1),), config=call.config, backend=backend, reason=reason)
    if capture.capturing() and call.equal:
        out = _typed_equal(call, out)  # a mark knows nothing of equal results; nothing is run
    return out.reshape(shape)


def _choose(call: _Call, spec: OpSpec, problem: Problem) -> tuple[Problem, str | None]:
    """The problem with its transport, and why it must go through XLA all the same, or None."""
    if call.transport == XLA or call.backend == XLA:
        return problem, None
    if call.backend == "interpret":
        return dataclasses.replace(problem, transport=call.transport or "peer"), None
    if call.transport is not None:
        transport: Any = call.transport
        reason = unable(call.axes, transport) or unreachable(call.forbidden, transport)
        if reason is not None:
            raise ValueError(f"transport={call.transport!r} cannot run {call.kind} over {call.names}: {reason}")
        return dataclasses.replace(problem, transport=transport), None
    device = gpus.current()
    if device is None or spec.supports(problem, device) is not None:
        return problem, None  # dispatch says why
    reasons = []
    for transport in ("multimem", "peer"):
        reason = unable(call.axes, transport) or unreachable(call.forbidden, transport)
        asked = dataclasses.replace(problem, transport=transport)
        if reason is None and spec.supports(asked, device) is None:
            if _is_wanted(call, spec, asked, device):
                return asked, None
            reason = (
                f"nothing is tuned for {call.devices} GPUs and about {problems.payload_bytes(problem)} bytes: "
                f"mgpu-tune run {call.kind} --devices {call.devices}, or pass transport={transport!r}"
            )
        reasons.append(reason)
    return problem, reasons[-1]


def _is_wanted(call: _Call, spec: OpSpec, problem: Problem, device: Gpu) -> bool:
    """Whether kernels run without being named: with a config that somebody chose, multimem with one that was measured only.

    The default does where an entry for about as many bytes says that kernels are faster than XLA there.
    """
    given = call.config is not None or call.backend is not None
    found = resolution.resolve(spec, problem, device)
    if problem.transport == "multimem":
        return not given and found.entry is not None and found.entry.evidence.kind == "measured"
    if found.source == "default" and found.nearest is not None:
        return given or found.nearest.config["algorithm"] != XLA
    return given or found.source != "default"


def launch(*arguments: Any, **options: Any) -> jax.Array:
    """`kernel.launch`, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.collectives import kernel

    return kernel.launch(*arguments, **options)


def _through_kernel(
    call: _Call, problem: Problem, config: Config, gpu: Gpu, x: jax.Array, *, interpret: bool = False
) -> jax.Array:
    if config.algorithm == XLA and call.config is None and (call.transport or call.backend):
        config = model.default(call.kind, problem, gpu)  # kernels were asked for, whatever is faster
    if config.algorithm == XLA:
        return _through_xla(call, problem, x)
    if not interpret:
        return launch(call.kind, call.axes, problem, config, gpu, x, equal=call.equal, seconds=call.seconds)
    kernel = functools.partial(launch, call.kind, call.axes, problem, config, gpu, equal=False, interpret=True)
    elements = {"all_reduce": x.size, "reduce_scatter": x.size // call.devices, "all_gather": x.size * call.devices}
    own = rendezvous.interpret_together(call.axes, jax.ShapeDtypeStruct((elements[call.kind],), x.dtype), kernel, x)
    return _typed_equal(call, own) if call.equal else own


def _typed_equal(call: _Call, x: jax.Array) -> jax.Array:
    """x, which is the same on all devices, typed so: the bits of the first one's, to which all others add zeros."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    first = jnp.where(lax.axis_index(call.names) == 0, bits, 0)
    return lax.bitcast_convert_type(lax.psum(first, call.names), x.dtype)


def _through_xla(call: _Call, _: Any, x: jax.Array) -> jax.Array:
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
    axes = (("device", problem.devices),)
    if interpret:
        return launch(kind, axes, problem, config, gpu, x, equal=False, interpret=True)
    call = _Call(kind, axes, problem.reduction)
    return _sharded(call, lambda own: _through_kernel(call, problem, config, gpu, own), x)


def _xla_on_all(kind: Kind, problem: Problem, x: jax.Array) -> jax.Array:
    call = _Call(kind, (("device", problem.devices),), problem.reduction)
    return _sharded(call, lambda own: _through_xla(call, problem, own), x)


def _sharded(call: _Call, function: Any, x: jax.Array) -> jax.Array:
    devices = AbstractMesh((call.devices,), ("device",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("device")
    run = jax.shard_map(lambda own: function(own[0])[None], mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    return run(x)


def reference(kind: Kind, problem: Problem, x: jax.Array) -> jax.Array:
    """What all devices should have, [devices, elements]: in float32 in the order of the devices, rounded once."""
    n = problem.devices
    if kind == "all_gather":
        return jnp.broadcast_to(x.reshape(-1), (n, problem.size))
    total = exchange.reduced(problem.reduction, x)
    return jnp.broadcast_to(total, (n, problem.size)) if kind == "all_reduce" else total.reshape(n, -1)


_TURNS = 16  # so that what devices start apart by is lost in the time of all


def _next_turn(kind: Kind, out: jax.Array, x: jax.Array) -> tuple[jax.Array]:
    """The x of a call that must wait for `out` of the one before: `out`, where they are alike, else x with a bit of it."""
    if kind == "all_reduce":
        return (out,)
    some = min(out.shape[1], x.shape[1], 8)
    return (x.at[:, :some].set(out[:, :some]),)


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
        devices=lambda problem: problem.devices,
        turns=_TURNS,
        next_turn=of(_next_turn),
    )


SPECS: dict[str, OpSpec] = {kind: _spec(kind) for kind in problems.KINDS}

__all__ = ["SPECS", "Config", "Problem", "Workspace", "all_gather", "all_reduce", "collective_workspace", "reduce_scatter"]
