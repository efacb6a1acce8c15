"""Draws calls of arrays that are sharded over eight CPU devices: do they give what one device does?

    python -m tests.drawn.sharded --seconds 300 [--seed 0] [--only SEED ...]

A seed decides the function and its options, the sizes (which devices may not divide), the mesh and the kind of its axes, how
each array is sharded, and the way of calling: under jit, vmap, jax.checkpoint, in a scan, inside jax.shard_map over some axes.
Explicit axes may refuse what they would have to move: with a message that names how to reshard.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {quick}"

import argparse
import logging
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops

type Call = tuple[str, Callable[..., Any], list[np.ndarray], tuple[int, ...]]  # label, function, arrays, those with gradients
_MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (5,), (1, 8))


def _normal(rng: random.Random, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(rng.getrandbits(32)).standard_normal(shape), dtype)


def _side(rng: random.Random) -> int:
    return rng.choice((8, 16, 24, 32, 48, 64, 6, 12, 15, 20, 30, 40))


def _matmul(rng: random.Random) -> Call:
    m, n, k, batch = _side(rng), _side(rng), _side(rng), rng.choice(((), (), (4,), (6,), (2, 4)))
    ta, tb = rng.random() < 0.3, rng.random() < 0.3
    lead_b = rng.choice((batch, ()))
    a = _normal(rng, *batch, *((k, m) if ta else (m, k)))
    b = _normal(rng, *lead_b, *((n, k) if tb else (k, n))) / math.sqrt(k)
    arrays, names = [a, b], ["a", "b"]
    if rng.random() < 0.4:
        arrays.append(_normal(rng, n))
        names.append("bias")
    if rng.random() < 0.4:
        arrays.append(_normal(rng, *batch, m, n))
        names.append("residual")
    options: dict[str, Any] = {"activation": rng.choice((None, None, "gelu", "silu", "relu"))}
    if not ta and rng.random() < 0.3:
        options["rms_epsilon"] = 1e-5
    options |= {"transpose_a": ta, "transpose_b": tb}

    def call(a: Any, b: Any, *more: Any) -> Any:
        return mgpu_ops.matmul(a, b, **dict(zip(names[2:], more, strict=True)), **options)

    return f"matmul {names} {options}", call, arrays, tuple(range(len(arrays)))


def _gated_mlp(rng: random.Random) -> Call:
    m, h, k = _side(rng), _side(rng), _side(rng)
    arrays = [_normal(rng, m, k), *(_normal(rng, k, h) / math.sqrt(k) for _ in "gu"), _normal(rng, h, k) / math.sqrt(h)]
    if rng.random() < 0.4:
        arrays.append(_normal(rng, m, k))

    def call(x: Any, g: Any, u: Any, d: Any, *r: Any) -> Any:
        return mgpu_ops.gated_mlp(x, g, u, d, **({"residual": r[0]} if r else {}))

    return "gated_mlp", call, arrays, tuple(range(len(arrays)))


def _gated_matmul(rng: random.Random) -> Call:
    m, h, k = _side(rng), _side(rng), _side(rng)
    arrays = [_normal(rng, m, k), *(_normal(rng, k, h) / math.sqrt(k) for _ in "gu")]
    activation = rng.choice(("silu", "gelu", "relu"))
    return f"gated_matmul {activation}", lambda *x: mgpu_ops.gated_matmul(*x, activation=activation), arrays, (0, 1, 2)


def _rms_norm(rng: random.Random) -> Call:
    lead = rng.choice(((), (4,), (6, 2)))
    k = _side(rng)
    return "rms_norm", lambda x, w: mgpu_ops.rms_norm(x, w), [_normal(rng, *lead, _side(rng), k), _normal(rng, k)], (0, 1)


def _rotary(rng: random.Random) -> Call:
    b, t, kv, group = rng.choice((1, 2, 4, 6)), _side(rng), rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    d, heads = 16, kv * group
    angles = _normal(rng, t, d // 2)
    arrays = [_normal(rng, b, t, (heads + 2 * kv) * d), np.cos(angles), np.sin(angles)]
    norms = ("q_norm", "k_norm") if rng.random() < 0.5 else ()
    arrays += [1 + _normal(rng, d) / 3 for _ in norms]
    of = (0, *range(3, 3 + len(norms)))
    if rng.random() < 0.5:
        rotate = lambda x, c, s, *w: mgpu_ops.rotary_qkv(x, c, s, heads=heads, kv_heads=kv, **dict(zip(norms, w)))  # noqa: E731
        return f"rotary_qkv {norms}", rotate, arrays, of
    options = {"heads": heads, "kv_heads": kv, "causal": rng.random() < 0.5}
    attend = lambda x, c, s, *w: mgpu_ops.rotary_attention(x, c, s, **options, **dict(zip(norms, w)))  # noqa: E731
    return f"rotary_attention {options} {norms}", attend, arrays, of


def _embedding(rng: random.Random) -> Call:
    v, w, shape = _side(rng), _side(rng), rng.choice(((_side(rng),), (4, _side(rng))))
    tokens = np.random.default_rng(rng.getrandbits(32)).integers(0, v, shape).astype(np.int32)
    return "embedding", lambda t, i: mgpu_ops.embedding(t, i), [_normal(rng, v, w), tokens], (0,)


def _cross_entropy(rng: random.Random) -> Call:
    v, shape = _side(rng), rng.choice(((_side(rng),), (4, _side(rng))))
    labels = np.random.default_rng(rng.getrandbits(32)).integers(-1, v, shape).astype(np.int32)
    lse = rng.random() < 0.5
    return (
        f"cross_entropy {lse}",
        lambda x, y: mgpu_ops.cross_entropy(x, y, return_lse=lse),
        [_normal(rng, *shape, v), labels],
        (0,),
    )


def _quantized(rng: random.Random) -> Call:
    m, n, group = _side(rng), _side(rng), rng.choice((0, 0, 32))
    k = 32 * rng.randint(1, 4) if group else _side(rng)
    numbers = np.random.default_rng(rng.getrandbits(32))
    tb = rng.random() < 0.5
    w = numbers.integers(-127, 127, (n, k) if tb else (k, n)).astype(np.int8)
    scales = _normal(rng, k // group, n) if group else _normal(rng, n)
    more: dict[str, Any] = {}
    if rng.random() < 0.4:
        more["zero_points"] = np.asarray(numbers.integers(-9, 9, scales.shape), np.float32)
    if rng.random() < 0.4:
        more["bias"] = _normal(rng, n)
    if rng.random() < 0.4:
        more["residual"] = _normal(rng, m, n)
    arrays = [_normal(rng, m, k), w, scales / 100, *more.values()]

    def call(x: Any, w: Any, s: Any, *others: Any) -> Any:
        return mgpu_ops.quantized_matmul(x, w, s, transpose_w=tb, **dict(zip(more, others, strict=True)))

    of = (0, *(i for i, name in enumerate(more, 3) if name != "zero_points"))
    return f"quantized_matmul {tb} group={group} {list(more)}", call, arrays, of


def _fp8(rng: random.Random) -> Call:
    scheme = rng.choice(("tensor", "row", "block"))
    m, n, k = _side(rng), _side(rng), _side(rng)
    arrays = [_normal(rng, m, k, dtype=jnp.bfloat16), _normal(rng, k, n, dtype=jnp.bfloat16)]
    return f"fp8_matmul {scheme}", lambda x, w: mgpu_ops.fp8_matmul(x, w, scheme=scheme), arrays, (0, 1)


def _attention(rng: random.Random) -> Call:
    b, t, s = rng.choice((1, 2, 4, 6)), _side(rng), _side(rng)
    kv, group, d = rng.choice((1, 2, 4, 3)), rng.choice((1, 2, 4)), 16
    h = kv * group
    arrays = [_normal(rng, b, t, h, d), _normal(rng, b, s, kv, d), _normal(rng, b, s, kv, d)]
    names, of = ["q", "k", "v"], [0, 1, 2]
    options: dict[str, Any] = {"causal": rng.random() < 0.4, "return_lse": rng.random() < 0.5}
    if rng.random() < 0.4:
        of.append(len(arrays))
        names.append("bias")
        arrays.append(_normal(rng, rng.choice((1, b)), rng.choice((1, h)), rng.choice((1, t)), s))
    if rng.random() < 0.3:
        of.append(len(arrays))
        names.append("sinks")
        arrays.append(_normal(rng, h))
    numbers = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.3:
        names.append("kv_lengths")
        arrays.append(numbers.integers(0, s + 1, b).astype(np.int32))
    if rng.random() < 0.3:
        names += ["q_segment_ids", "kv_segment_ids"]
        arrays += [np.sort(numbers.integers(0, 3, (b, n)), 1).astype(np.int32) for n in (t, s)]
    if rng.random() < 0.2:
        names.append("mask")
        arrays.append(numbers.random((rng.choice((1, b)), 1, t, s)) < 0.8)

    def call(*x: Any) -> Any:
        return mgpu_ops.flash_attention(**dict(zip(names, x, strict=True)), **options)

    return f"flash_attention {names} {options}", call, arrays, tuple(of)


def _groups(rng: random.Random, m: int, g: int) -> np.ndarray:
    sizes = np.random.default_rng(rng.getrandbits(32)).multinomial(m, np.ones(g) / g).astype(np.int32)
    if rng.random() < 0.4:
        sizes[rng.randrange(g)] = 0
    return sizes


def _grouped(rng: random.Random) -> Call:
    m, n, k, g = _side(rng), _side(rng), _side(rng), rng.choice((2, 4, 3, 8))
    kind = rng.choice(("grouped", "grouped", "gated", "contraction", "quantized"))
    sizes = _groups(rng, m, g)
    if kind == "gated":
        arrays = [_normal(rng, m, k), _normal(rng, g, k, n), _normal(rng, g, k, n), sizes]
        return "gated_grouped_matmul", lambda *x: mgpu_ops.gated_grouped_matmul(*x), arrays, (0, 1, 2)
    if kind == "contraction":
        arrays = [_normal(rng, m, k), _normal(rng, m, n), sizes]
        return "ragged_contraction", lambda *x: mgpu_ops.ragged_contraction(*x), arrays, (0, 1)
    if kind == "quantized":
        w = np.random.default_rng(rng.getrandbits(32)).integers(-127, 127, (g, k, n)).astype(np.int8)
        arrays = [_normal(rng, m, k), w, _normal(rng, g, n) / 100, sizes]
        return "quantized_grouped_matmul", lambda *x: mgpu_ops.quantized_grouped_matmul(*x), arrays, (0,)
    tb, names = rng.random() < 0.4, []
    arrays = [_normal(rng, m, k), _normal(rng, g, *((n, k) if tb else (k, n))), sizes]
    if rng.random() < 0.4:
        names.append("bias")
        arrays.append(_normal(rng, g, n))
    if rng.random() < 0.4:
        names.append("row_scale")
        arrays.append(_normal(rng, m))
    if rng.random() < 0.3:
        names.append("residual")
        arrays.append(_normal(rng, m, n))
    activation = rng.choice((None, None, "gelu", "relu"))

    def call(x: Any, w: Any, sizes: Any, *more: Any) -> Any:
        named = dict(zip(names, more, strict=True))
        return mgpu_ops.grouped_matmul(x, w, sizes, transpose_rhs=tb, activation=activation, **named)

    return f"grouped_matmul {names} {tb} {activation}", call, arrays, (0, 1, *range(3, len(arrays)))


def _moe(rng: random.Random) -> Call:
    m, h, k, g = _side(rng), _side(rng), _side(rng), rng.choice((2, 4, 8))
    arrays = [_normal(rng, m, k), _normal(rng, m, g), _normal(rng, g, k, h), _normal(rng, g, k, h), _normal(rng, g, h, k)]
    top = rng.randint(1, min(3, g))
    return f"moe {top}", lambda *x: mgpu_ops.moe(*x, top), arrays, (0, 1, 2, 3, 4)


_CALLS = (
    _matmul, _matmul, _gated_mlp, _gated_matmul, _rms_norm, _rotary, _embedding, _cross_entropy, _quantized, _fp8, _attention,
    _attention, _grouped, _grouped, _moe,
)  # fmt: skip


def with_gradients(function: Callable[..., Any], of: tuple[int, ...]) -> Callable[..., Any]:
    """The results, and the gradients of some arguments."""

    def both(*arrays: Any) -> Any:
        def changed(*some: Any) -> Any:
            return function(*(some[of.index(i)] if i in of else x for i, x in enumerate(arrays)))

        out, back = jax.vjp(changed, *(arrays[i] for i in of))
        return out, back(jax.tree.map(lambda x: jnp.cos(x).astype(x.dtype) if x.dtype != jax.dtypes.float0 else x, out))

    return both


def spec_of(rng: random.Random, shape: tuple[int, ...], mesh: Any, explicit: bool) -> P:
    """Axes for some dimensions; each once, and only where they divide it."""
    free, found = list(mesh.axis_names), []
    rng.shuffle(free)
    for size in shape:
        axes: list[str] = []
        while free and rng.random() < 0.4:
            parts = math.prod(mesh.shape[a] for a in (*axes, free[-1]))
            if size % parts:
                break
            axes.append(free.pop())
        found.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return P(*found)


def run(seed: int) -> tuple[str, str]:
    """What came of a seed, and what it was."""
    rng = random.Random(seed)
    label, function, arrays, of = rng.choice(_CALLS)(rng)
    explicit = rng.random() < 0.35
    if rng.random() < 0.7:
        function = with_gradients(function, of)
        label += " with gradients"
    how = rng.choice(("jit", "jit", "checkpoint", "vmap", "scan", "shard_map", "vmap one", "x64"))
    if how == "checkpoint":
        function = jax.checkpoint(function)
    elif how == "vmap":
        arrays, function = (
            [np.stack([x] * 4) if i % 2 == 0 else np.stack([x[::-1]] * 4) for i, x in enumerate(arrays)],
            jax.vmap(function),
        )
    elif how == "vmap one":
        chosen = rng.randrange(len(arrays))
        arrays[chosen] = np.stack([arrays[chosen]] * 4)
        function = jax.vmap(function, in_axes=[0 if i == chosen else None for i in range(len(arrays))])
    elif how == "scan":
        plain = function
        function = lambda *xs: jax.lax.scan(lambda c, _: (c, plain(*xs)), 0, None, length=2)[1]  # noqa: E731
    sizes = rng.choice(_MESHES)
    names = ("data", "model", "third")[: len(sizes)]
    kinds = tuple(AxisType.Explicit if explicit else AxisType.Auto for _ in sizes)
    if explicit and len(sizes) > 1 and rng.random() < 0.5:
        kinds = (AxisType.Auto, *kinds[1:])
    mesh = jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: math.prod(sizes)])
    wanted = jax.tree.leaves(jax.jit(function)(*map(jnp.asarray, arrays)))
    specs = [spec_of(rng, x.shape, mesh, explicit) for x in arrays]
    label += f" {how} mesh={dict(mesh.shape)} {[k.name for k in kinds]}"
    label += f" {[f'{x.shape}:{s}' for x, s in zip(arrays, specs, strict=True)]}"
    if how == "shard_map":  # manual over one axis, by which everything is replicated
        manual = names[0]
        plain = function
        rest = [P(*(None if a == manual or (isinstance(a, tuple) and manual in a) else a for a in s)) for s in specs]
        specs = rest
        function = jax.shard_map(plain, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={manual}, check_vma=False)
    given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    try:
        if how == "x64":
            with jax.enable_x64(True):
                found = jax.tree.leaves(jax.jit(function)(*given))
        else:
            found = jax.tree.leaves(jax.jit(function)(*given))
    except Exception as e:
        text = str(e)
        if explicit and (
            "reshard" in text or "sharding" in text.lower() or "Mapped away dimension" in text or "Unmapped values" in text
        ):
            return "refused", f"{label}\n  {text[:300]}"
        place = traceback.extract_tb(e.__traceback__)[-1]
        return "error", f"{label}\n  {type(e).__name__}: {text[:600]} ({place.filename}:{place.lineno})"
    worst = 0.0
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        if x.shape != y.shape:
            return "wrong", f"{label}\n  result {i} has shape {x.shape}, not {y.shape}"
        scale = max(1e-3, np.sqrt(np.mean(np.where(np.isfinite(y), y, 0) ** 2)))
        with np.errstate(all="ignore"):
            off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y) / (np.abs(y) + scale))
        worst = max(worst, float(np.max(off, initial=0)) if not np.isnan(off).any() else math.inf)
        if "fp8" in label:  # another order of sums may round to the next number of 8 bits
            worst = float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-6))
        limit = 0.06 if "fp8" in label else 3e-4
        if not worst <= limit:
            return "wrong", f"{label}\n  result {i} is off by {worst:.3g}"
    return "ok", label


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", type=int, nargs="*", metavar="SEED")
    options = parser.parse_args()
    logging.getLogger("mgpu_ops").setLevel(logging.ERROR)
    end, seed, counts = time.monotonic() + options.seconds, options.seed, Counter[str]()
    todo = options.only
    while time.monotonic() < end and (todo is None or todo):
        if todo is not None:
            seed = todo.pop(0)
        print(f"seed {seed}", end="\r", file=sys.stderr, flush=True)  # the last word where XLA's partitioner aborts the process
        kind, what = run(seed)
        counts[kind] += 1
        if kind not in ("ok", "refused") or options.only:
            print(f"{kind}: {what}\n  --only {seed}", flush=True)
        seed += 1
        if seed % 50 == 0:
            jax.clear_caches()
    print(", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    return bool(counts["wrong"] + counts["error"])


if __name__ == "__main__":
    sys.exit(main())
