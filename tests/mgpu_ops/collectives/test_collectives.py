"""all_reduce, reduce_scatter and all_gather inside shard_map: values, gradients, which transport, and errors."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax._src import dispatch
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mgpu_ops
from mgpu_ops import CollectiveConfig, CollectiveProblem, all_gather, all_reduce, collectives, reduce_scatter, use_configs
from mgpu_ops.collectives import topology
from mgpu_ops.collectives.plan import Call, Plan, plan
from mgpu_ops.collectives.problem import kernel_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import database, job, resolution
from mgpu_ops.registry import dispatch as op
from mgpu_ops.registry.database import Entry, Evidence
from tests import thorough
from tests.jobs import run_job

P = PartitionSpec
H200 = gpu.find("h200")
CONFIG = CollectiveConfig("two_shot", 2, 2048, 2)
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
ONLY_IN_ALL = thorough.only_in_all
either_check = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
pytestmark = pytest.mark.usefixtures("no_races")


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def draw(*shape: int, dtype: Any = "float32") -> jax.Array:
    """Of all devices: the first dimension. Small integers, whose sums are exact in every dtype."""
    return jnp.asarray(np.random.default_rng(0).integers(-9, 9, shape)).astype(dtype)


OWN, SAME = P("d"), P()


def on_devices(function: Any, x: jax.Array, *, out: Any = OWN, check_vma: bool = True, mesh: Any = None) -> Any:
    """function of each device's x, on a mesh with axis "d"; results one after the other, or with out=P() the one of all."""
    mesh = mesh or mesh_of(d=len(x))
    each = (lambda x: function(x[0])) if out == P() else (lambda x: function(x[0])[None])
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=check_vma))(x)


# --- values

SHAPES = [(), (1,), (7,), (3, 5), (2, 0, 3), (16, 256)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_reduce_of_any_shape_and_dtype_is_the_sum(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.abs(draw(4, *shape)).astype(dtype)
        out = on_devices(lambda x: all_reduce(x, "d"), x, out=P())
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, np.asarray(x).astype(np.float64).sum(0).astype(dtype))


@pytest.mark.parametrize("reduction", ["add", "min", "max"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 300)], ids=str)
def test_the_kernel_gives_what_xla_gives(shape, reduction):
    x = draw(2, *shape)
    ours, xla = (on_devices(lambda x, b=b: all_reduce(x, "d", reduction, backend=b), x, out=P()) for b in ("interpret", "xla"))
    np.testing.assert_array_equal(ours, xla)


@pytest.mark.parametrize(
    ("backend", "dimension"),
    [*((None, d) for d in (0, 1, -1)), ("interpret", 1), *(pytest.param("interpret", d, marks=ONLY_IN_ALL) for d in (0, -1))],
)
def test_scatter_and_gather_along_any_dimension(dimension, backend):
    x = draw(2, 4, 6, 10)
    scattered = on_devices(lambda x: reduce_scatter(x, "d", dimension=dimension, backend=backend), x)
    np.testing.assert_array_equal(scattered, np.stack(np.split(np.asarray(x).sum(0), 2, dimension)))
    gathered = on_devices(lambda x: all_gather(x, "d", dimension=dimension, backend=backend), x)
    for out in gathered:
        np.testing.assert_array_equal(out, np.concatenate(list(np.asarray(x)), dimension))


def test_reduce_scatter_of_minima():
    x = draw(4, 8, 3)
    out = on_devices(lambda x: reduce_scatter(x, "d", "min"), x)
    np.testing.assert_array_equal(out, np.asarray(x).min(0).reshape(4, 2, 3))


def test_a_nan_reaches_everybody_and_its_neighbours_stay():
    x = draw(2, 300).at[1, 7].set(jnp.nan)
    for reduction in ("add", "max"):
        out = np.asarray(on_devices(lambda x, r=reduction: all_reduce(x, "d", r, backend="interpret"), x, out=P()))
        assert np.isnan(out[7])
        assert np.isfinite(np.delete(out, 7)).all()


@given(
    kind=st.sampled_from(collectives.problem.KINDS),
    algorithm=st.sampled_from(["one_shot", "two_shot", "ring", "push_one_shot"]),
    n=st.sampled_from([2, 4, 8]),
    size=st.integers(1, 40_000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    chunk=st.sampled_from([2048, 8192]),
)
def test_a_payload_of_any_size_is_laid_out_whole(kind, algorithm, n, size, dtype, chunk):
    """Filled up to rows and cut again, every element is back where it was."""
    size = size if kind == "all_reduce" else size * n
    problem, config = CollectiveProblem(size, n, dtype), CollectiveConfig(algorithm, 4, chunk, 2)
    if collectives.problem.check(kind, problem, config, H200) is not None:
        return
    kernel = kernel_of(kind, problem, config, (("d", n),))
    launching = collectives.kernel
    for buffer, elements in (
        ("x", size // n if kind == "all_gather" else size),
        ("out", size // n if kind == "reduce_scatter" else size),
    ):
        groups = launching._groups(kernel, buffer)
        x = np.arange(elements, dtype=np.float64)
        rows = launching._fill(x, kernel.shape(buffer), groups)
        assert rows.shape == kernel.shape(buffer)
        np.testing.assert_array_equal(launching._cut(rows, elements // groups, groups), x)
    assert (kernel.rows - 1) * kernel.columns * kernel.slices < size + kernel.slices  # less than a row too many in each slice


# --- transformations


def test_it_runs_in_scan_several_at_once_and_on_part_of_a_mesh():
    mesh = mesh_of(b=2, d=2)
    x = draw(2, 2, 5)

    def step(carry: Any, _: Any) -> Any:
        total = all_reduce(carry, "d", backend="interpret")
        other = all_reduce(carry + 1, "d", "max", backend="interpret")
        return lax.pcast(total - other, "d", to="varying"), None

    def plain(carry: Any, _: Any) -> Any:
        return lax.pcast(lax.psum(carry, "d") - lax.pmax(carry + 1, "d"), "d", to="varying"), None

    ours, wanted = (
        jax.jit(
            jax.shard_map(
                lambda x, s=s: lax.scan(s, x[0, 0], None, length=2)[0][None, None],
                mesh=mesh, in_specs=P("b", "d"), out_specs=P("b", "d"),
            )
        )(x)
        for s in (step, plain)
    )  # fmt: skip
    np.testing.assert_array_equal(ours, wanted)


def test_several_axes_count_as_one():
    mesh = mesh_of(a=2, d=2)
    x = draw(2, 2, 6)
    run = lambda f, out: jax.jit(jax.shard_map(lambda x: f(x[0, 0]), mesh=mesh, in_specs=P("a", "d"), out_specs=out))(x)  # noqa: E731
    for axes in (("a", "d"), ("d", "a")):
        for backend in (None, "interpret"):
            ours = run(lambda x, b=backend, a=axes: all_gather(x, a, backend=b)[None], P(axes))
            np.testing.assert_array_equal(ours, run(lambda x, a=axes: lax.all_gather(x, a, tiled=True)[None], P(axes)))
    np.testing.assert_array_equal(run(lambda x: all_reduce(x, ["a", "d"]), P()), np.asarray(x).sum((0, 1)))


@pytest.mark.parametrize("backend", [None, "interpret"])
def test_a_batch_is_one_call(backend):
    x = draw(2, 3, 4)
    over = functools.partial(dict, backend=backend)
    summed = on_devices(jax.vmap(lambda r: all_reduce(r, "d", **over())), x, out=P())
    np.testing.assert_array_equal(summed, np.asarray(x).sum(0))
    scattered = on_devices(jax.vmap(lambda r: reduce_scatter(r, "d", **over())), x)
    np.testing.assert_array_equal(scattered, np.stack(np.split(np.asarray(x).sum(0), 2, 1)))
    gathered = on_devices(jax.vmap(lambda r: all_gather(r, "d", **over()), out_axes=1), x)
    np.testing.assert_array_equal(gathered[0], np.concatenate(list(np.asarray(x)), 1).T)


GRADIENTS = {
    "all_reduce": (lambda x, b: all_reduce(x, "d", backend=b), lambda x: lax.psum(x, "d")),
    "reduce_scatter": (
        lambda x, b: reduce_scatter(x, "d", dimension=1, backend=b),
        lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True),
    ),
    "all_gather": (
        lambda x, b: all_gather(x, "d", dimension=1, backend=b),
        lambda x: lax.all_gather(x, "d", axis=1, tiled=True),
    ),
}


@pytest.mark.parametrize(
    ("backend", "check_vma"),
    [(None, False), (None, True), ("interpret", True), pytest.param("interpret", False, marks=ONLY_IN_ALL)],
)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_jax(name, backend, check_vma):
    ours, plain = GRADIENTS[name]
    x = draw(2, 3, 4) / 4

    def loss(f: Any, x: jax.Array) -> jax.Array:
        def each(x: jax.Array) -> jax.Array:
            y = f(x[0])
            return jnp.sum(jnp.sin(y) * (jnp.arange(y.size).reshape(y.shape) + lax.axis_index("d")))[None]

        return jax.shard_map(each, mesh=mesh_of(d=2), in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)(x).sum()

    got = jax.jit(jax.grad(functools.partial(loss, lambda x: ours(x, backend))))(x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(functools.partial(loss, plain)))(x), rtol=1e-6)


@either_check
@pytest.mark.parametrize("function", [all_reduce, reduce_scatter])
def test_equal_elements_share_the_gradient_of_a_maximum(function, check_vma):
    x = jnp.asarray([[1.0, 5.0], [3.0, 5.0], [2.0, -1.0], [0.0, 0.0]]).reshape(4, 2)
    x = jnp.tile(x, (1, 2))

    def loss(x: jax.Array) -> jax.Array:
        total = jnp.sum(on_devices(lambda x: function(x, "d", "max"), x, check_vma=check_vma))
        return total / 4 if function is all_reduce else total

    wanted = np.tile([[0, 0.5], [1, 0.5], [0, 0], [0, 0]], (1, 2))
    np.testing.assert_allclose(jax.grad(loss)(x), wanted)


def test_replicated_input_counts_once_a_device():
    """As for psum: what is equal on all n devices adds up to n times."""
    run = jax.shard_map(lambda x: all_reduce(x, "d"), mesh=mesh_of(d=4), in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(run(jnp.arange(3.0)), 4 * np.arange(3.0))
    np.testing.assert_array_equal(jax.grad(lambda x: run(x).sum())(jnp.ones(3)), 4 * np.ones(3))


def test_one_device_is_its_own_sum():
    x = draw(1, 6)
    np.testing.assert_array_equal(on_devices(lambda x: all_reduce(x, "d"), x, out=P()), x[0])
    np.testing.assert_array_equal(on_devices(lambda x: reduce_scatter(x, "d"), x)[0], x[0])
    np.testing.assert_array_equal(on_devices(lambda x: all_gather(x, "d"), x)[0], x[0])


# --- between hosts


@pytest.mark.parametrize("backend", [None, "interpret"])
@pytest.mark.parametrize(("hosts", "reduction"), [(2, "max"), (4, "add")])
def test_hosts_reduce_by_themselves_then_across(hosts, reduction, backend):
    mesh = mesh_of(host=hosts, d=2)
    x = draw(hosts, 2, 3, 5)
    over = functools.partial(all_reduce, axis_name=("host", "d"), op=reduction, across="host", backend=backend)
    out = jax.jit(jax.shard_map(lambda x: over(x[0, 0]), mesh=mesh, in_specs=P("host", "d"), out_specs=P()))(x)
    reduce = np.sum if reduction == "add" else np.max
    np.testing.assert_array_equal(out, reduce(np.asarray(x), (0, 1)))


@needs_compiler
def test_two_levels_compile_to_our_kernels_within_and_xla_across():
    mesh = AbstractMesh((2, 2), ("host", "d"), axis_types=(AxisType.Auto,) * 2)
    over = functools.partial(all_reduce, axis_name=("host", "d"), across="host", transport="peer")
    run = jax.shard_map(over, mesh=mesh, in_specs=P(), out_specs=P())
    kernels = aot.compile_for("h200", run, jax.ShapeDtypeStruct((1 << 20,), jnp.bfloat16), devices=4).kernels
    assert ["reduce_scatter" in k.name for k in kernels].count(True) == 1
    assert ["all_gather" in k.name for k in kernels].count(True) == 1
    assert not any("all_reduce" in k.name for k in kernels)


JOB = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
from jax.sharding import NamedSharding, PartitionSpec as P
from mgpu_ops import all_reduce
from mgpu_ops.collectives import topology
from mgpu_ops.core import gpu

mesh = jax.make_mesh((2, 2), ("host", "d"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
values = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3)
x = jax.make_array_from_callback((2, 2, 3), NamedSharding(mesh, P("host", "d")), lambda i: values[i])
told = {}

def over(x, **how):
    def each(x):
        told["inside"], told["between"] = topology.split(topology.axes_of("all_reduce", ("host", "d")), None)
        return all_reduce(x[0, 0], ("host", "d"), **how)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("host", "d"), out_specs=P()))(x)

told["sum"] = np.asarray(over(x).addressable_data(0)).tolist()
with gpu.target("h200"):
    told["on a gpu"] = np.asarray(over(x).addressable_data(0)).tolist()
    try:
        over(x, transport="peer")
    except ValueError as error:
        told["peer"] = str(error)
print(json.dumps(told))
"""


def test_a_job_of_several_processes_goes_through_xla_or_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    for told in run_job(JOB, [tmp_path / "a", tmp_path / "b"]):
        assert told["inside"] == [["d", 2]]
        assert told["between"] == [["host", 2]]
        assert told["sum"] == told["on a gpu"] == [18, 22, 26]
        assert "the job has several processes" in told["peer"]
        assert "MGPU_OPS_MULTICAST=1" in told["peer"]


@pytest.mark.parametrize(("wanted", "nvls", "able"), [("1", "1", True), ("1", "0", False), ("", "1", False), ("0", "1", False)])
def test_kernels_in_a_job_of_several_processes_are_asked_for(wanted, nvls, able, monkeypatch):
    monkeypatch.setattr(job, "size", lambda: 2)
    monkeypatch.setenv("MGPU_OPS_MULTICAST", wanted)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", nvls)
    found: list[str | None] = []
    on_devices(lambda x: (found.append(topology.unable((("d", 2),), "peer")), x)[1], draw(2, 4))
    assert {reason is None for reason in found} == {able}


# --- which transport


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What dispatch says of calls that go through XLA."""
    monkeypatch.setattr(op, "_said", set())
    caplog.set_level(logging.WARNING, logger="mgpu_ops")
    return lambda: [record.getMessage() for record in caplog.records]


def problems_on(device: str, function: Any, n: int = 4, names: tuple[str, ...] = ("d",)) -> list[tuple[Any, str | None]]:
    """(problem, why not through the kernel) of each collective that function would run on GPUs."""
    shape = (2,) * (len(names) - 1) + (n,)
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    uses = mgpu_ops.capture(run, gpu=device)(jax.ShapeDtypeStruct((1024,), jnp.bfloat16)).uses
    return [(use.problem, use.skipped) for use in uses]


def test_without_a_stored_config_xla_runs_and_says_once_what_to_do(said):
    ((problem, skipped),) = problems_on("h200", lambda x: all_reduce(x, "d"))
    assert problem == CollectiveProblem(1024, 4)
    assert "nothing is tuned for 4 GPUs and about 2048 bytes" in skipped
    assert "mgpu-tune run all_reduce --devices 4" in skipped
    with gpu.target("h200"):
        for _ in range(2):
            on_devices(lambda x: all_reduce(x, "d"), draw(4, 1024, dtype="bfloat16"), out=P())
    (message,) = said()
    assert message.startswith("all_reduce runs through XLA: nothing is tuned for 4 GPUs")


def test_what_is_named_or_stored_runs_through_the_kernel(monkeypatch):
    ((_, skipped),) = problems_on("h200", lambda x: all_reduce(x, "d", transport="peer"))
    assert skipped is None
    with use_configs({"all_reduce": CONFIG}):
        ((problem, skipped),) = problems_on("h200", lambda x: all_reduce(x, "d"))
        assert (problem.transport, skipped) == ("peer", None)
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("MGPU_OPS_MULTICAST", "0"), ("MGPU_OPS_MULTICAST", "off")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(
                ValueError, match=f"transport='multimem' cannot run all_reduce .*{name}={value} forbids multicast"
            ):
                problems_on("h200", lambda x: all_reduce(x, "d", transport="multimem"))


def store(folder: Path, problem: CollectiveProblem, kind: str) -> None:
    evidence = Evidence(
        kind=kind, gpu="NVIDIA H200", driver="1.2", jax="0.11.2", jaxlib="0.11.2", cuda=None, kernel_version=1, median_us=12.5,
        spread_us=0.5, default_us=15.0, baseline="xla", baseline_us=20.0, error=0.0, trials=8, seed=0, date="2026-01-31",
    )  # fmt: skip
    entry = Entry(dataclasses.asdict(problem), dataclasses.asdict(CONFIG), evidence)
    database.update(folder / "h200" / "all_reduce.json", [entry], gpu_key="h200", op="all_reduce")


def test_multimem_runs_by_itself_only_where_it_was_measured(own_database, monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)

    def chosen() -> list[tuple[str, str | None]]:
        collectives._batchable.cache_clear()  # what was traced stays as it is
        return [(problem.transport, skipped) for problem, skipped in problems_on("h200", lambda x: all_reduce(x, "d"))]

    plain = CollectiveProblem(1024, 4)
    store(own_database, dataclasses.replace(plain, transport="multimem"), "modelled")
    store(own_database, plain, "modelled")
    assert chosen() == [("peer", None)]
    store(own_database, dataclasses.replace(plain, transport="multimem"), "measured")
    assert chosen() == [("multimem", None)]
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert chosen() == [("peer", None)]


def test_multimem_takes_all_axes_of_a_mesh(monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    ((problem, _),) = problems_on("h200", lambda x: all_reduce(x, ("b", "d"), transport="multimem"), names=("b", "d"))
    assert problem.transport == "multimem"
    with pytest.raises(ValueError, match="the call names only some of its axes"):
        problems_on("h200", lambda x: all_reduce(x, "d", transport="multimem"), names=("b", "d"))
    ((problem, _),) = problems_on("h200", lambda x: all_reduce(x, "d", transport="peer"), names=("b", "d"))
    assert problem.devices == 4


def test_a_config_may_say_that_xla_is_faster_and_who_names_the_kernels_gets_them():
    xla = dataclasses.replace(CONFIG, algorithm="xla")
    with gpu.target("h200"), use_configs({"all_reduce": xla}):  # on this CPU the kernel would not compile
        out = on_devices(lambda x: all_reduce(x, "d"), draw(4, 8), out=P())
        with pytest.raises(ValueError, match="on CPU backend"):
            on_devices(lambda x: all_reduce(x, "d", transport="peer"), draw(4, 8), out=P())
    np.testing.assert_array_equal(out, np.asarray(draw(4, 8)).sum(0))


@pytest.mark.parametrize("how", [{}, {"transport": "peer"}, {"config": CONFIG}], ids=["by itself", "named", "with a config"])
def test_a_call_resolves_its_config_once(how, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    resolved: list[CollectiveProblem] = []
    resolve = resolution.resolve

    def counted(spec: Any, problem: CollectiveProblem, *given: Any) -> Any:
        resolved.append(problem)
        return resolve(spec, problem, *given)

    monkeypatch.setattr(resolution, "resolve", counted)
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(lambda x: all_reduce(x, "d", **how), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with gpu.target("h200"), use_configs({"all_reduce": CONFIG}):
        jaxpr = str(jax.make_jaxpr(run)(jnp.zeros(3001)))
    assert "mgpu_ops_all_reduce" in jaxpr
    assert resolved == [CollectiveProblem(3001, 2, "float32")]


def planned(problem: CollectiveProblem, **given: Any) -> Plan:
    """The plan of an all_reduce on H200s."""
    found: list[Plan] = []

    def each(x: jax.Array) -> jax.Array:
        call = Call("all_reduce", (("d", problem.devices),), **given)
        found.append(plan(call, mgpu_ops.spec_of("all_reduce"), problem))
        return x

    mesh = AbstractMesh((problem.devices,), ("d",), axis_types=(AxisType.Auto,))
    with gpu.target("h200"):
        jax.eval_shape(jax.shard_map(each, mesh=mesh, in_specs=P(), out_specs=P()), jax.ShapeDtypeStruct((1,), jnp.float32))
    return found[0]


@pytest.mark.parametrize(("n", "least"), [(2, 2**22), (4, 2**22)])
def test_what_is_shipped_runs_kernels_from_some_size_on_whatever_the_size(n, least):
    for size in [2**10, 2**14, 3 * 2**15, 2**18, 2**20, 2**22, 3 * 2**21, 2**23, 2**25, 5 * 2**24, 2**27, 2**28]:
        chosen = planned(CollectiveProblem(size // 2, n), no_multicast="NCCL_NVLS_ENABLE=0")
        assert (chosen.transport, chosen.reason is None) == (("peer", True) if size >= least else ("xla", False)), size


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: all_reduce(x.astype("int8"), "d"), "dtype int8 is not one of"),
        (lambda x: all_reduce(x, "d", transport="xla"), "backend='xla'"),
        (lambda x: all_reduce(x, "d", backend="xla"), "backend='xla'"),
    ],
)
def test_what_goes_through_xla_on_a_gpu(function, reason):
    ((_, skipped),) = problems_on("h200", function)
    assert reason in skipped


def test_gpus_that_cannot_reach_each_other_are_told_apart(monkeypatch):
    monkeypatch.setattr(topology, "_can_access", lambda a, b: {a, b} != {0, 2})
    assert topology.peer_access([0, 1]) is None
    assert topology.peer_access([0, 1, 2]) == "GPU 0 cannot access the memory of GPU 2: they share no NVLink domain"
    for name in ("NCCL_NVLS_ENABLE", "MGPU_OPS_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(topology, "_attribute", lambda number, attribute: int(number != 1))
    assert topology.multicast([0, 3]) is None
    assert "GPU 1 supports no multicast" in topology.multicast([0, 1])
    assert "GPU 0 cannot access" in topology.multicast([0, 2])


# --- compiled through the public functions


@needs_compiler
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("transport", ["peer", "multimem"])
def test_defaults_compile_without_spills(kind, transport, monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    spec = mgpu_ops.spec_of(kind)
    for bytes_ in (1 << 10, 1 << 16, 1 << 24):
        problem = CollectiveProblem(bytes_ // 2, 4, transport=transport)
        arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
        config = spec.default(problem, H200)
        assert spec.check(problem, config, H200) is None
        made = aot.build(H200, functools.partial(spec.run, problem, config, H200), *arrays, devices=4)
        assert made.registers > 0
        assert made.spills == 0


# --- a device that never comes


def test_debug_names_the_device_that_never_comes(monkeypatch):
    monkeypatch.setenv("MGPU_OPS_DEBUG_TIMEOUT", "0.5")

    def each(x: jax.Array) -> jax.Array:
        return lax.cond(lax.axis_index("d") == 1, lambda x: x, lambda x: all_reduce(x, "d", debug=True, backend="interpret"), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"all_reduce over d .*after 0.5 s device \d of 3 still waits for 1"):
        jax.block_until_ready(on_devices(each, draw(3, 4), check_vma=False))
    dispatch.runtime_tokens.clear()  # or JAX says it all again when it exits


def test_debug_changes_nothing_where_all_come():
    for function in (all_reduce, reduce_scatter, all_gather):
        x = draw(2, 6)
        plain, debugged = (on_devices(lambda x, f=function, d=d: f(x, "d", debug=d), x) for d in (False, True))
        np.testing.assert_array_equal(plain, debugged)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_debug_refuses_a_timeout_that_is_none(value, monkeypatch):
    monkeypatch.setenv("MGPU_OPS_DEBUG_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"MGPU_OPS_DEBUG_TIMEOUT='{value}' is no positive number of seconds"):
        on_devices(lambda x: all_reduce(x, "d", debug=True), draw(2, 4))


# --- errors: the value, the rule, the way out


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda x: all_reduce(x, "e"),
            ValueError,
            r"axis_name='e': the axes here are 'd'. Call all_reduce inside jax.shard_map",
        ),
        (lambda x: all_reduce(x, 3), ValueError, "axis_name=3: the axes here are 'd'. Call all_reduce inside"),
        (lambda x: all_reduce(x, ("d", [3])), ValueError, r"axis_name=\('d', \[3\]\): the axes here are 'd'"),
        (lambda x: all_reduce(x, ()), ValueError, r"axis_name=\(\) names no axis"),
        (lambda x: all_reduce(x, ("d", "d")), ValueError, "names an axis twice"),
        (lambda x: all_reduce(x, "d", "mul"), ValueError, "op='mul' is not one of add, min, max"),
        (lambda x: all_reduce(x, "d", transport="nvlink"), ValueError, "transport='nvlink' is not one of peer, multimem, xla"),
        (lambda x: all_reduce(x, "d", backend="cuda"), ValueError, "backend='cuda' is not one of mosaic, interpret, xla"),
        (lambda x: all_reduce(x, "d", transport="xla", backend="mosaic"), ValueError, "leave one of them out"),
        (lambda x: all_reduce(x, "d", across="host"), ValueError, r"across='host' is not among axis_name=\('d',\)"),
        (lambda x: all_reduce(x, "d", config=3), TypeError, "config is 3: pass a mgpu_ops.CollectiveConfig"),
        (lambda x: all_reduce(x, "d", backend="mosaic"), ValueError, "no NVIDIA GPU is in use"),
        (lambda x: reduce_scatter(x, "d"), ValueError, r"x\(5, 6\) has 5 in dimension 0, no multiple of the 2 devices: pad it"),
        (lambda x: reduce_scatter(x, "d", dimension=2), ValueError, r"dimension=2 is none of x\(5, 6\)"),
        (lambda x: all_gather(x, "d", dimension=0.5), TypeError, "dimension=0.5 is no integer: all_gather works along one of"),
        (lambda _: all_reduce(None, "d"), TypeError, "x is None, which is no array: all_reduce takes arrays of numbers"),
        (lambda x: all_gather(x, "d", dimension=-3), ValueError, r"dimension=-3 is none of x\(5, 6\)"),
        (
            lambda x: all_reduce(x, "d", backend="interpret", config=dataclasses.replace(CONFIG, chunk=1000)),
            ValueError,
            "chunk=1000 must be a multiple of 2048",
        ),
        (
            lambda x: all_reduce(x, "d", backend="interpret", config=dataclasses.replace(CONFIG, algorithm="tree")),
            ValueError,
            "algorithm='tree' is not one of one_shot, push_one_shot, ll_one_shot, two_shot, .*, ll_two_shot, ring, xla",
        ),
        (lambda x: all_reduce(x.astype("int8"), "d", backend="interpret"), ValueError, "dtype int8 is not one of"),
    ],
)
def test_errors_say_what_is_wrong(function, error, message):
    with pytest.raises(error, match=message):
        on_devices(function, draw(2, 5, 6), check_vma=False)


def test_outside_of_shard_map_the_error_says_where_to_call_it():
    with pytest.raises(ValueError, match=r"there is none here\. Call all_reduce inside jax.shard_map"):
        all_reduce(jnp.ones(3), "d")


def test_an_axis_of_vmap_goes_through_xla_or_is_refused_by_name():
    x = draw(3, 4)
    out = jax.vmap(lambda x: all_reduce(x, "i", transport="xla"), axis_name="i")(x)
    np.testing.assert_array_equal(out[0], np.asarray(x).sum(0))
    with gpu.target("h200"), pytest.raises(ValueError, match=r"'i' is no axis of jax\.shard_map's mesh"):
        jax.vmap(lambda x: all_reduce(x, "i", transport="peer"), axis_name="i")(x)
