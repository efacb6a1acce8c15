"""Collectives between real GPUs, through the peer transport: right, the same bits everywhere and always, many in a row.

A collective that hangs takes its process with it: run this file with a time limit. multimem is not run: see
docs/kernels/all_reduce.md.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dispatch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import CollectiveConfig, CollectiveProblem, all_gather, all_reduce, collective_workspace, reduce_scatter
from mgpu_ops.collectives import schedules
from mgpu_ops.collectives import workspace as workspaces
from mgpu_ops.collectives.layout import reduced
from mgpu_ops.collectives.problem import MAX_LL_BYTES
from mgpu_ops.core import gpu

P = PartitionSpec
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = [(kind, algorithm) for kind in KINDS for algorithm in schedules.algorithms(kind)]
SIZES = [1, 7, 256, 1000, 4096, 65_536, 100_003, 1 << 20]
on_gpus = pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4, 8)])


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:n]), ("d",), (AxisType.Auto,))


def spread(x: Any, n: int) -> jax.Array:
    """Row d on the d-th GPU."""
    return jax.device_put(x, NamedSharding(mesh_of(n), P("d")))


def on_devices(function: Any, n: int) -> Any:
    """function of each device's x, [n, ...] -> [n, ...]."""
    each = lambda x: function(x[0])[None]  # noqa: E731
    return jax.jit(jax.shard_map(each, mesh=mesh_of(n), in_specs=P("d"), out_specs=P("d"), check_vma=False))


def call(kind: str, config: CollectiveConfig | None = None, reduction: str = "add") -> Any:
    if kind == "all_gather":
        return lambda x: all_gather(x, "d", transport="peer", config=config)
    function = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter}[kind]
    return lambda x: function(x, "d", reduction, transport="peer", config=config)


def wanted(kind: str, x: np.ndarray, reduction: str = "add") -> np.ndarray:
    n = len(x)
    if kind == "all_gather":
        return np.broadcast_to(x.reshape(-1), (n, x.size))
    total = {"add": np.sum, "min": np.min, "max": np.max}[reduction](x, 0)
    return np.broadcast_to(total, (n, total.size)) if kind == "all_reduce" else total.reshape(n, -1)


def draw(n: int, size: int, dtype: Any = "int32") -> np.ndarray:
    return np.random.default_rng(size).integers(-1000, 1000, (n, size)).astype(dtype)


@on_gpus
@pytest.mark.parametrize(("kind", "algorithm"), ALGORITHMS)
def test_every_algorithm_is_exact_for_integers_of_every_size(kind, algorithm, n):
    for size in SIZES:
        size = size * n if kind == "reduce_scatter" else size
        problem = CollectiveProblem(size * (n if kind == "all_gather" else 1), n, "int32")
        for blocks, chunk, stages in ((1, 2048, 2), (16, 8192, 3)):
            ll = algorithm.startswith("ll")
            if ll and problem.size * 4 > MAX_LL_BYTES:
                continue
            config = CollectiveConfig(algorithm, blocks, chunk, 2 if ll else stages)
            assert mgpu_ops.spec_of(kind).check(problem, config, gpu.find("h200")) is None
            x = draw(n, size)
            out = on_devices(call(kind, config), n)(spread(x, n))
            np.testing.assert_array_equal(np.asarray(out), wanted(kind, x))


@on_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("algorithm", schedules.algorithms("all_reduce"))
def test_floats_are_within_bounds_the_same_on_all_devices_and_in_every_run(algorithm, dtype, n):
    config = CollectiveConfig(algorithm, 16, 8192, 2)
    x = np.asarray(jax.random.normal(jax.random.key(0), (n, 250_000), dtype))
    truth = x.astype(np.float64).sum(0)
    run = on_devices(call("all_reduce", config), n)
    first = np.asarray(run(spread(x, n)))
    roundings = n - 1 if algorithm == "ring" else 1
    bound = roundings * float(jnp.finfo(dtype).eps) / 2 * (np.abs(truth) + np.abs(x.astype(np.float64)).sum(0)) + 1e-6
    assert (np.abs(first[0].astype(np.float64) - truth) <= bound).all()
    for device in first[1:]:
        np.testing.assert_array_equal(device.view(np.uint8), first[0].view(np.uint8))
    for _ in range(10):
        np.testing.assert_array_equal(np.asarray(run(spread(x, n))).view(np.uint8), first.view(np.uint8))


@on_gpus
def test_a_thousand_of_mixed_sizes_and_kinds_in_a_row(n):
    """In chains of twenty in one jit, each waiting for the one before, several in flight between chains."""
    rng = random.Random(n)

    def chain(kinds: list[tuple[str, CollectiveConfig]], x: jax.Array) -> jax.Array:
        for kind, config in kinds:
            if kind == "all_reduce":
                x = call("all_reduce", config)(x) % 1009
            else:
                part = call("reduce_scatter", config)(x) % 1009
                x = call("all_gather")(part)
        return x

    def plain(kinds: list[tuple[str, CollectiveConfig]], x: np.ndarray) -> np.ndarray:
        for _ in kinds:
            x = np.broadcast_to(x.sum(0) % 1009, x.shape)
        return x

    for _ in range(10):
        size = n * rng.choice([64, 1000, 4096, 50_000, 262_144])
        few = []
        for _ in range(4):
            kind = rng.choice(["all_reduce", "reduce_scatter"])
            algorithm = rng.choice(
                [a for a in schedules.algorithms(kind) if size * 4 <= MAX_LL_BYTES or not a.startswith("ll")]
            )
            stages = 2 if algorithm.startswith("ll") else rng.choice([2, 3])
            few.append((kind, CollectiveConfig(algorithm, rng.choice([1, 8, 32]), rng.choice([2048, 8192]), stages)))
        kinds = rng.choices(few, k=20)
        run = on_devices(functools.partial(chain, kinds), n)
        x = draw(n, size)
        outs = [run(spread(x, n)) for _ in range(5)]
        for out in outs:
            np.testing.assert_array_equal(np.asarray(out), plain(kinds, x))


@on_gpus
def test_several_at_once_in_scan_with_gradients(n):
    x = jax.random.normal(jax.random.key(1), (n, 5000), jnp.float32)

    def loss(reduce: Any, x: jax.Array) -> jax.Array:
        def each(x: jax.Array) -> jax.Array:
            def step(carry: jax.Array, _: Any) -> Any:
                a, b = reduce(carry, "add"), reduce(carry * 2, "max")
                return jnp.sin(a) + jnp.cos(b), None

            return lax.scan(step, x[0], None, length=3)[0][None]

        return (jax.shard_map(each, mesh=mesh_of(n), in_specs=P("d"), out_specs=P("d"), check_vma=False)(x) ** 2).sum()

    ours, xla = (
        jax.jit(jax.value_and_grad(functools.partial(loss, lambda x, r, t=t: all_reduce(x, "d", r, transport=t))))(spread(x, n))
        for t in ("peer", "xla")
    )
    np.testing.assert_allclose(ours[0], xla[0], rtol=1e-4)
    np.testing.assert_allclose(ours[1], xla[1], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu(4)
def test_part_of_a_mesh_reduces_by_itself():
    mesh = Mesh(np.array(jax.local_devices()[:4]).reshape(2, 2), ("a", "b"), (AxisType.Auto,) * 2)
    x = draw(4, 5000).reshape(2, 2, 5000)
    for axis, over in (("a", 0), ("b", 1)):
        run = jax.shard_map(
            lambda x, axis=axis: all_reduce(x[0, 0], axis, transport="peer")[None, None],
            mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False,
        )  # fmt: skip
        out = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, P("a", "b"))))
        np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(x.sum(over, keepdims=True), x.shape))


@on_gpus
def test_in_a_workspace_a_thousand_of_mixed_sizes_and_kinds_are_exact(n):
    """Unrolled and in scan, in programs that are queued; what does not fit goes the usual way."""
    mesh = mesh_of(n)
    workspace = collective_workspace(mesh, "d")
    rng = random.Random(n)

    def exchange(x: jax.Array, size: int, kinds: list[str], workspace: Any) -> jax.Array:
        for kind in kinds:
            part = x[:size]
            if kind == "all_reduce":
                part = all_reduce(part, "d", workspace=workspace) % 1009
            else:
                part = all_gather(reduce_scatter(part, "d", workspace=workspace) % 1009, "d", workspace=workspace)
            x = jnp.concatenate([part, x[size:]])  # jax 0.11's compiler crashes where .at[:].set takes a gathered array
        return x

    for _ in range(4):
        sizes = [n * rng.choice([1, 3, 64, 1000, 4096, 60_000, 200_000]) for _ in range(4)]
        kinds = [rng.choice(["all_reduce", "reduce_scatter"]) for _ in range(5)]

        def program(x: jax.Array, workspace: Any, sizes: Any = sizes, kinds: Any = kinds) -> jax.Array:
            for size in sizes:
                x = exchange(x, size, kinds, workspace)
            return lax.scan(lambda x, _: (exchange(x, sizes[0], kinds, workspace), None), x, length=4)[0]

        each = lambda x, workspace: program(x[0], workspace.open())[None]  # noqa: E731
        run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False))
        x = draw(n, max(sizes))
        wanted = np.array(x, np.int64)
        for size in [*sizes, *[sizes[0]] * 4]:
            for _ in kinds:
                wanted[:, :size] = wanted[:, :size].sum(0) % 1009
        outs = [run(spread(x, n), workspace) for _ in range(8)]
        for out in outs:
            np.testing.assert_array_equal(np.asarray(out), wanted)


@on_gpus
def test_in_a_workspace_programs_whose_kernels_are_loaded_while_others_wait_do_not_hang(n):
    """A load waits until its GPU is idle, which it is not while a kernel of the program before waits for the other GPUs."""
    mesh = mesh_of(n)
    workspace = collective_workspace(mesh, "d", 2**16)
    each = lambda x, workspace: all_reduce(x[0], "d", workspace=workspace.open())[None]  # noqa: E731
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False))
    rows = [draw(n, 128 * (i + 1)) for i in range(40)]  # a kernel each
    programs = [(run.lower(x, workspace).compile(), x) for x in (spread(x, n) for x in rows)]
    outs = [program(x, workspace) for program, x in programs]
    for out, x in zip(outs, rows, strict=True):
        np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(x.sum(0), x.shape))


@on_gpus
@pytest.mark.parametrize("kilobytes", [1, 96, 1024])
def test_in_a_workspace_floats_are_the_sum_in_the_order_of_the_devices_in_every_run(n, kilobytes):
    mesh = mesh_of(n)
    workspace = collective_workspace(mesh, "d")
    each = lambda x, workspace: all_reduce(x[0], "d", workspace=workspace.open())[None]  # noqa: E731
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False))
    x = np.random.default_rng(n).normal(size=(n, 512 * kilobytes)).astype(jnp.bfloat16)
    wanted = np.asarray(reduced("add", jnp.asarray(x)))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(spread(x, n), workspace)), np.broadcast_to(wanted, x.shape))


@on_gpus
@pytest.mark.parametrize("size", [512, 200_000])  # which fits, and which goes the usual way
def test_in_a_workspace_a_batch_is_right(n, size):
    mesh = mesh_of(n)
    workspace = collective_workspace(mesh, "d")

    def each(x: jax.Array, workspace: Any) -> jax.Array:
        opened = workspace.open()
        total = jax.vmap(lambda x: all_reduce(x, "d", workspace=opened))(x[0]) % 1009
        part = jax.vmap(lambda x: reduce_scatter(x, "d", workspace=opened))(total) % 1009
        return jax.vmap(lambda x: all_gather(x, "d", workspace=opened))(part)[None]

    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False))
    x = draw(n, 3 * size).reshape(n, 3, size)
    expected = (n * (x.astype(np.int64).sum(0) % 1009)) % 1009
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(spread(x, n), workspace)), np.broadcast_to(expected, x.shape))


def reduce_in(workspace: Any, n: int, **options: Any) -> Any:
    each = lambda x, workspace: all_reduce(x[0], "d", workspace=workspace.open(), **options)[None]  # noqa: E731
    return jax.jit(jax.shard_map(each, mesh=mesh_of(n), in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False))


@on_gpus
@pytest.mark.parametrize("calls", [2**31 - 3, -4], ids=["the sign changes", "all bits are ones"])
def test_in_a_workspace_the_count_of_calls_may_wrap(n, calls, monkeypatch):
    monkeypatch.setattr(workspaces, "_CALLS", calls)
    workspace = collective_workspace(mesh_of(n), "d", 2**16)
    run = reduce_in(workspace, n)
    for call in range(8):
        x = draw(n, 64 * (call + 1)) + call
        np.testing.assert_array_equal(np.asarray(run(spread(x, n), workspace)), np.broadcast_to(x.sum(0), x.shape))


@on_gpus
def test_debug_ends_a_wait_for_data_that_do_not_come(n, monkeypatch):
    """Device 1 counts other calls than all others, as after a program that failed on it."""
    monkeypatch.setenv("MGPU_OPS_DEBUG_TIMEOUT", "2")
    monkeypatch.setattr(workspaces, "_CALLS", np.array([[2 * (device == 1)] for device in range(n)], np.int32))
    workspace = collective_workspace(mesh_of(n), "d", 2**16)
    x = draw(n, 256)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"all_reduce over d .*after 2 s device \d of \d still waits for \d"):
        jax.block_until_ready(reduce_in(workspace, n, debug=True)(spread(x, n), workspace))
    dispatch.runtime_tokens.clear()  # or JAX says it all again when it exits
    monkeypatch.setattr(workspaces, "_CALLS", 0)
    workspace = collective_workspace(mesh_of(n), "d", 2**16)
    out = reduce_in(workspace, n, debug=True)(spread(x, n), workspace)
    np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(x.sum(0), x.shape))
