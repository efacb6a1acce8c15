"""Collectives in a workspace: one kernel a call where they fit, the usual way elsewhere, and errors that say how to use it.

That two halves are enough without a barrier is shown in test_simulator.py; test_collectives_gpu.py runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dispatch
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops
from mgpu_ops import CollectiveConfig, CollectiveProblem, all_gather, all_reduce, collective_workspace, reduce_scatter
from mgpu_ops.collectives import Workspace, executor, layout, rendezvous, workspace
from mgpu_ops.core import aot, gpu

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def on(mesh: Mesh, function: Any, memory: Workspace, *, check_vma: bool = False) -> Any:
    """function(x, workspace) of each device's row of x, [devices, ...]."""
    every = P(mesh.axis_names)
    each = lambda x, memory: function(x[0], memory.open())[None]  # noqa: E731
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(every, every), out_specs=every, check_vma=check_vma))
    return lambda x: run(x, memory)


def test_where_there_is_no_gpu_the_same_program_runs_without_it():
    mesh = mesh_of(d=4)
    memory = collective_workspace(mesh, "d")
    x = np.arange(32.0).reshape(4, 8)
    for function, wanted in (
        (lambda x, memory: all_reduce(x, "d", workspace=memory), np.broadcast_to(x.sum(0), (4, 8))),
        (lambda x, memory: reduce_scatter(x, "d", workspace=memory), x.sum(0).reshape(4, 2)),
        (lambda x, memory: all_gather(x, "d", workspace=memory), np.broadcast_to(x.reshape(-1), (4, 32))),
    ):
        np.testing.assert_array_equal(on(mesh, function, memory)(x), wanted)


def test_it_is_memory_of_every_device_for_groups_along_its_axis():
    mesh = mesh_of(data=2, model=4)
    memory = collective_workspace(mesh, "model")
    assert (memory.axis_name, memory.devices, memory.payload_bytes) == (("model",), 4, 2**20)
    assert memory.where.shape == (8, 1 + 2 * 4)  # an index and addresses
    assert collective_workspace(mesh, ("data", "model"), 1000).where.shape == (8, 1 + 2 * 8)


def test_a_collective_that_is_too_large_is_told_from_one_that_fits():
    memory = collective_workspace(mesh_of(d=2), "d", 4096)
    fits = lambda kind, size, dtype="bfloat16": workspace.config_for(kind, CollectiveProblem(size, 2, dtype), memory)  # noqa: E731
    assert fits("all_reduce", 2048) is not None
    assert fits("all_reduce", 2049) is None
    assert fits("all_reduce", 1025, "float32") is None
    for kind in ("reduce_scatter", "all_gather"):  # a slice of each device passes
        assert fits(kind, 4096) is not None
        assert fits(kind, 4098) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_whatever_fits_has_a_config_that_can_run(kind, n):
    memory = Workspace(None, ("d",), n, 2**20, (("d", n),))
    for size in (n, 8 * n, 1000 * n, 2**18):
        problem = CollectiveProblem(size, n)
        config = workspace.config_for(kind, problem, memory)
        assert mgpu_ops.spec_of(kind).check(problem, config, gpu.find("h200")) is None


def test_it_has_no_gradient_and_says_so():
    mesh = mesh_of(d=4)
    memory = collective_workspace(mesh, "d")
    with gpu.target("h200"), pytest.raises(ValueError, match="a collective in a workspace has no gradient: leave workspace="):
        jax.grad(lambda x: on(mesh, lambda x, m: all_reduce(x, "d", workspace=m), memory)(x).sum())(jnp.ones((4, 8)))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda x, m: all_reduce(x, "model", workspace=m.where),
            TypeError,
            "workspace is a .*: pass what mgpu_ops.collective_wor",
        ),
        (
            lambda x, m: all_reduce(x, "data", workspace=m),
            ValueError,
            r"is for axis_name=\('model',\), and all_reduce runs over",
        ),
        (lambda x, m: all_gather(x, ("data", "model"), workspace=m), ValueError, "each needs its own"),
        (lambda x, m: all_reduce(x, "model", workspace=closed(m)), ValueError, r"is closed: pass workspace.open\(\)"),
        (lambda x, m: all_reduce(x, "model", transport="xla", workspace=m), ValueError, "no config: leave xla out"),
        (
            lambda x, m: all_reduce(x, "model", config=CollectiveConfig("one_shot", 1, 2048, 2), workspace=m),
            ValueError,
            "no config: leave .*one_shot",
        ),
    ],
)
def test_errors_say_what_is_wrong(function, error, message):
    mesh = mesh_of(data=2, model=2)
    with pytest.raises(error, match=message):
        on(mesh, function, collective_workspace(mesh, "model"))(jnp.ones((4, 8)))


def test_where_jax_checks_types_of_devices_it_says_what_to_pass():
    mesh = mesh_of(d=2)
    with pytest.raises(ValueError, match="check_vma=False"):
        on(mesh, lambda x, m: all_reduce(x, "d", workspace=m), collective_workspace(mesh, "d"), check_vma=True)(
            jnp.ones((2, 8))
        )


def test_a_mesh_of_another_shape_is_refused_for_its_groups_are_others():
    memory = collective_workspace(mesh_of(data=2, model=2), "model")
    with pytest.raises(ValueError, match=r"of a mesh {'data': 2, 'model': 2}, and all_reduce runs on {'data': 1, 'model': 4}"):
        on(mesh_of(data=1, model=4), lambda x, m: all_reduce(x, "model", workspace=m), memory)(jnp.ones((4, 8)))


def test_each_device_has_the_addresses_of_those_after_it_along_the_axis():
    mesh = mesh_of(data=2, model=4)
    memory = jax.device_put(np.zeros((8, 2)), NamedSharding(mesh, P(("data", "model"))))
    at = {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)

    def told(names: tuple[str, ...], device: int) -> tuple[int, list[int]]:
        row = workspace._addresses(mesh, names, memory)[ids.reshape(-1).tolist().index(device)]
        return row[0], np.ascontiguousarray(row[1:]).view(np.uint64).tolist()

    for group in ids:
        for i, device in enumerate(group):
            assert told(("model",), device) == (i, [at[peer] for peer in (*group[i:], *group[:i])])
    order = ids.T.reshape(-1)  # of ("model", "data"), the last the fastest
    assert told(("model", "data"), order[3]) == (3, [at[peer] for peer in (*order[3:], *order[:3])])


@pytest.mark.parametrize(
    ("settings", "processes", "reason"),
    [
        ({}, 1, None),
        ({"USE_TFRT_GPU_CLIENT": "0", "ALLOCATOR": "platform"}, 1, None),
        ({"USE_TFRT_GPU_CLIENT": "1"}, 1, "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"),
        ({"ALLOCATOR": "cuda_async"}, 1, "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async"),
        ({}, 2, "several processes"),
    ],
)
def test_where_addresses_or_the_order_of_programs_are_not_sure_it_is_not_used(monkeypatch, settings, processes, reason):
    for name, value in settings.items():
        monkeypatch.setenv(f"XLA_PYTHON_CLIENT_{name}", value)
    monkeypatch.setattr(workspace.job, "size", lambda: processes)
    found = workspace.unusable()
    assert found is None if reason is None else reason in str(found)


def test_a_mesh_without_devices_is_refused():
    with pytest.raises(TypeError, match=r"mesh is of type AbstractMesh: pass a jax.sharding.Mesh"):
        collective_workspace(AbstractMesh((2,), ("d",)), "d")


@pytest.mark.parametrize(
    ("axis", "size", "message"),
    [("e", None, "axis_name='e' is not of the mesh, whose axes are 'd'"), ((), None, "not of the mesh"),
     ("d", 0, "must be 1 to"), ("d", 2**20 + 1, "payload_bytes=1048577 must be 1 to 1048576: larger")],
)  # fmt: skip
def test_a_workspace_that_cannot_be_is_refused(axis, size, message):
    with pytest.raises(ValueError, match=message):
        collective_workspace(mesh_of(d=2), axis, size)


def closed(memory: Workspace) -> Workspace:
    return dataclasses.replace(memory, where=memory.where[...])


def sharded(n: int, function: Any) -> tuple[Any, Any]:
    """function(x, workspace) on n GPUs, of a whole x and memory, and what memory is."""
    mesh = AbstractMesh((n,), ("d",), axis_types=(AxisType.Auto,))
    own = P("d")

    def run(x: jax.Array, where: jax.Array) -> Any:
        made = Workspace(where, ("d",), n, 2**20, (("d", n),))
        each = lambda x, memory: function(x, memory.open())  # noqa: E731
        return jax.shard_map(each, mesh=mesh, in_specs=(own, own), out_specs=own, check_vma=False)(x, made)

    return run, jax.ShapeDtypeStruct((n, layout.where_words(n)), jnp.int32, sharding=NamedSharding(mesh, own))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 8])
def test_a_call_is_one_kernel_without_a_fence(kind, n):
    call = functools.partial(getattr(mgpu_ops, kind), axis_name="d")
    run, memory = sharded(n, lambda x, m: call(x, workspace=m))
    x = jax.ShapeDtypeStruct((n * 4096,), jnp.bfloat16, sharding=NamedSharding(memory.sharding.mesh, P("d")))
    report = aot.compile_for("h200", run, x, memory, devices=n)
    assert len(report.kernels) == 1
    assert report.spills == 0
    assert "MEMBAR" not in report.sass


def run_calls(first: int, calls: int, seed: int) -> int:
    """Two devices that send each other a number in some words of their memory, call after call, in any order of their steps.

    As `mgpu_ops/collectives/executor.py` does: to the half of the call, with its flag. Returns the count after
    them.
    """
    rng = random.Random(seed)
    memory = np.zeros((2, 2, 3, 2), np.int64)  # device, half, word, (data, flag)

    def device(own: int) -> Iterator[None]:
        count = jnp.int32(first)
        for call in range(calls):
            half, flag, after = (int(x) for x in executor.half_and_flag(count))
            assert half in (0, 1)
            used = range(1 + (call * 7) % 3)  # some words are not written in every call
            for word in used:
                memory[1 - own, half, word] = 100 * call + word, flag
                yield
            for word in used:
                while memory[own, half, word, 1] != flag:
                    yield
                assert memory[own, half, word, 0] == 100 * call + word
            count = jnp.int32(after)
        left.append(int(count))

    left: list[int] = []
    devices = [device(0), device(1)]
    while devices:
        one = rng.choice(devices)
        if next(one, "done") == "done":
            devices.remove(one)
    assert left[0] == left[1]
    return left[0]


@pytest.mark.parametrize(("first", "last"), [(0, 8), (2**31 - 3, -(2**31) + 5), (-4, 6)])
def test_calls_are_counted_beyond_what_an_int32_holds(first, last):
    """Where the sign changes, and where all bits are ones, each flag is new, no flag is 0, and halves alternate."""
    for seed in range(20):
        assert run_calls(first, 8, seed) == last
    assert all(int(executor.half_and_flag(jnp.int32(calls))[1]) != 0 for calls in range(-6, 6) if calls != -1)  # which none is


def test_new_memory_is_zeros_and_the_count_of_calls_in_their_last_row(monkeypatch):
    assert not workspace._new_ll_memory((2, 3, 256), 0).any()
    memory = workspace._new_ll_memory((2, 3, 256), 2**31 - 3)
    assert not memory[:, :-1].any()
    assert (memory[:, -1] == 2**31 - 3).all()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_debug_gives_kernels_that_wait_for_data_a_deadline(kind, monkeypatch):
    """Which read a clock then. Nothing can call the host from a machine without a GPU."""
    monkeypatch.setattr(rendezvous, "wait_for_all", lambda op, axes, x: x)
    monkeypatch.setattr(rendezvous, "raise_if_late", lambda op, axes, out, late, limit: out + late[0].astype(out.dtype))
    for debug in (False, True):
        call = functools.partial(getattr(mgpu_ops, kind), axis_name="d", debug=debug)
        run, memory = sharded(8, lambda x, m, call=call: call(x, workspace=m))
        x = jax.ShapeDtypeStruct((8 * 4096,), jnp.bfloat16, sharding=NamedSharding(memory.sharding.mesh, P("d")))
        report = aot.compile_for("h200", run, x, memory, devices=8)
        assert report.spills == 0
        assert ("%globaltimer" in report.ptx) == debug


def test_data_that_do_not_come_are_an_error_that_names_who_sends_them():
    mesh = mesh_of(d=3)

    def each(late: jax.Array) -> jax.Array:
        return rendezvous.raise_if_late("all_gather", (("d", 3),), jnp.ones((1,)), late[0], 0.5)

    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    np.testing.assert_array_equal(run(np.zeros((3, 4), np.int32)), np.ones(3))
    late = np.array([[0, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], np.int32)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"all_gather over d .*after 0.5 s device 1 of 3 still waits for 0, 2\."
    ):
        jax.block_until_ready(run(late))
    dispatch.runtime_tokens.clear()  # or JAX says it all again when it exits


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "each"), [("all_reduce", 1024), ("all_reduce", 2**17), ("reduce_scatter", 512), ("all_gather", 64)]
)
def test_a_batch_is_one_call_which_goes_the_usual_way_where_it_is_too_large(kind, each):
    """Batched by Pallas, a kernel's blocks would be as many times as many, and count each other's calls."""
    call = functools.partial(getattr(mgpu_ops, kind), axis_name="d")
    run, memory = sharded(2, lambda x, m: jax.vmap(lambda x: call(x, workspace=m))(x.reshape(4, -1)).reshape(-1))
    x = jax.ShapeDtypeStruct((2 * 4 * each,), jnp.float32, sharding=memory.sharding)
    with gpu.target("h200"):
        jaxpr = str(jax.make_jaxpr(run)(x, memory))
    assert re.findall(r"grid=\((.*?)\), grid_names", jaxpr) == (["64,"] if each < 2**17 else [])


@needs_compiler
def test_in_chains_and_scans_a_call_is_a_plain_kernel_of_which_xla_knows_no_peers():
    """So that it looks up no addresses, puts no barrier in front, and takes it into its CUDA graphs."""

    def program(x: jax.Array, memory: Workspace) -> jax.Array:
        for _ in range(3):
            x = all_reduce(x, "d", workspace=memory) / 2
        return lax.scan(lambda x, _: (all_reduce(x, "d", workspace=memory) / 2, None), x, length=5)[0]

    run, where = sharded(2, program)
    devices = np.array(aot._topology(gpu.find("h200"), 2).devices)
    on_them = NamedSharding(Mesh(devices, ("d",), axis_types=(AxisType.Auto,)), P("d"))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_them)  # noqa: E731
    x = place(jax.ShapeDtypeStruct((8192,), jnp.float32))
    with aot.target(gpu.find("h200")), jax.default_device(devices[0]):
        text = jax.jit(run).lower(x, place(where)).compile().as_text()
    assert len(re.findall(r"custom_call_target=.mosaic_gpu_v2", text)) == 4
    assert "uses_xla_collective_metadata = true" not in text
    assert "all-reduce" not in text
