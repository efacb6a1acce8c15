"""Calls of ops in a program that XLA partitions: which copies between devices it has, and what it computes."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops
from mgpu_ops.core import aot, lowered_kernels
from mgpu_ops.registry import dispatch, partition

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
COPIES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def eight_devices() -> None:
    if jax.device_count() != 8:
        pytest.skip("needs the eight CPU devices of the tests")


def mesh_of(kind: AxisType = AUTO) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def placed(mesh: jax.sharding.Mesh, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def copies(function: Callable[..., Any], arrays: list[Any], out_specs: Any = None) -> set[str]:
    """The collectives of the compiled program, whose results are checked against one device's."""
    mesh = arrays[0].sharding.mesh
    out = None if out_specs is None else jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    program = jax.jit(function, out_shardings=out)
    text = program.lower(*arrays).compile().as_text()
    got, wanted = program(*arrays), jax.jit(function)(*(jnp.asarray(np.asarray(x)) for x in arrays))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1, np.abs(other).max(initial=0)))
    return {name for name in COPIES if re.search(rf" {name}(?:-start)?\(", text or "")}


# --- matmul


def step(a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
    """A product, and a training step's use of both gradients."""
    out, back = jax.vjp(lambda a, b: mgpu_ops.matmul(a, b), a, b)
    da, db = back(g)
    return out, da, b - db


A, B, G = normal(0, 64, 32), normal(1, 32, 48), normal(2, 64, 48)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ((P("data"), P(), P("data")), {"all-reduce"}),  # data parallel: the gradient of the weight is summed
        ((P(None), P(None, "model"), P(None, "model")), {"all-reduce"}),  # columns: that of the input is
        ((P(None, "model"), P("model"), P()), {"all-reduce"}),  # k: the product is
        ((P("data", "model"), P("model"), P("data")), {"all-reduce"}),
    ],
)
def test_a_product_and_its_gradients_are_split(kind: AxisType, specs: tuple[P, ...], found: set[str]) -> None:
    assert copies(step, placed(mesh_of(kind), (A, B, G), specs)) == found


@pytest.mark.parametrize("weight", [P("data"), P(None, "data")])
def test_fully_sharded_weights_are_gathered_and_their_gradients_scattered(weight: P) -> None:
    arrays = placed(mesh_of(), (A, B, G), (P("data"), weight, P("data")))
    assert copies(step, arrays, (P("data"), P("data"), weight)) == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_epilogue_follows_the_sum_of_the_parts(kind: AxisType) -> None:
    def layer(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return mgpu_ops.matmul(a, b, bias=bias, residual=residual, activation="gelu")

    arrays = placed(mesh_of(kind), (A, B, normal(3, 48), G), (P("data", "model"), P("model"), P(), P("data")))
    assert copies(layer, arrays) == {"all-reduce"}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_batches_are_split_under_vmap(kind: AxisType) -> None:
    arrays = placed(mesh_of(kind), (jnp.stack([A] * 4), jnp.stack([B] * 4)), (P("model", "data"), P("model")))
    assert copies(jax.vmap(lambda a, b: mgpu_ops.matmul(a, b)), arrays) == set()
    assert copies(lambda a, b: mgpu_ops.matmul(a, b), arrays) == set()


def test_layers_of_a_scan_with_checkpoints_are_split() -> None:
    def loss(a: jax.Array, bs: jax.Array) -> jax.Array:
        def layer(x: jax.Array, b: jax.Array) -> tuple[jax.Array, None]:
            return jax.checkpoint(lambda x, b: mgpu_ops.matmul(x, b, activation="silu"))(x, b)[:, :32], None

        return jax.lax.scan(layer, a, bs)[0].sum()

    arrays = placed(mesh_of(), (A, 0.1 * jnp.stack([B] * 3)), (P("data"), P()))
    assert copies(jax.value_and_grad(loss, argnums=(0, 1)), arrays) == {"all-reduce"}


def test_sides_that_devices_do_not_divide_stay_whole() -> None:
    arrays = placed(mesh_of(), (normal(0, 63, 32), normal(1, 32, 50)), (P(), P()))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return mgpu_ops.matmul(a[:, :30], jax.lax.with_sharding_constraint(b[:30], NamedSharding(mesh_of(), P("data"))))

    copies(product, arrays)


def test_the_config_is_that_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with what `use_configs` and `target` said where the call was traced."""
    seen: list[Any] = []
    run = dispatch.run

    def watched(spec: Any, problem: Any, *args: Any, **kwargs: Any) -> Any:
        if not partition.capture.capturing():
            seen.append((problem.m, problem.n, problem.k, partition.resolution.overrides()))
        return run(spec, problem, *args, **kwargs)

    monkeypatch.setattr(dispatch, "run", watched)
    arrays = placed(mesh_of(), (normal(0, 72, 24), normal(1, 24, 40)), (P("data"), P(None, "model")))
    with mgpu_ops.use_configs({"matmul": "xla"}):
        lowered = jax.jit(lambda a, b: mgpu_ops.matmul(a, b)).lower(*arrays)
        said = partition.resolution.overrides()
    assert seen == []
    lowered.compile()
    assert seen == [(36, 10, 24, said)]


def test_explicit_axes_move_nothing_unasked() -> None:
    arrays = placed(mesh_of(EXPLICIT), (A, B), (P("data"), P("data")))
    with pytest.raises(ValueError, match=r"operand 1 is .*reshard\(x, P\(None, None\)\)"):
        jax.jit(lambda a, b: mgpu_ops.matmul(a, b))(*arrays)


_X, _W = (4, 8, 16), (16, 8)
OF_ROWS: dict[str, Callable[[jax.Array], Any]] = {
    "matmul": lambda x: mgpu_ops.matmul(x, jnp.ones(_W)),
    "gated_matmul": lambda x: mgpu_ops.gated_matmul(x, jnp.ones(_W), jnp.ones(_W)),
    "gated_mlp": lambda x: mgpu_ops.gated_mlp(x, jnp.ones(_W), jnp.ones(_W), jnp.ones((8, 16))),
    "fp8_matmul": lambda x: mgpu_ops.fp8_matmul(x, jnp.ones(_W)),
    "fp8_gated_mlp": lambda x: mgpu_ops.fp8_gated_mlp(x, jnp.ones(_W), jnp.ones(_W), jnp.ones((8, 16))),
    "quantized_matmul": lambda x: mgpu_ops.quantized_matmul(x, jnp.ones(_W, jnp.int8), jnp.ones(8)),
    "rms_norm": lambda x: mgpu_ops.rms_norm(x, jnp.ones(16)),
    "cross_entropy": lambda x: mgpu_ops.cross_entropy(x, jnp.zeros((4, 8), int)),
    "embedding": lambda x: mgpu_ops.embedding(jnp.ones(_W), x[..., 0].astype(int)),
    "rotary_qkv": lambda x: mgpu_ops.rotary_qkv(x, jnp.ones((8, 2)), jnp.ones((8, 2)), heads=2, kv_heads=1),
}


@pytest.mark.parametrize("op", OF_ROWS)
def test_explicit_axes_that_split_tokens_and_not_sequences_are_refused_with_a_way_out(op: str) -> None:
    mesh = mesh_of(EXPLICIT)
    x = jax.device_put(normal(0, *_X), NamedSharding(mesh, P(None, "data")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"8@data.*only the first of them is split: pass jax.sharding.reshard"),
    ):
        OF_ROWS[op](x)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_rotary_of_sequences_over_an_explicit_axis_leaves_them_there(norms: bool, jitted: bool) -> None:
    angles = normal(1, 8, 2)
    weights = {"q_norm": normal(2, 4), "k_norm": normal(3, 4)} if norms else {}

    def turned(x: jax.Array) -> Any:
        return mgpu_ops.rotary_qkv(x, jnp.cos(angles), jnp.sin(angles), heads=2, kv_heads=1, **weights)

    def loss(x: jax.Array) -> jax.Array:
        attended = mgpu_ops.rotary_attention(x, jnp.cos(angles), jnp.sin(angles), heads=2, kv_heads=1, causal=True)
        return sum(((y * y).sum() for y in turned(x)), start=(attended * attended).sum())

    x, mesh = normal(0, *_X), mesh_of(EXPLICIT)
    wanted, of_one = turned(x), jax.grad(loss)(x)
    with jax.set_mesh(mesh):
        given = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = (jax.jit(turned) if jitted else turned)(given)
        gradient = jax.grad(jax.jit(loss) if jitted else loss)(given)
    for one, other in zip((*got, gradient), (*wanted, of_one), strict=True):
        assert one.sharding.spec[0] == "data"
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5)


def test_a_mixture_of_experts_over_explicit_axes_leaves_tokens_where_they_are() -> None:
    x, logits = normal(0, 4, 8, 16), normal(1, 4, 8, 8)
    matrices = [normal(i, *shape) for i, shape in enumerate(((8, 16, 24), (8, 16, 24), (8, 24, 16)), 2)]
    layer = with_gradients(lambda *arrays: mgpu_ops.moe(*arrays, 2), 0, 1, 2, 3, 4)
    mesh, of_tokens = mesh_of(EXPLICIT), P("data", "model")
    assert copies(layer, placed(mesh, (x, logits, *matrices), (of_tokens, of_tokens, P(), P(), P()))) == {"all-reduce"}
    with pytest.raises(ValueError, match=r"^moe .*operand 1 is .*reshard\(x, P\('data', 'model', None\)\)"):
        mgpu_ops.moe(*placed(mesh, (x, logits, *matrices), (of_tokens, P(), P(), P(), P())), 2)
    parts = placed(mesh, (x[0], logits[0]), (P("model"), P("model")))
    weights, experts = mgpu_ops.moe_route(parts[1], 2)
    assert [jax.typeof(of).sharding.spec for of in (weights, experts)] == [P("model", None)] * 2
    share = mgpu_ops.moe_experts(parts[0], weights, experts, *(w[2:5] for w in matrices), num_experts=8, group_offset=2)
    routed = mgpu_ops.moe_route(logits[0], 2)
    wanted = mgpu_ops.moe_experts(x[0], *routed, *(w[2:5] for w in matrices), num_experts=8, group_offset=2)
    np.testing.assert_allclose(share, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"^moe_dispatch .*operand 0 is .*reshard"):
        mgpu_ops.moe_dispatch(parts[0], experts, 8)


def test_what_is_not_partitioned_is_the_call_itself() -> None:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return mgpu_ops.matmul(a, b)

    mesh = mesh_of()
    arrays = placed(mesh, (A, B), (P("data"), P(None, "model")))
    manual = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"))
    assert "mgpu_ops_partitioned" in str(jax.make_jaxpr(product)(*arrays))
    assert "mgpu_ops_partitioned" not in str(jax.make_jaxpr(manual)(*arrays))
    assert "CustomSPMDPartitioning" not in jax.jit(product).lower(A, B).as_text()
    exported = export.deserialize(export.export(jax.jit(product))(*arrays).serialize())
    np.testing.assert_allclose(jax.jit(exported.call)(*arrays), A @ B, atol=1e-4)
    some = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    np.testing.assert_allclose(jax.jit(some)(*arrays), A @ B, atol=1e-4)
    abstract = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AUTO, AUTO))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(abstract, P("data"))) for x in (A, B)]
    assert export.export(jax.jit(product))(*shapes).nr_devices == 8


def test_the_shapes_of_results_are_asked_once_for_alike_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which traces the op's reference. A program of one device in a process with several has them too."""
    traced: list[Any] = []
    spec = mgpu_ops.spec_of("rms_norm")
    reference = spec.reference
    counted = dataclasses.replace(spec, reference=lambda *args: (traced.append(args), reference(*args))[1])
    monkeypatch.setattr(importlib.import_module("mgpu_ops.rms_norm"), "SPEC", counted)
    x, w = jax.ShapeDtypeStruct((24, 40), jnp.float32), jax.ShapeDtypeStruct((40,), jnp.float32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        out, again = mgpu_ops.rms_norm(mgpu_ops.rms_norm(x, w), w, return_x=True)
        return (out + again).sum()

    jax.make_jaxpr(loss)(x, w)
    assert len(traced) == 1


def test_calls_differ_in_jax_s_cache_also_where_it_leaves_out_what_is_in_memory() -> None:
    arrays = placed(mesh_of(), (A, B), (P("data"), P()))

    def text(activation: str) -> str:
        jax.clear_caches()
        lowered = jax.jit(lambda a, b: mgpu_ops.matmul(a, b, activation=activation)).lower(*arrays)
        return re.sub(r'backend_config = "\d+"', "", lowered.as_text())

    assert text("gelu") == text("gelu") != text("relu")


def test_gradients_of_weights_are_waited_for_on_one_device_only() -> None:
    arrays = placed(mesh_of(), (A, B, G), (P("data"), P(), P("data")))
    assert "optimization_barrier" not in jax.jit(step).lower(*arrays).as_text()
    assert "optimization_barrier" in jax.jit(step).lower(A, B, G).as_text()


def grouped(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    return mgpu_ops.grouped_matmul(rows, matrices, jnp.full(len(matrices), 8, jnp.int32))


ROWS, MATRICES, SQUARE, WIDE = normal(0, 64, 32), normal(1, 8, 32, 48), normal(2, 4, 16), normal(3, 32, 48)


@pytest.mark.parametrize(
    ("op", "arrays", "specs", "told", "share"),
    [
        (
            mgpu_ops.rms_norm,
            (ROWS, jnp.ones(32)),
            (P(None, "model"), P()),
            "rms_norm: operand 0 of 'rows WIDTH, WIDTH -> rows WIDTH' is split over model along WIDTH, which the op does not "
            "split as it is called: it is gathered, and all devices along model compute the same",
            1,
        ),
        (
            grouped,
            (ROWS, MATRICES),
            (P(), P("data")),
            "is split over data along GROUPS, which the op does not split as it is called: it is gathered, and all devices "
            "along data compute the same",
            1,
        ),
        (grouped, (ROWS, MATRICES), (P(), P("data", None, "model")), "all devices along data compute the same", 1 / 4),
        (
            lambda a, b: mgpu_ops.matmul(a[:62], b),
            (ROWS, WIDE),
            (P(("data", "model")), P()),
            "is split over model along m, of which there are 62, no multiple of 8 devices: it is gathered, and all devices "
            "along model compute the same",
            1 / 2,
        ),
        (
            lambda a, b, c: mgpu_ops.matmul(a, b, residual=c),
            (ROWS, WIDE, normal(4, 64, 48)),
            (P("data"), P(), P("model")),
            "operand 2 of 'm k, k n, m n -> m n' is split over model along m, where the sharding of another array goes first: "
            "it is gathered, and all devices along model compute the same",
            1 / 2,
        ),
        (
            lambda a, b: mgpu_ops.matmul(a.reshape(2, 32), b),
            (SQUARE, WIDE),
            (P("model"), P(None, ("model", "data"))),
            "operand 0 of 'm k, k n -> m n' is split over a part of an axis of the mesh: it is gathered, and the work is split "
            "nevertheless",
            1 / 8,
        ),
        (
            lambda a, b: mgpu_ops.matmul(a.reshape(2, 32), b),
            (SQUARE, WIDE),
            (P("model"), P(None, "model")),
            "a part of an axis of the mesh: it is gathered, and all devices along data compute the same",
            1 / 4,
        ),
    ],
)
def test_a_warning_says_what_is_gathered_and_which_devices_compute_the_same(
    op: Callable[..., Any],
    arrays: tuple[jax.Array, ...],
    specs: tuple[P, ...],
    told: str,
    share: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """share: of the operations of one device's program, those that each of eight has."""
    monkeypatch.setattr(partition, "_said", set())
    operands = placed(mesh_of(), arrays, specs)
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        assert copies(op, operands)
    said = [text for record in caplog.records if "it is gathered" in (text := record.getMessage())]
    assert len(said) == 1
    assert told in said[0]
    assert "several-gpus" in said[0]
    each, alone = (jax.jit(op).lower(*of).compile().cost_analysis()["flops"] for of in (operands, arrays))
    assert each / alone == pytest.approx(share, rel=0.1)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_kernels_of_parts_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write references are among them, and what is computed of other ops' results is split, too."""
    lowered: list[bytes] = []
    kept = lowered_kernels._kept

    def counted(*args: Any) -> bytes | None:
        program = kept(*args)
        lowered.append(program or b"")
        return program

    monkeypatch.setattr(lowered_kernels, "_kept", counted)

    def loss(x: jax.Array, ws: list[jax.Array], labels: jax.Array) -> jax.Array:
        for w in ws:
            x = mgpu_ops.matmul(x, w, backend="mosaic")
        return mgpu_ops.cross_entropy(x, labels, backend="mosaic").mean()

    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AUTO,))

    def shape(size: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

    ws = [shape((256, 256), jnp.bfloat16, P())] * 3
    context, place = aot.elsewhere("h200", devices=2)
    with context:
        args = place((shape((256, 256), jnp.bfloat16, P("data")), ws, shape((256,), jnp.int32, P("data"))))
        text = jax.jit(jax.grad(loss, argnums=1)).lower(*args).compile().as_text()
    assert "all-gather" not in text
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3 + 2 + 2 + 3  # products, losses, and the gradients of both
    assert len(lowered) == 5  # of a layer the product and its two gradients, the losses, and their gradient


def calls_of(text: str, *names: str) -> list[tuple[str, str]]:
    """(name, line) of the operations of these names, in the order in which the program runs them."""
    found = (re.search(rf" ({'|'.join(names)})\(", line) for line in text[text.index("ENTRY") :].splitlines())
    return [(match[1], match.string) for match in found if match]


def test_labels_that_do_not_count_and_those_beyond_the_vocabulary_mean_the_same_where_words_are_split() -> None:
    x = normal(0, 4, 24).at[3].set(-jnp.inf)
    labels = jnp.array([-1, 24, 23, 5])
    whole = mgpu_ops.cross_entropy(x, labels, return_lse=True)
    split = jax.jit(lambda x, y: mgpu_ops.cross_entropy(x, y, return_lse=True))
    parts = split(*placed(mesh_of(), [x, labels], [P(None, "model"), P()]))
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert parts[0][0] == 0
    assert np.isnan(parts[0][1])


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_logits_and_table_split_by_words_stay_so_through_kernels() -> None:
    """As in tensor parallelism: what devices exchange is as long as the tokens, and nothing is as large as the logits."""
    tokens, vocabulary, width = 4096, 32768, 1024
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(AUTO,))

    def loss(table: jax.Array, head: jax.Array, text: jax.Array) -> jax.Array:
        x = mgpu_ops.embedding(table, text, backend="mosaic")
        logits = mgpu_ops.matmul(x, head, backend="mosaic")
        return mgpu_ops.cross_entropy(logits, text, backend="mosaic").mean()

    def shape(size: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

    context, place = aot.elsewhere("h200", devices=2)
    with context:
        table, head, text = place(
            (
                shape((vocabulary, width), jnp.bfloat16, P("model")),
                shape((width, vocabulary), jnp.bfloat16, P(None, "model")),
                shape((tokens,), jnp.int32, P()),
            )
        )
        out = table.sharding, head.sharding
        program = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=out).lower(table, head, text).compile()
    text_of = program.as_text()
    assert "all-gather" not in text_of
    assert text_of.count('custom_call_target="mosaic_gpu_v2"') == 6  # logits, losses; gradients of logits, x, head and table
    of_logits = tokens * vocabulary // 2 * 2
    assert program.memory_analysis().temp_size_in_bytes < of_logits + 64 * 2**20


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_weights_of_fsdp_are_gathered_beside_kernels_whose_times_xla_knows(how: str) -> None:
    size, layers = 2048, 4
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AUTO,))

    def product(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = mgpu_ops.matmul(x, jax.lax.all_gather(w, "data", tiled=True) if how == "shard_map" else w, backend="mosaic")
        return x

    array = jax.ShapeDtypeStruct((2 * size, size), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    weight = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    context, place = aot.elsewhere("h200", devices=2)
    with context:
        args = place((array, [weight] * layers))
        over = args[0].sharding.mesh
        split = jax.shard_map(product, mesh=over, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)
        text = jax.jit(split if how == "shard_map" else product).lower(*args).compile().as_text()
    calls = calls_of(text, "custom-call", "all-gather-start", "all-gather-done", "while")
    kernels = [line for name, line in calls if name == "custom-call"]
    assert len(kernels) == layers
    assert all(re.search(r'latency_metadata="\d{4,}"', line) for line in kernels)
    # The first weight has to be there before the first product; each further one comes beside a product.
    inside, beside = 0, []
    for name, _ in calls:
        inside += {"all-gather-start": 1, "all-gather-done": -1}.get(name, 0)
        if name == "custom-call":
            beside.append(inside)
    assert beside == [1] * (layers - 1) + [0]


def test_tokens_over_explicit_axes_are_looked_up_where_they_are() -> None:
    table, tokens = placed(mesh_of(EXPLICIT), (normal(0, 24, 32), jnp.arange(32).reshape(4, 8) % 24), (P(), P("data")))
    look_up = with_gradients(lambda t, i: mgpu_ops.embedding(t, i), 0)
    assert copies(look_up, [table, tokens]) == {"all-reduce"}


def test_words_over_explicit_axes_are_not_gathered() -> None:
    arrays = placed(mesh_of(EXPLICIT), (normal(0, 64, 24), jnp.arange(64) % 24), (P("data", "model"), P("data")))
    losses = with_gradients(lambda x, y: mgpu_ops.cross_entropy(x, y, return_lse=True), 0)
    assert copies(losses, arrays) == {"all-reduce"}


def test_heads_that_are_split_within_are_gathered_and_right() -> None:
    """The joined columns of q, k and v, 8 of 64 on each device, are 4 heads of 16: XLA asks for a part of an axis."""
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(AUTO, AUTO))
    arrays = normal(0, 6, 48, 64), jnp.cos(normal(1, 48, 8)), jnp.sin(normal(1, 48, 8))
    rotate = with_gradients(lambda x, c, s: mgpu_ops.rotary_qkv(x, c, s, heads=2, kv_heads=1), 0)
    copies(rotate, placed(mesh, arrays, (P("data", None, "model"), P(), P("data", "model"))))


@pytest.mark.parametrize("tokens", [P(), P("data"), P("model")])
def test_the_gradient_of_a_table_over_explicit_axes_is_split_as_the_table(tokens: P) -> None:
    arrays = placed(mesh_of(EXPLICIT), (normal(0, 24, 32), jnp.arange(32).reshape(4, 8) % 24), (P("model"), tokens))

    def gradient(table: jax.Array, numbers: jax.Array) -> jax.Array:
        back = jax.grad(lambda t: (mgpu_ops.embedding(t, numbers) ** 2).sum())(table)
        if arrays[0].aval.sharding == jax.typeof(table).sharding:
            assert jax.typeof(back).sharding.spec == P("model", None)
        return back

    copies(gradient, arrays)


# --- the other ops


def with_gradients(function: Callable[..., Any], *of: int) -> Callable[..., Any]:
    """The results, and the gradients of some arguments."""

    def both(*arrays: jax.Array) -> Any:
        def changed(*some: jax.Array) -> Any:
            return function(*(some[of.index(i)] if i in of else x for i, x in enumerate(arrays)))

        out, back = jax.vjp(changed, *(arrays[i] for i in of))
        return out, back(jax.tree.map(lambda x: jnp.tanh(0.01 * x).astype(x.dtype), out))

    return both


TOKENS = jnp.arange(64, dtype=jnp.int32) % 24
SIZES = jnp.array([20, 0, 30, 14], jnp.int32)
ANGLES = normal(9, 16, 8)
QKV = [normal(5, 4, 16, 8, 16), normal(6, 4, 16, 4, 16), normal(7, 4, 16, 4, 16)]
W8 = jax.random.randint(jax.random.key(4), (32, 48), -127, 127, jnp.int8)
# arrays, their specs, and the collectives: those that gradients of what is not split need
OPS: dict[str, tuple[Callable[..., Any], list[Any], list[P], set[str]]] = {
    "gated_matmul, rows": (
        with_gradients(lambda x, g, u: mgpu_ops.gated_matmul(x, g, u), 0, 1, 2),
        [A, B, normal(3, 32, 48)],
        [P("data"), P(), P()],
        {"all-reduce"},
    ),
    "gated_mlp, tensor parallel": (
        with_gradients(lambda x, g, u, d, r: mgpu_ops.gated_mlp(x, g, u, d, residual=r), 0, 1, 2, 3),
        [A, B, normal(3, 32, 48), B.T, A],
        [P("data"), P(None, "model"), P(None, "model"), P("model"), P("data")],
        {"all-reduce"},
    ),
    "rms_norm": (
        with_gradients(lambda x, w: mgpu_ops.rms_norm(x, w), 0, 1),
        [normal(0, 4, 16, 32), jnp.ones(32)],
        [P("data"), P()],
        {"all-reduce"},
    ),
    "rotary_qkv": (
        with_gradients(lambda x, c, s: mgpu_ops.rotary_qkv(x, c, s, heads=4, kv_heads=2), 0),
        [normal(0, 4, 16, 8 * 16), jnp.cos(ANGLES), jnp.sin(ANGLES)],
        [P("data"), P(), P()],
        set(),
    ),
    "rotary_qkv with norms": (
        with_gradients(lambda x, c, s, q, k: mgpu_ops.rotary_qkv(x, c, s, heads=4, kv_heads=2, q_norm=q, k_norm=k), 0, 3, 4),
        [normal(0, 4, 16, 8 * 16), jnp.cos(ANGLES), jnp.sin(ANGLES), 1 + normal(1, 16), normal(2, 16)],
        [P("data"), P(), P(), P(), P()],
        {"all-reduce"},
    ),
    "rotary_attention with norms": (
        with_gradients(
            lambda x, c, s, q, k: mgpu_ops.rotary_attention(x, c, s, heads=4, kv_heads=2, q_norm=q, k_norm=k), 0, 3, 4
        ),
        [normal(0, 4, 16, 8 * 16), jnp.cos(ANGLES), jnp.sin(ANGLES), 1 + normal(1, 16), normal(2, 16)],
        [P("data"), P(), P(), P(), P()],
        {"all-reduce"},
    ),
    "rotary_attention": (
        with_gradients(lambda x, c, s: mgpu_ops.rotary_attention(x, c, s, heads=4, kv_heads=2, causal=True), 0),
        [normal(0, 4, 16, 8 * 16), jnp.cos(ANGLES), jnp.sin(ANGLES)],
        [P("data"), P(), P()],
        set(),
    ),
    "embedding": (
        with_gradients(lambda t, i: mgpu_ops.embedding(t, i), 0),
        [normal(0, 24, 32), TOKENS],
        [P(), P("data")],
        {"all-reduce"},
    ),
    "cross_entropy, words": (
        with_gradients(lambda x, y: mgpu_ops.cross_entropy(x, y, return_lse=True), 0),
        [normal(0, 64, 24), TOKENS.at[:4].set(jnp.array([-1, 23, 0, 12]))],
        [P(None, "model"), P()],
        {"all-reduce"},
    ),
    "cross_entropy, tokens and words": (
        with_gradients(lambda x, y: mgpu_ops.cross_entropy(x.reshape(4, 16, 24), y.reshape(4, 16)), 0),
        [normal(0, 64, 24), TOKENS],
        [P("data", "model"), P("data")],
        {"all-reduce"},
    ),
    "embedding, words": (
        with_gradients(lambda t, i: mgpu_ops.embedding(t, i), 0),
        [normal(0, 24, 32), TOKENS],
        [P("model"), P()],
        {"all-reduce"},
    ),
    "cross_entropy": (
        with_gradients(lambda x, y: mgpu_ops.cross_entropy(x, y), 0),
        [normal(0, 64, 24), TOKENS],
        [P(("data", "model")), P(("data", "model"))],
        set(),
    ),
    "quantized_matmul, columns": (
        with_gradients(lambda x, w, s: mgpu_ops.quantized_matmul(x, w, s), 0),
        [A, W8, normal(8, 48)],
        [P("data"), P(None, "model"), P("model")],
        {"all-reduce"},
    ),
    "quantized_matmul, k": (
        lambda x, w, s: mgpu_ops.quantized_matmul(x, w, s),
        [A, W8, normal(8, 48)],
        [P("data", "model"), P("model"), P()],
        {"all-reduce"},
    ),
    "quantized_matmul, k, with bias and residual": (
        with_gradients(lambda x, w, s, b, r: mgpu_ops.quantized_matmul(x, w, s, bias=b, residual=r), 0, 3, 4),
        [A, W8, normal(8, 48), normal(9, 48), G],
        [P("data", "model"), P("model"), P(), P(), P("data")],
        {"all-reduce"},
    ),
    "quantized_matmul, columns, with bias and residual": (
        with_gradients(lambda x, w, s, b, r: mgpu_ops.quantized_matmul(x, w, s, bias=b, residual=r), 0, 3, 4),
        [A, W8, normal(8, 48), normal(9, 48), G],
        [P("data"), P(None, "model"), P("model"), P("model"), P("data", "model")],
        {"all-reduce"},
    ),
    "fp8_matmul": (
        lambda x, w: mgpu_ops.fp8_matmul(x, w),
        [normal(0, 64, 32, dtype=jnp.bfloat16), normal(1, 32, 48, dtype=jnp.bfloat16)],
        [P("data"), P()],
        {"all-reduce"},
    ),
    "flash_attention": (
        with_gradients(lambda q, k, v: mgpu_ops.flash_attention(q, k, v, causal=True), 0, 1, 2),
        QKV,
        [P("data", None, "model")] * 3,
        set(),
    ),
    "flash_attention, more devices than heads of keys": (
        with_gradients(lambda q, k, v: mgpu_ops.flash_attention(q, k, v, causal=True), 0, 1, 2),
        [QKV[0], QKV[1][:, :, :1], QKV[2][:, :, :1]],
        [P("data", None, "model"), P("data"), P("data")],
        {"all-reduce"},
    ),
    "flash_attention with all inputs": (
        with_gradients(
            lambda q, k, v, bias, sinks, ids, lengths: mgpu_ops.flash_attention(
                q, k, v, bias=bias, sinks=sinks, q_segment_ids=ids, kv_lengths=lengths, return_lse=True
            ),
            0, 1, 2, 3, 4,
        ),
        [*QKV, normal(8, 1, 8, 16, 16), normal(9, 8), jnp.zeros((4, 16), jnp.int32), jnp.array([16, 9, 3, 12])],
        [*[P("data", None, "model")] * 3, P(None, "model"), P("model"), P("data"), P("data")],
        {"all-reduce"},
    ),
    "flash_attention, one bias for all heads and rows": (
        with_gradients(lambda q, k, v, bias: mgpu_ops.flash_attention(q, k, v, bias=bias), 0, 1, 2, 3),
        [*QKV, normal(8, 1, 1, 1, 16)],
        [*[P("data", None, "model")] * 3, P()],
        {"all-reduce"},
    ),
    "dot_product_attention": (
        lambda q, k, v: mgpu_ops.dot_product_attention(q, k, v, is_causal=True),
        QKV,
        [P("data", None, "model")] * 3,
        set(),
    ),
    "grouped_matmul, columns": (
        with_gradients(lambda x, w, s: mgpu_ops.grouped_matmul(x, w, s), 1),
        [A, normal(3, 4, 32, 48), SIZES],
        [P(), P(None, None, "model"), P()],
        set(),
    ),
    "grouped_matmul, k": (
        with_gradients(lambda x, w, s: mgpu_ops.grouped_matmul(x, w, s), 0, 1),
        [A, normal(3, 4, 32, 48), SIZES],
        [P(None, "model"), P(None, "model"), P()],
        {"all-reduce"},
    ),
    "gated_grouped_matmul, columns": (
        with_gradients(lambda x, g, u, s: mgpu_ops.gated_grouped_matmul(x, g, u, s), 1, 2),
        [A, normal(3, 4, 32, 48), normal(4, 4, 32, 48), SIZES],
        [P(), P(None, None, "model"), P(None, None, "model"), P()],
        set(),
    ),
    "moe, tensor parallel": (
        with_gradients(lambda x, r, g, u, d: mgpu_ops.moe(x, r, g, u, d, 2), 0, 1, 2, 3, 4),
        [A, normal(1, 64, 4), normal(3, 4, 32, 48), normal(4, 4, 32, 48), normal(6, 4, 48, 32)],
        [P(), P(), P(None, None, "model"), P(None, None, "model"), P(None, "model")],
        {"all-reduce"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops_are_split_without_gathering(name: str) -> None:
    function, arrays, specs, found = OPS[name]
    assert copies(function, placed(mesh_of(), arrays, specs)) == found
