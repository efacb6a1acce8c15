"""The programs of docs/frameworks/ run as they stand, and what they run on a Hopper GPU are kernels.

`levanter` and `maxtext` do not run with the jax that this library needs, and `tokamax` may not be installed: their pages are
held to the signatures that they document, by stand-ins.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType

import mgpu_ops
from mgpu_ops.core import aot
from tests.arrays import normal
from tests.mgpu_ops.grouped import ragged

FOLDER = Path(__file__).parents[2] / "docs" / "frameworks"
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], set[str]]] = {  # packages, arguments of its step, its ops
    "flax-nnx": (("flax", "optax"), ("state", "tokens"), {"matmul", "flash_attention", "flash_attention_backward"}),
    "flax-linen": (("flax", "optax"), ("state", "tokens"), {"matmul", "flash_attention", "flash_attention_backward"}),
    "optax": (("optax",), ("carry", "batch"), {"matmul", "grouped_matmul", "ragged_contraction"}),
    "aqt": (("aqt", "flax", "optax"), ("carry", "x"), {"matmul"}),
    "qwix": (("qwix",), ("state", "x"), {"quantized_matmul", "flash_attention"}),
}
BF16, F32 = jnp.bfloat16, jnp.float32


def program_of(page: str) -> str:
    (program,) = re.findall(r"^```python\n(.*?)^```$", (FOLDER / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    return program


def run(page: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The names that a page's program leaves, and what it prints."""
    for package in PROGRAMS[page][0]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    module = types.ModuleType(f"program_of_{page.replace('-', '_')}")
    sys.modules[module.__name__] = module  # dataclasses of a program look themselves up there
    try:
        exec(program_of(page), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module.__dict__, capsys.readouterr().out


def test_every_page_is_run_or_held_to_a_signature() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PROGRAMS, "levanter", "maxtext", "tokamax"}


@pytest.mark.filterwarnings("default")  # those of the packages
@pytest.mark.parametrize("page", PROGRAMS)
def test_a_pages_program_learns_and_reaches_the_kernels(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names, said = run(page, capsys)
    _, arguments, ops = PROGRAMS[page]
    captured = mgpu_ops.capture(names["step"], "h200")(*(names[name] for name in arguments))
    assert {use.op for use in captured.problems} == ops
    assert captured.problems == captured.uses, "some of it runs through XLA"
    if page == "qwix":
        assert float(re.search(r"(0\.\d+) of the bytes", said)[1]) < 0.6  # type: ignore[index]
        assert names["error"] < 0.03
    else:
        assert said.startswith("loss ")
        assert np.mean(names["losses"][-2:]) < 0.6 * names["losses"][0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", PROGRAMS)
def test_a_pages_program_does_on_the_gpu_what_it_does_through_xla(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "mosaic")  # which raises where a kernel cannot run
    kernels, _ = run(page, capsys)
    monkeypatch.setenv("MGPU_OPS_BACKEND", "xla")
    xla, _ = run(page, capsys)
    if page == "qwix":
        out, wanted = (np.asarray(names["out"], np.float32) for names in (kernels, xla))
        np.testing.assert_allclose(out, wanted, atol=0.03 * np.abs(wanted).max())
    else:
        np.testing.assert_allclose(kernels["losses"], xla["losses"], rtol=0.05, atol=0.02)


# --- Flax: its other layers with a product


def flax_layers() -> dict[str, tuple[Any, Any]]:
    """Layers of x [batch, tokens, 32] to [batch, tokens, 4, 16]: each through ours as a function of arrays, and its arrays."""
    nnx, nn = (pytest.importorskip(f"flax.{name}") for name in ("nnx", "linen"))
    x = normal(0, 2, 8, 32).astype(BF16)

    def of_nnx(layer: Any, **options: Any) -> tuple[Any, Any]:
        graph, state = nnx.split(layer(dtype=BF16, rngs=nnx.Rngs(0), **options))
        return lambda state, x: nnx.merge(graph, state)(x), (state, x)

    def of_linen(layer: Any) -> tuple[Any, Any]:
        return layer.apply, (layer.init(jax.random.key(0), x), x)

    return {
        "nnx.Einsum": of_nnx(nnx.Einsum, einsum_str="btd,dhk->bthk", kernel_shape=(32, 4, 16), einsum_op=mgpu_ops.einsum),
        "nnx.LinearGeneral": of_nnx(nnx.LinearGeneral, in_features=32, out_features=(4, 16), dot_general=mgpu_ops.dot_general),
        "linen.DenseGeneral": of_linen(nn.DenseGeneral((4, 16), dtype=BF16, dot_general=mgpu_ops.dot_general)),
        "linen.Einsum": of_linen(nn.Einsum((32, 4, 16), "btd,dhk->bthk", dtype=BF16)),
    }


@pytest.mark.parametrize("name", ["nnx.Einsum", "nnx.LinearGeneral", "linen.DenseGeneral"])
def test_flaxs_layers_of_several_output_dimensions_are_one_matmul(name: str, assert_near: Any) -> None:
    layer, (parameters, x) = flax_layers()[name]
    (use,) = mgpu_ops.capture(layer, "h200")(parameters, x).problems
    assert use.op == "matmul"
    assert (use.problem.m, use.problem.n, use.problem.k) == (16, 64, 32)
    (kernel,) = (leaf for leaf in jax.tree.leaves(parameters) if leaf.shape == (32, 4, 16))
    assert_near(layer(parameters, x), jnp.einsum("btd,dhk->bthk", x.astype(F32), kernel.astype(BF16).astype(F32)), 8e-3)


def test_linens_einsum_has_no_place_for_a_product_and_dense_general_has_its_parameters() -> None:
    """The page says so: where Flax gives it one, the page can name it."""
    nn = pytest.importorskip("flax.linen")
    assert not {"dot_general", "dot_general_cls", "einsum_op"} & {field.name for field in dataclasses.fields(nn.Einsum)}
    shapes = [jax.tree.map(jnp.shape, flax_layers()[name][1][0]) for name in ("linen.Einsum", "linen.DenseGeneral")]
    assert shapes[0] == shapes[1] == {"params": {"kernel": (32, 4, 16), "bias": (4, 16)}}


# --- AQT: what it multiplies through ours is what it multiplies through JAX


@pytest.mark.filterwarnings("default")
def test_aqts_results_and_gradients_through_ours_are_its_own_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    names, _ = run("aqt", capsys)
    parameters, x = names["parameters"], names["x"]

    def of(product: Any) -> Any:
        model = names["Model"](names["config_of"](product))

        def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = model.apply(parameters, x)
            return jnp.mean((out - x) ** 2), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    for ours, own in zip(*(jax.tree.leaves(of(one)(parameters, x)) for one in (names["dot_general"], jax.lax.dot_general))):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(own))
    captured = mgpu_ops.capture(of(names["dot_general"]), "h200")(parameters, x)
    assert [use.problem.dtype for use in captured.problems for _ in range(use.count)].count("int8") == 2
    gradients = [use for use in captured.problems if use.problem.dtype == "bfloat16"]
    assert sum(use.count for use in gradients) == 4, "of both weights and both inputs"


# --- Qwix: other rules than the page's, and other products


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", [{"weight_qtype": jnp.int4}, {"weight_qtype": jnp.int4, "tile_size": 64}], ids=["", "tiles"])
def test_qwixs_weights_of_4_bits_multiply_as_quantized_matmul(rule: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names, _ = run("qwix", capsys)
    qwix, nnx = names["qwix"], names["nnx"]
    layer = nnx.Linear(256, 128, use_bias=False, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
    x = normal(0, 4, 256).astype(BF16)
    quantized = qwix.quantize_model(layer, names["NarrowWeights"]([qwix.QuantizationRule(module_path=".*", **rule)]), x)
    graph, state = nnx.split(quantized)
    weight = quantized.kernel.array
    assert (weight.qvalue.dtype, weight.scale.shape[0]) == (jnp.int4, 4 if "tile_size" in rule else 1)
    wide = weight.qvalue.astype(F32) * jnp.repeat(weight.scale.astype(F32), 256 // len(weight.scale), 0)

    def step(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    (use,) = mgpu_ops.capture(step, "h200")(names["along_sums"](state), x).problems
    assert (use.op, use.problem.w_dtype, use.problem.layout) == ("quantized_matmul", "int4", "nt")
    for stored in (state, names["along_sums"](state)):
        out, wanted = np.asarray(step(stored, x), np.float32), x.astype(F32) @ wide
        np.testing.assert_allclose(out, wanted, atol=1e-2 * float(jnp.abs(wanted).max()))


@pytest.mark.filterwarnings("default")
def test_what_is_no_dense_layer_in_qwix_multiplies_a_widened_copy(capsys: pytest.CaptureFixture[str]) -> None:
    names, _ = run("qwix", capsys)
    qwix, nnx = names["qwix"], names["nnx"]

    class Scores(nnx.Module):
        """Logits by an embedding, whose last dimension is summed over."""

        def __init__(self) -> None:
            self.kernel = nnx.Param(normal(0, 96, 64).astype(BF16))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.dot_general(x, self.kernel[...], (((1,), (1,)), ((), ())))

    model, x = Scores(), normal(1, 8, 64).astype(BF16)
    provider = names["NarrowWeights"]([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)])
    quantized = qwix.quantize_model(model, provider, x)
    assert quantized.kernel.array.qvalue.dtype == jnp.int8
    graph, state = nnx.split(quantized)
    (use,) = mgpu_ops.capture(lambda state, x: nnx.merge(graph, state)(x), "h200")(state, x).problems
    assert (use.op, use.problem.layout) == ("matmul", "nt")
    wanted = np.asarray(model(x), np.float32)
    np.testing.assert_allclose(np.asarray(quantized(x), np.float32), wanted, atol=0.03 * np.abs(wanted).max())


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_on_a_gpu_no_weight_of_qwix_is_copied_before_its_product(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, _ = run("qwix", capsys)
    monkeypatch.setenv("MGPU_OPS_BACKEND", "mosaic")
    on_the_gpu, place = aot.elsewhere("h200")

    def placed(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        order = Layout(leaf.format.layout.major_to_minor)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(order, shape.sharding))

    arrays = (names["state"], names["x"])
    shapes = jax.tree.map(placed, arrays, place(arrays))
    with on_the_gpu:
        program = jax.jit(names["step"]).lower(*shapes).compile().as_text()
    assert program.count('custom_call_target="mosaic_gpu') == 7, "six products and the attention"
    assert {*re.findall(r"= s8\[\S* ([\w-]+)\(", program)} == {"parameter", "bitcast"}


# --- tokamax: itself where it is installed, else a stand-in with its signature


def stand_in(own: list[Any]) -> types.ModuleType:
    """tokamax with a ragged_dot that tries implementations in turn, as its own does; `own` gets the calls of its own."""

    def xla(lhs, rhs, *, group_sizes, ragged_dot_dimension_numbers, activation, preferred_element_type, **others) -> jax.Array:
        own.append(others)
        out = jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, ragged_dot_dimension_numbers, preferred_element_type=preferred_element_type
        )
        return out if activation is None else activation(out)

    def ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision=None,
        preferred_element_type=None,
        group_offset=None,
        activation=None,
        manual_axis_type=None,
        *,
        implementation=None,
        bypass_device_check=None,
        zero_initialize=False,
        fuse_gateup_activation=None,
    ) -> jax.Array:
        more = {"manual_axis_type": manual_axis_type, "group_offset": group_offset, "zero_initialize": zero_initialize}
        more = {name: value for name, value in more.items() if value is not None and value is not False}
        basic = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
        for each in (implementation,) if isinstance(implementation, str) else implementation:
            try:
                return (xla if each == "xla" else each)(
                    lhs,
                    rhs,
                    group_sizes=group_sizes,
                    ragged_dot_dimension_numbers=basic,
                    precision=precision,
                    preferred_element_type=preferred_element_type,
                    activation=activation,
                    **more,
                )
            except NotImplementedError:
                continue
        raise NotImplementedError

    module = types.ModuleType("tokamax")
    module.ragged_dot = ragged_dot  # type: ignore[attr-defined]
    return module


@pytest.mark.filterwarnings("default")
def test_tokamaxs_page_runs_ours_where_a_kernel_can_and_its_own_elsewhere(
    monkeypatch: pytest.MonkeyPatch, assert_near: Any
) -> None:
    own: list[Any] = []
    if importlib.util.find_spec("tokamax") is None:
        monkeypatch.setitem(sys.modules, "tokamax", stand_in(own))
    tokamax = importlib.import_module("tokamax")
    monkeypatch.setattr(tokamax, "ragged_dot", tokamax.ragged_dot)  # put back in the end
    names: dict[str, Any] = {"__name__": "program"}
    exec(program_of("tokamax"), names)
    lhs, rhs, sizes = names["lhs"], names["rhs"], names["sizes"]
    captured = mgpu_ops.capture(names["step"], "h200")(lhs, rhs)
    assert [use.op for use in captured.problems] == ["grouped_matmul", "grouped_matmul", "ragged_contraction"]
    wanted = ragged.grouped(lhs, rhs, sizes)
    for out in (
        tokamax.ragged_dot(lhs, rhs, sizes, preferred_element_type=F32),
        tokamax.ragged_dot(lhs, rhs, jnp.array([*sizes, 0]), group_offset=jnp.array([0])),
        tokamax.ragged_dot(lhs, rhs, group_sizes=sizes, implementation="xla"),
        tokamax.ragged_dot(lhs.astype(F32), rhs.astype(F32), sizes),
    ):
        assert_near(out, wanted, 1e-2)
    tanh = tokamax.ragged_dot(lhs, rhs, sizes, activation=jnp.tanh)
    assert_near(tanh, np.tanh(wanted), 1e-2)
    assert len(own) in (0, 3)  # of the stand-in: named, float32 and tanh


# --- Haliax and Levanter: stand-ins with their signatures


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class NamedArray:
    """haliax.NamedArray, as far as the page uses it."""

    array: Any
    axes: tuple[Axis, ...]

    def resolve_axis(self, axis: Axis | str) -> Axis:
        return next(a for a in self.axes if a.name == getattr(axis, "name", axis))

    def rearrange(self, axes: tuple[Any, ...]) -> NamedArray:
        named = [self.resolve_axis(axis) for axis in axes if axis is not ...]
        order = [*(a for a in self.axes if a not in named), *named] if ... in axes else named
        return NamedArray(self.array.transpose([self.axes.index(axis) for axis in order]), tuple(order))


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    is_causal: bool = False
    causal_offset: Any = None
    explicit_mask: Any = None
    segment_ids: tuple[NamedArray, NamedArray] | None = None
    sliding_window: int | None = None


@dataclasses.dataclass
class Levanter:
    attention: types.ModuleType
    ragged_dot: types.ModuleType
    own: list[str]  # options of the calls that were left to Levanter


@pytest.fixture
def levanter(monkeypatch: pytest.MonkeyPatch) -> Levanter:
    """The modules that the page names, after its program has run."""
    modules = {}
    for name in ("haliax", "haliax.nn", "haliax.nn.ragged_dot", "levanter", "levanter.layers", "levanter.layers.attention"):
        modules[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    own: list[str] = []

    def theirs(
        QPos,
        KPos,
        Key,
        query,
        key,
        value,
        mask=None,
        bias=None,
        attention_dtype=None,
        precision=None,
        use_flash=None,
        attn_backend=None,
        flash_block_size=None,
        dropout=0.0,
        *,
        logits_soft_cap=None,
        scaling_factor=None,
        inference=True,
        prng=None,
        attn_sink=None,
    ) -> str:
        own.append("called")
        return "Levanter's own"

    modules["haliax"].named = NamedArray  # type: ignore[attr-defined]
    modules["levanter.layers.attention"].dot_product_attention = theirs  # type: ignore[attr-defined]
    modules["levanter.layers.attention"].AttentionMask = AttentionMask  # type: ignore[attr-defined]
    exec(program_of("levanter"), {"__name__": "program"})
    return Levanter(modules["levanter.layers.attention"], modules["haliax.nn.ragged_dot"], own)


SIZES = {"batch": 2, "position": 16, "key_position": 16, "kv_head": 2, "q_heads_per_group": 3, "head_size": 8}
BATCH, QPOS, KPOS, HEADS, GROUP, KEY = (Axis(name, size) for name, size in SIZES.items())


def named(seed: int, *axes: Axis) -> NamedArray:
    return NamedArray(normal(seed, *(axis.size for axis in axes)).astype(BF16), axes)


QUERY, KEYS, VALUES = (  # in the orders of Levanter's attention layer
    named(0, BATCH, HEADS, GROUP, QPOS, KEY),
    named(1, BATCH, HEADS, KPOS, KEY),
    named(2, BATCH, HEADS, KPOS, KEY),
)


def by_hand(scale: float, mask: Any, soft_cap: float | None = None, sinks: jax.Array | None = None) -> jax.Array:
    """sinks: a logit of each head [kv heads, heads of a group], which joins the softmax as a key without a value."""
    q, k, v = (x.array.astype(F32) for x in (QUERY, KEYS, VALUES))
    scores = scale * jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision="highest")
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, :, None, None], (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores)[..., : k.shape[2]]
    return jnp.einsum("bhgqk,bhkd->bhgqd", weights, v, precision="highest")


ROWS = np.arange(16)
CAUSAL = ROWS[:, None] >= ROWS
IDS = np.stack([ROWS // 5, ROWS // 8])
PACKED = (NamedArray(jnp.asarray(IDS), (BATCH, QPOS)), NamedArray(jnp.asarray(IDS), (BATCH, KPOS)))
SAME = (IDS[:, :, None] == IDS[:, None, :])[:, None, None]
MASKS: dict[str, tuple[AttentionMask | None, Any]] = {
    "none": (None, True),
    "causal": (AttentionMask(is_causal=True), CAUSAL),
    "a window": (AttentionMask(is_causal=True, sliding_window=4), CAUSAL & (ROWS[:, None] - ROWS < 4)),
    "packed": (AttentionMask(is_causal=True, segment_ids=PACKED), CAUSAL & SAME),
}


@pytest.mark.parametrize("case", MASKS)
def test_levanters_attention_is_computed_by_ours(case: str, levanter: Levanter, assert_near: Any) -> None:
    mask, seen = MASKS[case]
    ours = levanter.attention.dot_product_attention
    out = ours(QPOS, KPOS, KEY, QUERY, KEYS, VALUES, mask, inference=True, scaling_factor=0.25, logits_soft_cap=2.0)
    assert levanter.own == []
    assert out.axes == QUERY.axes
    assert_near(out.array, by_hand(0.25, seen, 2.0), 2e-2)


def test_what_ours_does_not_take_goes_to_levanters_own(levanter: Levanter) -> None:
    def call(query: NamedArray = QUERY, mask: Any = None, **options: Any) -> Any:
        return levanter.attention.dot_product_attention(QPOS, KPOS, KEY, query, KEYS, VALUES, mask, **options)

    other: list[dict[str, Any]] = [
        {"bias": QUERY},
        {"dropout": 0.1},
        {"attn_sink": QUERY},
        {"attention_dtype": F32},
        {"mask": QUERY},
        {"mask": AttentionMask(explicit_mask=QUERY)},
        {"mask": AttentionMask(is_causal=True, causal_offset=QUERY)},
        {"query": named(0, BATCH, QPOS, KEY)},
        {"query": named(0, BATCH, HEADS, GROUP, Axis("position", 8), KEY)},
    ]
    assert [call(**options) for options in other] == ["Levanter's own"] * len(other)


def test_haliaxs_products_are_ours(levanter: Levanter, assert_near: Any) -> None:
    rows, experts = normal(0, 12, 16).astype(BF16), normal(1, 3, 16, 8).astype(BF16)
    sizes = jnp.array([4, 0, 8], jnp.int32)
    wanted = jax.lax.ragged_dot(rows, experts, sizes)
    assert_near(levanter.ragged_dot.ragged_dot(rows, experts, sizes, False, "auto"), wanted, 8e-3)

    def dense(x: jax.Array, weight: jax.Array) -> jax.Array:  # as haliax.dot does, with the output first in a weight
        return jnp.einsum("bsi,oi->bso", x, weight, _dot_general=mgpu_ops.dot_general)

    x, weight = normal(2, 2, 4, 16).astype(BF16), normal(3, 8, 16).astype(BF16)
    assert_near(dense(x, weight), jnp.einsum("bsi,oi->bso", x, weight), 8e-3)
    (use,) = mgpu_ops.capture(dense, "h200")(x, weight).problems
    assert (use.op, use.problem.layout) == ("matmul", "nt")


@pytest.mark.filterwarnings("default")
def test_haliaxs_own_experts_run_ours_where_it_is_installed(levanter: Levanter, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MoELinear` of haliax itself, with the page's function in place of its own, which computes the same."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "haliax"]:
        monkeypatch.delitem(sys.modules, name)  # the stand-in
    haliax = pytest.importorskip("haliax", exc_type=ImportError)
    linear = pytest.importorskip("haliax.nn.linear", exc_type=ImportError)
    experts, width, out, tokens = (haliax.Axis(name, size) for name, size in zip("eiot", (4, 64, 128, 96), strict=True))
    layer = linear.MoELinear.init(experts, width, out, key=jax.random.key(0), use_bias=False, use_gmm=True)
    x = haliax.random.normal(jax.random.key(1), (tokens, width))
    sizes = haliax.named(jnp.array([30, 0, 41, 25], jnp.int32), (experts,))
    wanted = linear.gmm_sharded(x.array, layer.weight.array, sizes.array)
    monkeypatch.setattr(linear, "gmm_sharded", levanter.ragged_dot.ragged_dot)
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        np.testing.assert_allclose(layer(x, sizes).array, wanted, rtol=1e-5, atol=1e-5)
    rows, weights = (array.astype(BF16) for array in (x.array, layer.weight.array))
    (use,) = mgpu_ops.capture(linear.gmm_sharded, "h200")(rows, weights, sizes.array).problems
    assert use.op == "grouped_matmul"


# --- MaxText: a stand-in with the signature of its call site


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"


class AttentionOp:
    def __init__(self, attention_type: AttentionType, sliding_window_size: int | None = None, dropout_rate: float = 0.0):
        self.attention_type, self.sliding_window_size, self.dropout_rate = attention_type, sliding_window_size, dropout_rate
        self.attn_logits_soft_cap: float | None = None

    def cudnn_flash_attention(
        self, query, key, value, decoder_segment_ids, segment_positions, model_mode="train", sinks=None
    ) -> Any:
        return "MaxText's own"


@pytest.fixture
def maxtext(monkeypatch: pytest.MonkeyPatch) -> type[AttentionOp]:
    op = type("AttentionOp", (AttentionOp,), {})
    for name in ("maxtext", "maxtext.layers", "maxtext.layers.attention_op"):
        module = types.ModuleType(name)
        module.AttentionOp = op  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(jax.lax, "ragged_dot", jax.lax.ragged_dot)  # the program puts ours there
    exec(program_of("maxtext"), {"__name__": "program"})
    return op


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
def test_maxtexts_attention_is_computed_by_ours(window: int | None, with_sinks: bool, maxtext: Any, assert_near: Any) -> None:
    op = maxtext(AttentionType.GLOBAL if window is None else AttentionType.LOCAL_SLIDING, window)
    q = QUERY.array.reshape(2, 6, 16, 8).swapaxes(1, 2)
    k, v = (x.array.swapaxes(1, 2) for x in (KEYS, VALUES))
    sinks = normal(5, 2, 3) if with_sinks else None  # MaxText has them by query head
    by_head = {} if sinks is None else {"sinks": sinks.reshape(6)}
    out = op.cudnn_flash_attention(q, k, v, jnp.asarray(IDS), jnp.asarray(IDS), "train", **by_head)
    seen = CAUSAL & SAME if window is None else CAUSAL & SAME & (ROWS[:, None] - ROWS < window)
    assert_near(out.swapaxes(1, 2).reshape(QUERY.array.shape), by_hand(1.0, seen, sinks=sinks), 2e-2)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ((AttentionType.CHUNK,), {}),
        ((AttentionType.GLOBAL, None, 0.1), {}),
        ((AttentionType.GLOBAL,), {"model_mode": "autoregressive"}),
    ],
)
def test_what_ours_does_not_take_goes_to_maxtexts_own(op: tuple[Any, ...], options: dict[str, Any], maxtext: Any) -> None:
    assert maxtext(*op).cudnn_flash_attention(1, 2, 3, None, None, **options) == "MaxText's own"


def test_maxtexts_experts_are_ours(maxtext: Any) -> None:
    rows, experts = normal(0, 12, 16).astype(BF16), normal(1, 3, 16, 8).astype(BF16)

    def experts_of(sizes: jax.Array) -> jax.Array:  # by the keywords of its call
        return jax.lax.ragged_dot(lhs=rows, rhs=experts, group_sizes=sizes, preferred_element_type=BF16)

    (use,) = mgpu_ops.capture(experts_of, "h200")(jnp.array([4, 0, 8], jnp.int32)).problems
    assert use.op == "grouped_matmul"
