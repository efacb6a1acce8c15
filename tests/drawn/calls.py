"""Draws calls of the public functions, most with their gradients: what they make of a call, several kernels of it above all.

The truth is the same function through XLA on a CPU: in float32, or of 8 bits of the same numbers. Each op has a random config
for each problem that the call would run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mgpu_ops
from mgpu_ops import SPECS, use_configs
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.capture import capture
from tests.drawn.case import Case, Wanted, config_of, short, side
from tests.drawn.ops import SIXTEEN, Sizes

_CALLS = 50  # drawn before one that kernels take
_LIMITS = {"bfloat16": 0.02, "float16": 0.003}  # of the norm of errors, as a share of the result's


@dataclasses.dataclass(frozen=True)
class Drawn:
    """function(*arrays, backend=): arrays by name, of which `of` have gradients. eight: it rounds to 8 bits itself.

    limit: of errors, where the dtype does not decide it.
    """

    label: str
    function: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    of: tuple[str, ...] = ()
    eight: bool = False
    limit: float | None = None


def case(seed: int, gpu: Gpu, tiny: bool) -> Case:
    rng = random.Random(f"calls {seed}")
    gpu = dataclasses.replace(gpu, sms=4 if tiny else rng.choice((4, 16, gpu.sms)))
    dtype, numbers = rng.choice(SIXTEEN), np.random.default_rng(seed)

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return (numbers.standard_normal(shape, np.float32) * size).astype(jnp.dtype(dtype))

    for _ in range(_CALLS):
        # Where the kernel of `quantize` is beside others, it is not interpreted: these always call it as the machine runs it.
        name = rng.choice([name for name in CALLS if not (tiny and name.startswith("fp8"))])
        drawn = CALLS[name](rng, Sizes.of(tiny), normal)
        of = drawn.of if rng.random() < 0.8 else ()
        how = rng.choice(WAYS[: 3 if tiny else 4]) if rng.random() < 0.4 else "as it is"
        arrays, cotangents = tuple(drawn.arrays.values()), ()
        if of:
            outs = jax.tree.leaves(jax.eval_shape(functools.partial(_with_gradients(drawn, ()), "xla"), *arrays))
            cotangents = tuple(numbers.standard_normal(x.shape, np.float32).astype(x.dtype) for x in outs)
        run, arrays = _called(how, _with_gradients(drawn, of, how == "checkpoint"), (*arrays, *cotangents))
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                uses = capture(functools.partial(run, "mosaic"), gpu)(*arrays).uses
            break
        except ValueError as e:
            if "cannot run" not in str(e):  # no kernel takes it
                raise
    else:
        raise RuntimeError("no call was found that kernels take")
    with jax.default_device(jax.devices("cpu")[0]):
        floats = [x.astype(np.float32) if x.dtype == jnp.dtype(dtype) and not drawn.eight else x for x in arrays]
        results = jax.tree.leaves(jax.jit(functools.partial(run, "xla"))(*floats))
    configs: dict[str, Any] = {}
    for use in uses:
        configs.setdefault(use.op, []).append((use.problem, config_of(SPECS[use.op], use.problem, gpu, rng)))

    def function(backend: str) -> Callable[..., Any]:
        def call(*xs: Any) -> Any:
            with gpus.target(gpu), use_configs(configs):
                return run(backend, *xs)

        return call

    label = f"{drawn.label} {dtype} gradients={of} {[f'{k}{list(v.shape)}' for k, v in drawn.arrays.items()]} sms={gpu.sms}"
    label += f" {how}"
    label += "".join(f" {short(problem)} {short(config)}" for pairs in configs.values() for problem, config in pairs)
    rounded = "bfloat16" if drawn.eight else dtype  # some numbers of 8 bits are rounded to their other neighbour
    limit = drawn.limit or _LIMITS[rounded] * (1.5 if of else 1.0)
    floor = float(jnp.finfo(dtype).tiny)  # numbers below have fewer digits: a gradient that is 0 may be one of these
    wanted = tuple(Wanted(f"result {i}", np.asarray(x), limit, "norm", floor=floor) for i, x in enumerate(results))
    attends = "attention" in name and bool(of)
    return Case(label, gpu, function, arrays, wanted, not attends)


WAYS = ("vmap", "scan", "transposed", "checkpoint")  # of calling; the last one is not interpreted


def _called(how: str, run: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> tuple[Callable[..., Any], Any]:
    """run(backend, *arrays) called in a way, and the arrays for it."""
    if how in ("vmap", "scan"):  # of two calls
        pairs = tuple(np.stack([x, x if x.dtype.kind == "i" else -x]) for x in arrays)
        if how == "vmap":
            return lambda backend, *xs: jax.vmap(functools.partial(run, backend))(*xs), pairs
        return lambda backend, *xs: jax.lax.map(lambda each: run(backend, *each), xs), pairs
    if how == "transposed":  # as other operations leave arrays: rows are not contiguous
        turned = tuple(np.ascontiguousarray(x.swapaxes(-1, -2)) if x.ndim > 1 else x for x in arrays)
        back = lambda x: jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x  # noqa: E731
        return lambda backend, *xs: run(backend, *map(back, xs)), turned
    return run, arrays


def _with_gradients(drawn: Drawn, of: tuple[str, ...], checkpoint: bool = False) -> Callable[..., Any]:
    """run(backend, *arrays, *cotangents): the results, and the gradients of some arrays."""
    names = list(drawn.arrays)

    def run(backend: str, *arrays: Any) -> Any:
        named = dict(zip(names, arrays, strict=False))

        def changed(*some: Any) -> Any:
            return drawn.function(**named | dict(zip(of, some, strict=True)), backend=backend)

        if not of:
            return changed()
        out, back = jax.vjp(jax.checkpoint(changed) if checkpoint else changed, *(named[name] for name in of))
        return out, back(jax.tree.unflatten(jax.tree.structure(out), arrays[len(names) :]))

    return run


def _matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    ta, tb = rng.random() < 0.3, rng.random() < 0.4
    batch = rng.choice(((), (), (), (2,), (3,)))
    m, n, k = side(rng, 1, s.rows, 8 if ta else 1), side(rng, 8, s.columns, 8), side(rng, 8, s.depth // 2, 8)
    if rng.random() < 0.8:
        m = -(-m // 8) * 8  # or its gradients run through XLA
    lead = rng.choice((batch, ()))
    arrays = {"a": normal(*batch, *((k, m) if ta else (m, k)))}
    arrays["b"] = normal(*lead, *((n, k) if tb else (k, n)), size=1 / math.sqrt(k))
    if rng.random() < 0.4:
        arrays["bias"] = normal(n)
    if rng.random() < 0.4:
        arrays["residual"] = normal(*batch, m, n)
    options: dict[str, Any] = {"transpose_a": ta, "transpose_b": tb, "activation": rng.choice((None, *ACTIVATIONS))}
    if not ta and rng.random() < 0.25:
        options["rms_epsilon"] = 1e-5

    def call(a: Any, b: Any, backend: str, **more: Any) -> Any:
        return mgpu_ops.matmul(
            a, b, **more, **options, backend=backend if m % 8 == 0 else backend.replace("mosaic", "") or None
        )

    return Drawn(f"matmul {options}", call, arrays, tuple(arrays))


def _gated_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k = side(rng, 8, s.rows, 8), side(rng, 8, s.columns // 2, 8), side(rng, 8, s.depth // 2, 8)
    options: dict[str, Any] = {"activation": rng.choice(list(ACTIVATIONS)), "transpose_w": rng.random() < 0.5}
    if rng.random() < 0.3:
        options["rms_epsilon"] = 1e-5
    shape = (n, k) if options["transpose_w"] else (k, n)
    arrays = {"x": normal(m, k), "w_gate": normal(*shape, size=1 / math.sqrt(k)), "w_up": normal(*shape, size=1 / math.sqrt(k))}
    return Drawn(f"gated_matmul {options}", lambda **xs: mgpu_ops.gated_matmul(**xs, **options), arrays, tuple(arrays))


def _gated_mlp(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k = side(rng, 8, s.rows, 8), side(rng, 8, s.columns // 2, 8), side(rng, 8, s.depth // 2, 8)
    d = k if rng.random() < 0.5 else side(rng, 8, s.depth // 2, 8)
    activation = rng.choice(list(ACTIVATIONS))
    arrays = {"x": normal(m, k), **{name: normal(k, n, size=1 / math.sqrt(k)) for name in ("w_gate", "w_up")}}
    arrays["w_down"] = normal(n, d, size=1 / math.sqrt(n))
    if rng.random() < 0.4:
        arrays["residual"] = normal(m, d)
    return Drawn(f"gated_mlp {activation}", lambda **xs: mgpu_ops.gated_mlp(**xs, activation=activation), arrays, tuple(arrays))


def _sizes(rng: random.Random, rows: int, groups: int) -> np.ndarray:
    shares = np.array([rng.choice((0.0, 0.2, 1.0, 1.0, 3.0)) for _ in range(groups)]) + 1e-9
    return np.floor(shares / shares.sum() * rows * rng.choice((1.0, 1.0, 0.7))).astype(np.int32)


def _grouped_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k, g = side(rng, 1, s.rows), side(rng, 8, s.columns // 2, 8), side(rng, 8, s.depth // 2, 8), rng.choice((1, 3, 4, 9))
    options: dict[str, Any] = {"transpose_rhs": rng.random() < 0.5, "activation": rng.choice((None, None, *ACTIVATIONS))}
    shape = (n, k) if options["transpose_rhs"] else (k, n)
    sizes = _sizes(rng, m, g)
    held = g
    if rng.random() < 0.3:
        held = rng.randint(1, g)
        options["group_offset"] = rng.randint(0, g - held)
    arrays = {"lhs": normal(m, k), "rhs": normal(held, *shape, size=1 / math.sqrt(k)), "group_sizes": sizes}
    of = ["lhs", "rhs"]
    if rng.random() < 0.4:
        arrays["bias"] = normal(held, n)
        of.append("bias")
    if rng.random() < 0.4:
        arrays["row_scale"] = np.asarray(normal(m), np.float32)
        of.append("row_scale")
    if rng.random() < 0.3:
        arrays["residual"] = normal(m, n)
        arrays["residual"][sizes.sum() :] = np.nan
        of.append("residual")
    if rng.random() < 0.3:
        rows = side(rng, 1, s.rows)
        arrays["lhs"] = normal(rows, k)
        arrays["row_indices"] = np.array([rng.randrange(rows) for _ in range(m)], np.int32)
    elif rng.random() < 0.7:
        arrays["lhs"][sizes.sum() :] = np.nan
    return Drawn(f"grouped_matmul {options}", lambda **xs: mgpu_ops.grouped_matmul(**xs, **options), arrays, tuple(of))


def _gated_grouped_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k, g = side(rng, 1, s.rows), side(rng, 8, s.columns // 2, 8), side(rng, 8, s.depth // 2, 8), rng.choice((1, 3, 4, 9))
    options: dict[str, Any] = {"transpose_w": rng.random() < 0.5, "activation": rng.choice(list(ACTIVATIONS))}
    shape = (n, k) if options["transpose_w"] else (k, n)
    sizes, weight = _sizes(rng, m, g), 1 / math.sqrt(k)
    arrays = {"lhs": normal(m, k), "w_gate": normal(g, *shape, size=weight), "w_up": normal(g, *shape, size=weight)}
    arrays["group_sizes"] = sizes
    if rng.random() < 0.3:
        rows = side(rng, 1, s.rows)
        arrays["lhs"] = normal(rows, k)
        arrays["row_indices"] = np.array([rng.randrange(rows) for _ in range(m)], np.int32)
    else:
        arrays["lhs"][sizes.sum() :] = np.nan
    call = lambda **xs: mgpu_ops.gated_grouped_matmul(**xs, **options)  # noqa: E731
    return Drawn(f"gated_grouped_matmul {options}", call, arrays, ("lhs", "w_gate", "w_up"))


def _moe(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k, g = (
        side(rng, 1, s.rows // 2),
        side(rng, 8, s.columns // 3, 8),
        side(rng, 8, s.depth // 4, 8),
        rng.choice((2, 4, 9)),
    )
    options = {"activation": rng.choice(list(ACTIVATIONS)), "norm_topk_prob": rng.random() < 0.5}
    top = rng.randint(1, min(g, 4))
    arrays = {"x": normal(m, k), "router_logits": np.asarray(normal(m, g), np.float32)}
    arrays |= {name: normal(g, k, n, size=1 / math.sqrt(k)) for name in ("w_gate", "w_up")}
    arrays["w_down"] = normal(g, n, k, size=1 / math.sqrt(n))
    return Drawn(f"moe {top} {options}", lambda **xs: mgpu_ops.moe(**xs, top_k=top, **options), arrays, tuple(arrays))


def _fp8_moe(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, g = side(rng, 1, s.rows // 2), rng.choice((2, 4, 9))
    n, k = side(rng, 16, s.columns // 3, 16), side(rng, 16, s.depth // 4, 16)
    options: dict[str, Any] = {"top_k": rng.randint(1, min(g, 4)), "norm_topk_prob": rng.random() < 0.5}
    arrays = {"x": normal(m, k), "router_logits": np.asarray(normal(m, g), np.float32)}
    arrays |= {name: normal(g, k, n, size=1 / math.sqrt(k)) for name in ("w_gate", "w_up")}
    arrays["w_down"] = normal(g, n, k, size=1 / math.sqrt(n))
    if rng.random() < 0.5:
        options["state"] = mgpu_ops.Fp8GatedState.init(2)
    of = tuple(name for name in arrays if name != "router_logits" or options["top_k"] > 1 or not options["norm_topk_prob"])
    label = f"fp8_moe {options['top_k']} {options['norm_topk_prob']} {'delayed' * ('state' in options)}"
    return Drawn(label, lambda **xs: mgpu_ops.fp8_moe(**xs, **options), arrays, of, True)


def _fp8_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k = side(rng, 16, s.rows, 16), side(rng, 16, s.columns, 16), side(rng, 16, s.depth // 2, 16)
    tb = rng.random() < 0.5
    options: dict[str, Any] = {"transpose_b": tb, "high_precision_weight_grad": rng.random() < 0.3}
    options["scheme"] = rng.choice(("tensor", "row", "block"))
    arrays = {"x": normal(m, k), "w": normal(*((n, k) if tb else (k, n)))}
    if rng.random() < 0.3:
        arrays["bias"] = normal(n)
    if rng.random() < 0.3:
        arrays["residual"] = normal(m, n)
    return Drawn(f"fp8_matmul {options}", lambda **xs: mgpu_ops.fp8_matmul(**xs, **options), arrays, tuple(arrays), True)


def _fp8_gated_mlp(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k = side(rng, 16, s.rows, 16), side(rng, 16, s.columns // 2, 16), side(rng, 16, s.depth // 2, 16)
    arrays = {"x": normal(m, k), **{name: normal(k, n, size=1 / math.sqrt(k)) for name in ("w_gate", "w_up")}}
    arrays["w_down"] = normal(n, k, size=1 / math.sqrt(n))
    options = {"state": mgpu_ops.Fp8GatedState.init(2)} if rng.random() < 0.5 else {}
    call = lambda **xs: mgpu_ops.fp8_gated_mlp(**xs, **options)  # noqa: E731
    return Drawn(f"fp8_gated_mlp {' '.join(options)}", call, arrays, tuple(arrays), True)


def _fp8_grouped_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k, g = (
        side(rng, 16, s.rows, 16),
        side(rng, 16, s.columns // 2, 16),
        side(rng, 16, s.depth // 2, 16),
        rng.choice((1, 3, 9)),
    )
    tb = rng.random() < 0.5
    options = {"transpose_rhs": tb, "scheme": rng.choice(("tensor", "row", "block"))}
    arrays = {"lhs": normal(m, k), "rhs": normal(g, *((n, k) if tb else (k, n))), "group_sizes": _sizes(rng, m, g)}
    arrays["lhs"][arrays["group_sizes"].sum() :] = np.nan
    call = lambda **xs: mgpu_ops.fp8_grouped_matmul(**xs, **options)  # noqa: E731
    return Drawn(f"fp8_grouped_matmul {options}", call, arrays, ("lhs", "rhs"), True)


def _rotary_attention(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    kv, d, t = rng.choice((1, 2, 3)), rng.choice((64, 128, 128, 128, 256)), side(rng, 1, s.rows // 2)
    heads = kv * rng.choice((1, 2, 4))
    angles = np.random.default_rng(1).uniform(0, 6, (t, d // 2)).astype(np.float32)
    arrays = {"qkv": normal(rng.choice((1, 2)), t, (heads + 2 * kv) * d), "cos": np.cos(angles), "sin": np.sin(angles)}
    options = {"heads": heads, "kv_heads": kv, "causal": rng.random() < 0.6}
    norms = _norms(rng, d)
    run = lambda **xs: mgpu_ops.rotary_attention(**xs, **options)  # noqa: E731
    return Drawn(f"rotary_attention {options} {list(norms)}", run, arrays | norms, ("qkv", *norms))


def _norms(rng: random.Random, head_dim: int) -> dict[str, Any]:
    """Weights of the norms of q and k, or none."""
    if rng.random() < 0.5:
        return {}
    numbers = np.random.default_rng(2).uniform(0.5, 1.5, (2, head_dim)).astype(np.float32)
    return dict(zip(("q_norm", "k_norm"), numbers, strict=True))


def _rotary_into_cache(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    d = rng.choice((64, 128, 256))
    kv = rng.choice((1, 2, 4, 8))
    kv = max(kv, 256 // d)
    b, tokens, heads = rng.randint(1, 9), side(rng, 1, s.rows // 4), kv * rng.choice((1, 2, 4))
    angles = np.random.default_rng(1).uniform(0, 6, (b, d // 2)).astype(np.float32)
    arrays = {"qkv": normal(b, (heads + 2 * kv) * d), "cos": np.cos(angles), "sin": np.sin(angles)}
    if rng.random() < 0.3:  # pages that each belong to one sequence, and some that are none
        size, each = rng.choice((1, 4, 16)), rng.randint(1, 5)
        tokens, table = size * each, rng.sample(range(b * each + 2), b * each)
        arrays |= {name: normal(b * each + 2, size, kv, d) for name in ("k_cache", "v_cache")}
        named = [page if rng.random() < 0.9 else -1 for page in table]
        arrays["page_table"] = np.array(named, np.int32).reshape(b, each)
    else:
        arrays |= {name: normal(b, tokens, kv, d) for name in ("k_cache", "v_cache")}
    arrays["positions"] = np.array(
        [rng.choice((-5, 0, tokens - 1, tokens + 9, rng.randrange(tokens))) for _ in range(b)], np.int32
    )
    if rng.random() < 0.5:
        arrays["rms_rows"] = normal(b, side(rng, 128, 2048, 128))
    norms = _norms(rng, d)
    return Drawn(f"rotary_into_cache {list(norms)}", lambda **xs: mgpu_ops.rotary_into_cache(**xs), arrays | norms)


def _gated_activation(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    rows, n = side(rng, 1, 300), side(rng, 128, s.columns, 128)
    activation = rng.choice(list(ACTIVATIONS))
    arrays = {"gate_up": normal(rows, 2 * n)}
    if rng.random() < 0.5:
        arrays["rms_rows"] = normal(rows, side(rng, 128, 2048, 128))
    return Drawn(f"gated_activation {activation}", lambda **xs: mgpu_ops.gated_activation(**xs, activation=activation), arrays)


def _small(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    rows, numbers = side(rng, 1, s.rows), np.random.default_rng(3)
    kind = rng.choice(("rms_norm", "cross_entropy", "embedding", "rotary_qkv"))
    if kind == "rms_norm":
        width = side(rng, 128, s.columns, 128)
        return Drawn(
            kind, lambda **xs: mgpu_ops.rms_norm(**xs), {"x": normal(rows, width), "weight": normal(width)}, ("x", "weight")
        )
    if kind == "cross_entropy":
        v = side(rng, 8, 4 * s.columns, 8)
        arrays = {"logits": normal(rows, v), "labels": numbers.integers(-1, v, rows).astype(np.int32)}
        return Drawn(kind, lambda **xs: mgpu_ops.cross_entropy(**xs), arrays, ("logits",))
    if kind == "embedding":
        v = side(rng, 1, s.rows)
        arrays = {"table": normal(v, side(rng, 256, s.columns, 256)), "tokens": numbers.integers(0, v, rows).astype(np.int32)}
        return Drawn(kind, lambda **xs: mgpu_ops.embedding(**xs), arrays, ("table",))
    kv, d, t = rng.choice((1, 2, 3)), rng.choice((64, 128, 256)), side(rng, 1, s.rows // 2)
    heads = kv * rng.choice((1, 2, 4))
    angles = numbers.uniform(0, 6, (t, d // 2)).astype(np.float32)
    arrays = {"qkv": normal(2, t, (heads + 2 * kv) * d), "cos": np.cos(angles), "sin": np.sin(angles)}
    norms = _norms(rng, d)
    run = lambda **xs: mgpu_ops.rotary_qkv(**xs, heads=heads, kv_heads=kv)  # noqa: E731
    return Drawn(f"{kind} {list(norms)}", run, arrays | norms, ("qkv", *norms))


def _float32(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    """Products of float32, each as exact as it is asked for."""
    m, n, k = side(rng, 8, s.rows, 8), side(rng, 8, s.columns, 8), side(rng, 8, s.depth // 2, 8)
    precision, limit = rng.choice((("highest", 1e-5), ("high", 1e-4), ("tensorfloat32", 5e-3), ("default", 5e-3), (None, 5e-3)))
    ta, tb = rng.random() < 0.3, rng.random() < 0.4
    arrays = {"a": np.asarray(normal(*((k, m) if ta else (m, k))), np.float32) / 3}
    arrays["b"] = np.asarray(normal(*((n, k) if tb else (k, n))), np.float32) / 3
    if rng.random() < 0.4:
        arrays["bias"] = np.asarray(normal(n), np.float32)
    options = {"precision": precision, "transpose_a": ta, "transpose_b": tb, "activation": rng.choice((None, *ACTIVATIONS))}
    call = lambda **xs: mgpu_ops.matmul(**xs, **options)  # noqa: E731
    return Drawn(f"matmul {options}", call, arrays, tuple(arrays), limit=limit)


_PRODUCTS = ("bmk,bkn->bmn", "mk,kn->nm", "abk,kn->abn", "kmb,bkn->bmn", "bmak,bnak->bamn", "btk,kad->btad", "mk,nk->mn")


def _einsum(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    subscripts = rng.choice(_PRODUCTS)
    sizes = {x: side(rng, 8, s.depth // 3, 8) for x in "mnkt"} | {"a": rng.choice((2, 8)), "b": rng.choice((1, 3)), "d": 64}
    shapes = [[sizes[x] for x in part] for part in subscripts.split("->")[0].split(",")]
    arrays = {"a": normal(*shapes[0]), "b": normal(*shapes[1], size=1 / math.sqrt(sizes["k"]))}
    call = lambda a, b, backend: mgpu_ops.einsum(subscripts, a, b, backend=backend)  # noqa: E731
    return Drawn(f"einsum {subscripts}", call, arrays, ("a", "b"))


def _weights(rng: random.Random, normal: Any, k: int, n: int, *lead: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(options, {w, scales and perhaps zero_points}) of weights of 8 bits."""
    group, turned, numbers = rng.choice((0, 0, 32, 64)), rng.random() < 0.5, np.random.default_rng(rng.getrandbits(32))
    w = numbers.integers(-127, 128, (*lead, n, k) if turned else (*lead, k, n)).astype(np.int8)
    scales = np.abs(normal(*lead, *((k // group, n) if group and k % group == 0 else (n,)), size=0.02 / math.sqrt(k)))
    found = {"w": w, "scales": scales}
    if rng.random() < 0.4:
        found["zero_points"] = numbers.integers(-9, 10, scales.shape).astype(scales.dtype)
    return {"turned": turned}, found


def _quantized_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m = side(rng, 1, 64) if rng.random() < 0.5 else side(rng, 1, s.rows)
    n, k = side(rng, 16, s.columns, 16), side(rng, 128, max(s.depth, 128), 64)
    how, arrays = _weights(rng, normal, k, n)
    added = {"bias": normal(n)} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        added["residual"] = normal(m, n)
    call = lambda **xs: mgpu_ops.quantized_matmul(**xs, transpose_w=how["turned"])  # noqa: E731
    return Drawn(f"quantized_matmul {how}", call, {"x": normal(m, k)} | arrays | added, ("x", *added))


def _quantized_grouped_matmul(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, n, k, g = side(rng, 1, s.rows), side(rng, 16, s.columns // 2, 16), side(rng, 128, max(s.depth // 2, 128), 64), 4
    how, arrays = _weights(rng, normal, k, n, g)
    arrays = {"lhs": normal(m, k), "rhs": arrays.pop("w"), "group_sizes": _sizes(rng, m, g)} | arrays
    arrays["lhs"][arrays["group_sizes"].sum() :] = np.nan
    call = lambda **xs: mgpu_ops.quantized_grouped_matmul(**xs, transpose_rhs=how["turned"])  # noqa: E731
    return Drawn(f"quantized_grouped_matmul {how}", call, arrays, ("lhs",))


def _moe_experts(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    """Some of the experts; one may be named that is none."""
    m, n, k = side(rng, 1, s.rows // 2), side(rng, 8, s.columns // 3, 8), side(rng, 8, s.depth // 4, 8)
    total, top, numbers = rng.choice((4, 9)), rng.randint(1, 3), np.random.default_rng(rng.getrandbits(32))
    held = rng.randint(1, total)
    options = {"num_experts": total, "group_offset": rng.randint(0, total - held), "activation": rng.choice(list(ACTIVATIONS))}
    chosen = np.stack([numbers.permutation(total)[:top] for _ in range(m)]).astype(np.int32)
    arrays = {"x": normal(m, k), "weights": np.asarray(normal(m, top), np.float32), "experts": chosen}
    arrays |= {name: normal(held, k, n, size=1 / math.sqrt(k)) for name in ("w_gate", "w_up")}
    arrays["w_down"] = normal(held, n, k, size=1 / math.sqrt(n))
    call = lambda **xs: mgpu_ops.moe_experts(**xs, **options)  # noqa: E731
    return Drawn(f"moe_experts {options}", call, arrays, ("x", "weights", "w_gate", "w_up", "w_down"))


def _quantized_moe(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    m, g, depth = side(rng, 1, s.rows // 2), rng.choice((2, 4, 9)), max(s.depth // 4, 128)
    n, k, numbers = side(rng, 64, depth, 64), side(rng, 64, depth, 64), np.random.default_rng(rng.getrandbits(32))
    options = {"activation": rng.choice(list(ACTIVATIONS)), "norm_topk_prob": rng.random() < 0.5}
    top, group = rng.randint(1, min(g, 4)), rng.choice((0, 32, 64))
    arrays = {"x": normal(m, k), "router_logits": np.asarray(normal(m, g), np.float32)}
    for of, rows, depth in (("gate_up", 2 * n, k), ("down", k, n)):
        arrays[f"w_{of}"] = numbers.integers(-127, 128, (g, rows, depth)).astype(np.int8)
        shape = (g, depth // group, rows) if group else (g, rows)
        arrays[f"{of}_scales"] = np.abs(normal(*shape, size=0.02 / math.sqrt(depth)))
        if rng.random() < 0.4:
            arrays[f"{of}_zero_points"] = numbers.integers(-9, 10, shape).astype(arrays["x"].dtype)
    call = lambda **xs: mgpu_ops.quantized_moe(**xs, top_k=top, **options)  # noqa: E731
    return Drawn(f"quantized_moe {top} {options}", call, arrays, ("x", "router_logits"))


def _dot_product_attention(rng: random.Random, s: Sizes, normal: Any) -> Drawn:
    t, kv, d, b = side(rng, 1, s.rows // 2), rng.choice((1, 2)), rng.choice((64, 128)), rng.choice((1, 2))
    keys = t if rng.random() < 0.5 else side(rng, 1, s.rows // 2)
    heads, numbers = kv * rng.choice((1, 2, 4)), np.random.default_rng(rng.getrandbits(32))
    arrays = {"query": normal(b, t, heads, d), "key": normal(b, keys, kv, d), "value": normal(b, keys, kv, d)}
    of = ["query", "key", "value"]
    options: dict[str, Any] = {"is_causal": rng.random() < 0.4}
    if rng.random() < 0.3:
        options["local_window_size"] = (rng.randint(0, 200), rng.randint(0, 200))
    if rng.random() < 0.3:
        arrays["bias"] = normal(1, heads, t, keys)
        of.append("bias")
    if rng.random() < 0.3:
        arrays["query_seq_lengths"] = numbers.integers(1, t + 1, b).astype(np.int32)
        arrays["key_value_seq_lengths"] = numbers.integers(1, keys + 1, b).astype(np.int32)
    call = lambda **xs: mgpu_ops.dot_product_attention(**xs, **options)  # noqa: E731
    return Drawn(f"dot_product_attention {options}", call, arrays, tuple(of))


CALLS: dict[str, Callable[[random.Random, Sizes, Any], Drawn]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "gated_mlp": _gated_mlp,
    "grouped_matmul": _grouped_matmul,
    "gated_grouped_matmul": _gated_grouped_matmul,
    "moe": _moe,
    "fp8_moe": _fp8_moe,
    "fp8_matmul": _fp8_matmul,
    "fp8_gated_mlp": _fp8_gated_mlp,
    "fp8_grouped_matmul": _fp8_grouped_matmul,
    "rotary_attention": _rotary_attention,
    "rotary_into_cache": _rotary_into_cache,
    "gated_activation": _gated_activation,
    "small": _small,
    "float32": _float32,
    "einsum": _einsum,
    "quantized_matmul": _quantized_matmul,
    "quantized_grouped_matmul": _quantized_grouped_matmul,
    "moe_experts": _moe_experts,
    "quantized_moe": _quantized_moe,
    "dot_product_attention": _dot_product_attention,
}
