"""Writes docs/kernels/flash_attention_support.md: which calls of flash_attention the kernels run, and which XLA.

    python scripts/flash_attention_support.py [--check]

`--check` writes nothing and fails, with the difference, where the page is not what it should be.

A row of its tables is a call of the public function that was traced, with its gradients, as on the GPU that is named; none is
needed. Where it ran is what `dispatch.run` did with it, and why is what `supports` or `why_jax` returns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mgpu_ops
from mgpu_ops.attention.dot_product_attention import JaxArguments, why_jax
from mgpu_ops.attention.heads import HEAD_DIMS, rounded
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh

FILE = Path(__file__).parents[1] / "docs/kernels/flash_attention_support.md"
BATCH, TOKENS, HEADS, HEAD_DIM = 2, 1024, 8, 128
attention = importlib.import_module("mgpu_ops.attention.flash_attention")


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a call of an op ended: in the kernel, or through XLA, and then why."""

    op: str
    reason: str | None


# --- Calls -----------------------------------------------------------------------------------------------------------


def array(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def call(
    dtype: str = "bfloat16",
    batch: int = BATCH,
    q_tokens: int = TOKENS,
    kv_tokens: int = TOKENS,
    heads: tuple[int, int] = (HEADS, HEADS),
    head_dim: int = HEAD_DIM,
    v_head_dim: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Arguments: q, k and v by position, under their names in flash_attention."""
    q, k = array(batch, q_tokens, heads[0], head_dim, dtype=dtype), array(batch, kv_tokens, heads[1], head_dim, dtype=dtype)
    return {"q": q, "k": k, "v": array(*k.shape[:3], v_head_dim or head_dim, dtype=dtype), **kwargs}


def paged(page_size: int, q_tokens: int = 1, head_dim: int = HEAD_DIM, **kwargs: Any) -> dict[str, Any]:
    """Arguments with a page_table: room for about TOKENS keys a sequence."""
    each = -(-TOKENS // page_size)
    pool, table = array(BATCH * each, page_size, 2, head_dim), integers(BATCH, each)
    return {"q": array(BATCH, q_tokens, HEADS, head_dim), "k": pool, "v": pool, "page_table": table, **kwargs}


def in_eight_bits(arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Arguments with keys and values of 8 bits."""
    return arguments | {name: jax.ShapeDtypeStruct(arguments[name].shape, jnp.dtype(dtype)) for name in "kv"}


def scores(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return array(*(shape or (BATCH, HEADS, TOKENS, TOKENS)), dtype=dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype="int32")


def computed_as(head_dim: int) -> str:
    """As which head dim the kernels compute it, where that is another."""
    if head_dim > HEAD_DIMS[-1]:
        return ""
    return f", computed as {rounded(head_dim)}" if rounded(head_dim) > head_dim else ""


MASK, BIAS = scores(dtype="bool"), scores()
IDS, LENGTHS = integers(BATCH, TOKENS), integers(BATCH)

CALLS: dict[str, dict[str, Any]] = {
    "bfloat16": call(),
    "float16": call("float16"),
    "float32": call("float32"),
    "float64": call("float64"),
    **{f"head_dim {d}{computed_as(d)}": call(head_dim=d) for d in (8, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 257, 512)},
    "head_dim 192, of values 128": call(head_dim=192, v_head_dim=128),
    "head_dim 64, of values 256": call(head_dim=64, v_head_dim=256),
    "head_dim 128, of values 512": call(v_head_dim=512),
    "as many heads of keys (MHA)": call(),
    "grouped heads (GQA)": call(heads=(HEADS, 2)),
    "one head of keys (MQA)": call(heads=(HEADS, 1)),
    "fewer queries than keys": call(q_tokens=100),
    "more queries than keys": call(kv_tokens=100),
    "odd numbers of tokens": call(q_tokens=333, kv_tokens=1001),
    "one query": call(q_tokens=1),
    "2^28 tokens in all": call(batch=2**12, q_tokens=2**16, kv_tokens=2**16),
    "`causal`": call(causal=True),
    "`window` to the left": call(window=(256, None)),
    "`window` to both sides": call(window=(256, 128)),
    "`window`, `causal`": call(window=(256, None), causal=True),
    "`q_lengths`, `kv_lengths`": call(q_lengths=LENGTHS, kv_lengths=LENGTHS, causal=True),
    "segments": call(q_segment_ids=IDS, causal=True),
    "segments of keys of their own, lengths": call(q_segment_ids=IDS, kv_segment_ids=IDS, kv_lengths=LENGTHS),
    "`mask`": call(mask=MASK),
    "`mask` of keys": call(mask=scores(BATCH, 1, 1, TOKENS, dtype="bool")),
    **{f"`bias` in {dtype}": call(bias=scores(dtype=dtype)) for dtype in ("bfloat16", "float16", "float32")},
    "`bias` of heads": call(bias=scores(1, HEADS, TOKENS, TOKENS)),
    "`bias`, `mask`, `causal`, lengths": call(bias=BIAS, mask=MASK, causal=True, kv_lengths=LENGTHS),
    "`soft_cap`": call(soft_cap=50.0),
    "`soft_cap`, `causal`, `window`, segments": call(soft_cap=50.0, causal=True, window=(256, None), q_segment_ids=IDS),
    "`soft_cap`, `mask`": call(soft_cap=50.0, mask=MASK),
    "`soft_cap`, `bias`": call(soft_cap=50.0, bias=BIAS),
    "`soft_cap_after_bias`, `bias`": call(soft_cap=50.0, bias=BIAS, soft_cap_after_bias=True),
    "`sinks`": call(sinks=array(HEADS, dtype="float32")),
    "`sinks` in bfloat16, `causal`, `window`, lengths": call(
        sinks=array(HEADS), causal=True, window=(256, None), kv_lengths=LENGTHS
    ),
    "`page_table` of pages of 16 tokens, lengths": paged(16, kv_lengths=LENGTHS),
    "the same, 16 query tokens, `causal`, `window`, `soft_cap`, `sinks`": paged(
        64, q_tokens=16, causal=True, window=(256, None), soft_cap=50.0, sinks=array(HEADS)
    ),
    "`page_table` of pages of 48 tokens": paged(48),
    "`page_table`, head_dim 80": paged(64, head_dim=80),
    "`page_table`, 1024 query tokens": paged(64, q_tokens=TOKENS, causal=True),
    "`page_table`, segments": paged(64, q_segment_ids=integers(BATCH, 1), kv_segment_ids=IDS),
    "keys and values of 8 bits (`float8_e4m3fn`), 16 query tokens, lengths": in_eight_bits(
        call(q_tokens=16, heads=(HEADS, 2), kv_lengths=LENGTHS, causal=True), "float8_e4m3fn"
    ),
    "the same (`int8`), `page_table`": in_eight_bits(paged(16, kv_lengths=LENGTHS), "int8"),
    "the same, 1024 query tokens": in_eight_bits(call(), "int8"),
    "`scale`, also negative": call(scale=-0.5),
    "`return_lse`, with its gradient": call(return_lse=True),
    "`deterministic`": call(deterministic=True),
    "`deterministic`, `bias`": call(deterministic=True, bias=BIAS),
}

DROP_IN: dict[str, dict[str, Any]] = {
    "bfloat16": call(),
    "float16": call("float16"),
    "float32": call("float32"),
    "float64": call("float64"),
    "head_dim 256": call(head_dim=256),
    "head_dim 512": call(head_dim=512),
    "grouped heads": call(heads=(HEADS, 2)),
    "`is_causal`": call(is_causal=True),
    "`local_window_size`": call(local_window_size=(256, 0)),
    "`query_seq_lengths`, `key_value_seq_lengths`": call(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS),
    "`mask`": call(mask=MASK),
    "`bias`": call(bias=BIAS),
    "`bias` in float32": call(bias=scores(dtype="float32")),
    "`bias` in float64": call(bias=scores(dtype="float64")),
    "`bias` of integers": call(bias=scores(dtype="int32")),
    "`bias`, `mask`, `is_causal`": call(bias=BIAS, mask=MASK, is_causal=True),
    "`return_residual`": call(return_residual=True),
    "`scale`, also negative": call(scale=-0.5),
    "`scale` of 0": call(scale=0.0),
    "`scale` that is traced": call(scale=array(dtype="float32")),
    "negative `local_window_size`": call(local_window_size=(-1, 8)),
    "`implementation='xla'`": call(implementation="xla"),
    "`implementation='cudnn'`": call(implementation="cudnn"),
}


def sharded(f: Callable[..., Any]) -> Callable[..., Any]:
    spec, over = PartitionSpec("batch"), AbstractMesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=over, in_specs=spec, out_specs=spec)


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "`jax.jit`": jax.jit,
    "`jax.vmap`": lambda f: lambda *x: jax.vmap(f)(*(jnp.stack([y, y]) for y in x)),
    "`jax.vmap` of the queries": lambda f: lambda q, k, v: jax.vmap(f, (0, None, None))(jnp.stack([q, q]), k, v),
    "`jax.lax.scan`": lambda f: lambda q, k, v: jax.lax.scan(lambda q, _: (f(q, k, v), None), q, length=2)[0],
    "`jax.checkpoint`": jax.checkpoint,
    "`jax.shard_map`": sharded,
}

# --- Where they run --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(device: gpus.Gpu | None) -> Iterator[list[Ran]]:
    """Inside, calls of flash_attention run as on `device`, but give zeros. Yields what was dispatched."""
    ran: list[Ran] = []

    def watch(spec: Any) -> Any:
        def zeros(problem: Any, *arrays: Any) -> Any:
            """Of the results' shapes and dtypes; to trace the reference for them would take most of the time."""
            q, k, v = arrays[:3]
            if hasattr(problem, "bias_grad"):
                of = [q, k, v] + [Inputs.of(problem, arrays[6:]).bias] * problem.bias_grad
            else:
                batch, tokens, heads, _ = q.shape
                of = [array(batch, tokens, heads, v.shape[3], dtype=q.dtype), array(batch, heads, tokens, dtype="float32")]
            return tuple(mesh.same_mesh_axes(jnp.zeros(x.shape, x.dtype), *arrays)[0] for x in of)

        def run(problem: Any, config: Any, gpu: gpus.Gpu, *arrays: Any, interpret: bool) -> Any:
            ran.append(Ran(spec.name, None))
            return zeros(problem, *arrays)

        def reference(problem: Any, *arrays: Any) -> Any:
            ran.append(
                Ran(spec.name, "the kernels do not know this device" if device is None else spec.supports(problem, device))
            )
            return zeros(problem, *arrays)

        return dataclasses.replace(spec, run=run, reference=reference)

    for product in (attention.forward_product, attention.backward_product):
        product.cache_clear()  # what was traced before would not be dispatched again
    with (
        mock.patch.object(gpus, "current", return_value=device),
        mock.patch.object(attention, "FORWARD", watch(attention.FORWARD)),
        mock.patch.object(attention, "BACKWARD", watch(attention.BACKWARD)),
    ):
        yield ran
    for product in (attention.forward_product, attention.backward_product):
        product.cache_clear()


def where(function: Callable[..., Any], arguments: dict[str, Any], device: gpus.Gpu | None) -> tuple[str, str, str]:
    """Where the output and the gradients of a call are computed, "kernel" or "XLA", and why not in a kernel."""
    arrays, options = split(arguments)
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def output(floats: dict[str, Any], arrays: dict[str, Any]) -> Any:
        out = function(*by_position({**arrays, **floats}), **by_name({**arrays, **floats}), **options)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    with watched(device) as ran:
        no_gradient = "page_table" in arguments or arguments["k"].dtype != arguments["q"].dtype
        jax.eval_shape(output if no_gradient else jax.grad(output), floats, arrays)
    return cells(ran)


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays among the arguments of a call, and the rest."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    return arrays, {name: x for name, x in arguments.items() if name not in arrays}


def by_position(arrays: dict[str, Any]) -> list[Any]:
    return [arrays[name] for name in "qkv"]


def by_name(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if name not in "qkv"}


def cells(ran: list[Ran]) -> tuple[str, str, str]:
    def of(spec: Any) -> tuple[str, set[str]]:
        reasons = {r.reason for r in ran if r.op == spec.name}
        if not reasons:
            return "none", set()
        return ("kernel" if reasons == {None} else "XLA"), {r for r in reasons if r is not None}

    (forward, why), (backward, more) = of(attention.FORWARD), of(attention.BACKWARD)
    return forward, backward, "; ".join(sorted(why | more))


def drop_in(arguments: dict[str, Any], device: gpus.Gpu) -> tuple[str, str, str, str]:
    """`where` for dot_product_attention, after the function that computes it."""
    arrays, options = split(arguments)
    reason: list[str | None] = []

    def ask(arrays: dict[str, Any]) -> None:
        reason.append(why_jax(JaxArguments(arrays["q"], arrays["k"], arrays["v"], **by_name(arrays), **options)))

    jax.eval_shape(ask, arrays)
    if reason[0] is not None:
        return "JAX's own", "", "", reason[0]
    return "`flash_attention`", *where(mgpu_ops.dot_product_attention, arguments, device)


# --- The page --------------------------------------------------------------------------------------------------------

PAGE = """# What runs where: flash_attention and dot_product_attention

Written by `python scripts/flash_attention_support.py` from what the code does; a test holds it to that. "kernel" is the Mosaic
GPU kernel, "XLA" the same computed by `mgpu_ops/attention/reference.py`. Where a call runs through XLA that could not run
in the kernel, the log says why, once per reason, and a named `backend="mosaic"` raises it.

## Devices

{devices}

## Arguments of flash_attention on a Hopper GPU

bfloat16, {batch} x {tokens} tokens, {heads} heads of {head_dim}, but for what is named. Gradients are those of all floats, of a
bias too.

{arguments}

## Transformations

{transforms}

Forward-mode differentiation (`jax.jvp`, `jax.hessian`) raises TypeError and a gradient of a gradient ValueError, on any device.

## dot_product_attention

JAX's own function computes what flash_attention does not compute as it does; it is `jax.nn.dot_product_attention`.

{drop_in}
"""


def devices() -> dict[str, gpus.Gpu | None]:
    """Every GPU of the table, some that are not in it, and a CPU."""
    others = (("NVIDIA H800", "9.0"), ("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA GeForce RTX 5090", "12.0"), ("cpu", None))
    found = {gpu.name: gpu for gpu in gpus.GPUS}
    return found | {kind: gpus.from_device(SimpleNamespace(device_kind=kind, compute_capability=c)) for kind, c in others}


def page() -> str:
    hopper = gpus.find("h200")
    results, why = ("output", "gradients"), "why not in the kernel"
    with jax.enable_x64(True):
        tables: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
            "devices": (
                ("device", *results, why),
                {name: where(mgpu_ops.flash_attention, call(), gpu) for name, gpu in devices().items()},
            ),
            "arguments": (
                ("call", *results, why),
                {what: where(mgpu_ops.flash_attention, arguments, hopper) for what, arguments in CALLS.items()},
            ),
            "transforms": (
                ("transformation", *results, why),
                {what: where(change(mgpu_ops.flash_attention), call(), hopper) for what, change in TRANSFORMS.items()},
            ),
            "drop_in": (
                ("call", "function", *results, "why not flash_attention, or not in the kernel"),
                {what: drop_in(arguments, hopper) for what, arguments in DROP_IN.items()},
            ),
        }
    sizes = {"batch": BATCH, "tokens": TOKENS, "heads": HEADS, "head_dim": HEAD_DIM}
    return PAGE.format(**{name: table(titles, rows) for name, (titles, rows) in tables.items()}, **sizes)


def table(titles: tuple[str, ...], rows: dict[str, tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *((what, *cells) for what, cells in rows.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    logging.getLogger("mgpu_ops").setLevel(logging.ERROR)  # that these calls run through XLA is what the page says
    new = page()
    if not check:
        FILE.write_text(new)
        return 0
    old = FILE.read_text() if FILE.exists() else ""
    lines = [x.splitlines(keepends=True) for x in (old, new)]
    sys.stdout.writelines(difflib.unified_diff(lines[0], lines[1], "the page", "the code"))
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
