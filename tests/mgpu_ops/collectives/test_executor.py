"""The kernel generated from a collective's schedule: interpreted for all devices at once, and compiled for real ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mgpu_ops.collectives import executor, schedules
from mgpu_ops.collectives.layout import CollectiveKernel
from mgpu_ops.collectives.schedules import Schedule, Signal, Wait
from mgpu_ops.core import aot, gpu
from tests.mgpu_ops.conftest import no_races
from tests.mgpu_ops.interpreter import has_a_race, wait_for_all_stores_only
from tests.thorough import only_in_all

__all__ = ["no_races"]

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
EVERY = [
    (kind, transport, a) for kind in KINDS for transport in ("peer", "multimem") for a in schedules.algorithms(kind, transport)
]
every_algorithm = pytest.mark.parametrize(("kind", "transport", "algorithm"), EVERY, ids=["-".join(x) for x in EVERY])
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


def kernel_of(kind: Any, algorithm: str, n: int, transport: Any = "peer", **changes: Any) -> CollectiveKernel:
    schedule = schedules.schedule(kind, algorithm, n, transport, entry_barrier=True)
    given = {"rows": 10, "dtype": jnp.dtype("float32"), "reduction": "add", "blocks": 2, "chunk": 4, "stages": 2, **changes}
    return CollectiveKernel(schedule, axes=(("device", n),), **given)


def draw(kernel: CollectiveKernel) -> np.ndarray:
    """x of all devices: small integers."""
    shape = (kernel.schedule.n, *kernel.shape("x"))
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


def interpreted(kernel: CollectiveKernel, x: Any) -> np.ndarray:
    run = jax.jit(functools.partial(executor.run, kernel=kernel, interpret=True))
    return np.asarray(run(jnp.asarray(x, kernel.dtype)).astype(jnp.float32))


def wanted(kind: str, x: np.ndarray) -> np.ndarray:
    if kind == "all_gather":
        return np.tile(x.reshape(1, -1, *x.shape[2:]), (len(x), 1, 1, 1))
    return np.tile(x.sum(0), (len(x), 1, 1, 1)) if kind == "all_reduce" else x.sum(0)[:, None]


# --- interpreted


@every_algorithm
@pytest.mark.parametrize("n", [pytest.param(2, marks=only_in_all), 3])
@pytest.mark.usefixtures("no_races")
def test_every_algorithm_is_right_and_free_of_races(kind, transport, algorithm, n):
    """Three chunks a slice, the last one shorter, for two blocks and two stages: all of them wrap or end early."""
    kernel = kernel_of(kind, algorithm, n, transport)
    x = draw(kernel)
    np.testing.assert_array_equal(interpreted(kernel, x), wanted(kind, x))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 3, "chunk": 8, "blocks": 1},
        {"rows": 8, "chunk": 4, "blocks": 3},
        {"rows": 22, "chunk": 4, "blocks": 1, "stages": 4},
        {"rows": 40, "chunk": 20, "blocks": 1, "stages": 3},
    ],
    ids=["one short chunk", "a block without work", "deep", "several steps a chunk"],
)
@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
@pytest.mark.usefixtures("no_races")
def test_every_cut_is_right(algorithm, changes):
    kernel = kernel_of("all_reduce", algorithm, 2, **changes)
    x = draw(kernel)
    np.testing.assert_array_equal(interpreted(kernel, x), wanted("all_reduce", x))


@pytest.mark.parametrize(("dtype", "reduction"), [("bfloat16", "add"), ("float16", "max"), ("int32", "add"), ("uint32", "min")])
@pytest.mark.usefixtures("no_races")
def test_every_dtype_is_reduced_in_the_order_of_devices_and_rounded_once(dtype, reduction):
    kernel = kernel_of("all_reduce", "one_shot", 3, dtype=jnp.dtype(dtype), reduction=reduction, rows=4)
    values = np.random.default_rng(1).normal(scale=1000, size=(3, *kernel.shape("x")))
    x = np.asarray(jnp.asarray(np.abs(values) if dtype == "uint32" else values).astype(dtype))
    wide = np.float32 if dtype.startswith(("b", "f")) else x.dtype
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[reduction]
    total = reduce(reduce(x[0].astype(wide), x[1].astype(wide)), x[2].astype(wide)).astype(x.dtype)
    out = interpreted(kernel, x)
    for device in range(3):
        np.testing.assert_array_equal(out[device], total.astype(np.float32))


def without(schedule: Schedule, kind: type, number: int) -> Schedule:
    """The schedule less its number-th Signal or Wait."""
    index = [i for i, step in enumerate(schedule.steps) if isinstance(step, kind)][number]
    return dataclasses.replace(schedule, steps=(*schedule.steps[:index], *schedule.steps[index + 1 :]))


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("all_reduce", "push_one_shot"), ("all_reduce", "ring"), ("reduce_scatter", "push_one_shot")]
)
def test_a_dropped_handshake_is_seen_as_a_race(kind, algorithm):
    """So that "no races" above means something."""
    kernel = kernel_of(kind, algorithm, 2)
    schedule = without(without(kernel.schedule, Wait, 0), Signal, 0)
    assert has_a_race(lambda: interpreted(dataclasses.replace(kernel, schedule=schedule), draw(kernel)))


@pytest.mark.parametrize("algorithm", ["two_shot", "push_one_shot"])
def test_a_store_that_is_not_waited_for_is_seen_as_a_race(algorithm, monkeypatch):
    wait_for_all_stores_only(monkeypatch)
    kernel = kernel_of("all_reduce", algorithm, 2, rows=24, blocks=1)
    assert has_a_race(lambda: interpreted(kernel, draw(kernel)))


# --- compiled


def compiled(kernel: CollectiveKernel) -> aot.Report:
    names = tuple(name for name, _ in kernel.axes)
    mesh = AbstractMesh(tuple(size for _, size in kernel.axes), names, axis_types=(AxisType.Auto,) * len(names))
    run = jax.shard_map(
        functools.partial(executor.run, kernel=kernel),
        mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    return aot.compile_for("h200", run, jax.ShapeDtypeStruct(kernel.shape("x"), kernel.dtype), devices=kernel.schedule.n)


MULTIMEM = [(kind, a) for kind, transport, a in EVERY if transport == "multimem"]
TYPES = [("float16", "min"), ("int32", "max")]
CASES = [
    (8, "bfloat16", "add"),
    (2, "float32", "add"),
    *(pytest.param(2, *dtype_and_reduction, marks=only_in_all) for dtype_and_reduction in TYPES),
    *(pytest.param(n, "bfloat16", "add", marks=only_in_all) for n in (2, 4)),
]


@needs_compiler
@pytest.mark.parametrize(("n", "dtype", "reduction"), CASES)
@pytest.mark.parametrize(("kind", "algorithm"), MULTIMEM)
def test_every_multimem_kernel_compiles_to_multimem_instructions_without_spills(kind, algorithm, n, dtype, reduction):
    kernel = kernel_of(kind, algorithm, n, "multimem", dtype=jnp.dtype(dtype), reduction=reduction, rows=256, chunk=32)
    report = compiled(kernel)
    assert report.spills == 0
    assert "multimem.red.release.sys.global.add.u32" in report.ptx  # the signals
    if kind != "all_gather":
        assert "multimem.ld_reduce" in report.ptx
        assert "LDGMC" in report.sass
    if kind == "all_gather" or algorithm == "two_shot":
        assert "multimem.st" in report.ptx


@needs_compiler
def test_multimem_adds_16_bit_floats_in_float32():
    for dtype, packed in (("bfloat16", "bf16x2"), ("float16", "f16x2")):
        for rows, vector in ((256, ".v4"), (3, "")):
            report = compiled(kernel_of("all_reduce", "two_shot", 2, "multimem", dtype=jnp.dtype(dtype), rows=rows))
            assert f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32{vector}.{packed}" in report.ptx
            assert report.ptx.count("multimem.ld_reduce") == report.ptx.count("acc::f32")


# Eight peers need the most registers and memory. Shipped configs of two and four compile in tests/mgpu_ops/test_shipped.py.
FEWER = [pytest.param(2, marks=only_in_all), pytest.param(4, marks=only_in_all)]
PEER = [(kind, a) for kind, transport, a in EVERY if transport == "peer"]


@needs_compiler
@pytest.mark.parametrize("n", [8, *FEWER])
@pytest.mark.parametrize(("kind", "algorithm"), PEER)
def test_every_peer_kernel_compiles_without_spills_into_the_bytes_it_counts(kind, algorithm, n):
    kernel = kernel_of(kind, algorithm, n, dtype=jnp.dtype("bfloat16"), rows=96 if n == 8 else 100, chunk=16)
    report = compiled(kernel)
    assert report.spills == 0
    assert kernel.smem_bytes <= report.smem_bytes <= kernel.smem_bytes + 1024  # barriers
    ll = "LDG.E.128.STRONG.SYS" in report.sass and "STG.E.128.STRONG.SYS" in report.sass
    assert ll if kernel.schedule.ll else "UBLKCP" in report.sass
    assert "multimem" not in report.ptx


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rows", "reduction"),
    [("bfloat16", 7, "add"), ("float16", 64, "min"), ("float32", 7, "add"), ("int32", 1, "add"), ("uint32", 64, "max")],
)
def test_ll_compiles_without_spills_for_every_dtype_and_length(dtype, rows, reduction):
    report = compiled(kernel_of("all_reduce", "ll_one_shot", 4, dtype=jnp.dtype(dtype), rows=rows, reduction=reduction))
    assert report.spills == 0
    assert "MEMBAR" not in report.sass  # no fence, no flag beside the data


@needs_compiler
def test_a_mesh_without_devices_names_its_replicas():
    """jax 0.11 leaves them out, and such a kernel fails when it runs."""
    kernel = kernel_of("all_reduce", "two_shot", 4)
    mesh = AbstractMesh((4,), ("device",), axis_types=(AxisType.Auto,))
    run = functools.partial(executor.run, kernel=kernel)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with aot.target(gpu.find("h200")):
        lowered = jax.jit(sharded).trace(jnp.zeros(kernel.shape("x"))).lower(lowering_platforms=("cuda",))
    assert 'xla_replica_ids = "0,1,2,3"' in lowered.as_text()


@needs_compiler
def test_peers_on_two_axes_of_a_mesh_compile():
    kernel = dataclasses.replace(kernel_of("all_reduce", "two_shot", 4), axes=(("a", 2), ("b", 2)))
    assert compiled(kernel).spills == 0
