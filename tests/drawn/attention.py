"""Draws calls of flash_attention and of its gradients: each option of the public function, and configs for each pass.

The truth is `cases.truth`, NumPy's float64. What lengths cut off, and pages that no entry has, are NaN.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mgpu_ops import SPECS, flash_attention, use_configs
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.kv_cache import DTYPES
from mgpu_ops.registry.capture import capture
from tests.arrays import normal
from tests.drawn.case import Case, Wanted, config_of, short, side
from tests.mgpu_ops.attention import cases, paged, quantized

HEAD_DIMS = (64, 128, 80, 96, 112, 160, 192, 224, 256, 40, 72)
_LIMITS = {"bfloat16": 1.0, "float16": 0.15}  # of errors in bfloat16, which are below
_FORWARD, _GRADIENT, _LSE = 0.03, 0.12, 2e-3
_FLOOR = 0.01  # of the size that errors are a share of


def forward(seed: int, gpu: Gpu, tiny: bool) -> Case:
    return _case("flash_attention", seed, gpu, tiny)


def gradients(seed: int, gpu: Gpu, tiny: bool) -> Case:
    return _case("flash_attention_backward", seed, gpu, tiny)


def pages(seed: int, gpu: Gpu, tiny: bool) -> Case:
    """Decoding from a paged cache."""
    rng = random.Random(f"pages {seed}")
    gpu = dataclasses.replace(gpu, sms=4 if tiny else rng.choice((4, 16, gpu.sms)))
    page_size, batch = rng.choice((16, 32, 64, 128, 256)), rng.randint(1, 4)
    pages_each = max(1, side(rng, page_size, 300 if tiny else 3000) // page_size)
    kv_heads, group, q_tokens = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 5, 8)), rng.choice((1, 1, 1, 2, 4, 7))
    lengths = tuple(rng.randint(0, pages_each * page_size) for _ in range(batch)) if rng.random() < 0.8 else None
    options = _of_decoding(rng)
    dtype = rng.choice(("bfloat16", "float16"))
    drawn = paged.draw(
        seed,
        page_size=page_size,
        pages_each=pages_each,
        lengths=lengths,
        batch=batch,
        q_tokens=q_tokens,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=rng.choice((64, 128, 256)),
        dtype=dtype,
        sinks=rng.random() < 0.3,
        **options,
    )
    named = {k: np.asarray(v) for k, v in drawn.options.items() if k in ("kv_lengths", "sinks")}
    arrays = {"q": np.asarray(drawn.q), **dict(zip("kv", map(np.asarray, drawn.arrays[1:]), strict=True))}
    arrays |= {"page_table": drawn.table.astype(np.int32)} | named
    found = cases.truth(drawn.q, *drawn.gathered(), **options, **named)
    wanted = {"out": found["out"], "lse": found["lse"]}
    return _of(f"pages={page_size}x{pages_each} lengths={lengths}", arrays, options, {}, wanted, dtype, gpu, rng)


def eight_bits(seed: int, gpu: Gpu, tiny: bool) -> Case:
    """Decoding from a cache of 8 bits."""
    rng = random.Random(f"eight bits {seed}")
    gpu = dataclasses.replace(gpu, sms=4 if tiny else rng.choice((4, 16, gpu.sms)))
    kv_heads, group, batch = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 8)), rng.randint(1, 4)
    tokens, dtype, kv_dtype = side(rng, 1, 300 if tiny else 3000), rng.choice(("bfloat16", "float16")), rng.choice(DTYPES)
    cache = quantized.draw(
        seed,
        batch=batch,
        q_tokens=rng.choice((1, 1, 1, 2, 7)),
        kv_tokens=tokens,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=rng.choice((64, 128, 256)),
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    options = _of_decoding(rng)
    named: dict[str, np.ndarray] = {}
    if rng.random() < 0.6:
        named["kv_lengths"] = np.array([rng.randint(0, tokens) for _ in range(batch)], np.int32)
    if rng.random() < 0.3:
        named["sinks"] = np.asarray(normal(seed + 9, kv_heads * group))
    found = cases.truth(cache.q, *cache.wide(), **options, **named)
    arrays = {name: np.asarray(getattr(cache, name)) for name in "qkv"} | cache.scales | named
    wanted = {"out": found["out"], "lse": found["lse"]}
    return _of(f"{kv_dtype} {batch}x{tokens}", arrays, options, {}, wanted, dtype, gpu, rng)


def _of_decoding(rng: random.Random) -> dict[str, Any]:
    """Options other than arrays."""
    options: dict[str, Any] = {"causal": True} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        options["window"] = (rng.randint(0, 400), rng.choice((None, 0, 30)))
    if rng.random() < 0.3:
        options["soft_cap"] = 5.0
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.3, -0.2, 1.0))
    return options


def _case(op: str, seed: int, gpu: Gpu, tiny: bool) -> Case:
    rng = random.Random(f"{op} {seed}")
    backward = op != "flash_attention"
    gpu = dataclasses.replace(gpu, sms=4 if tiny else rng.choice((4, 16, gpu.sms)))
    shape = _shape(rng, tiny, backward)
    dtype = rng.choice(("bfloat16", "float16"))
    arrays: dict[str, np.ndarray] = dict(zip("qkv", map(np.asarray, cases.qkv(shape, dtype, seed)), strict=True))
    options: dict[str, Any] = {"causal": True} if rng.random() < 0.4 else {}
    if rng.random() < 0.3:
        options["window"] = tuple(rng.choice((None, 0, rng.randint(1, 40), rng.randint(1, 400))) for _ in "lr")
    if rng.random() < 0.25:
        options["soft_cap"] = rng.choice((3.0, 30.0))
    if rng.random() < 0.2:
        options["scale"] = rng.choice((0.3, -0.2, 0.05))
    more, masks = _masks(rng, shape, dtype, seed)
    arrays |= more
    if "bias" in arrays and "soft_cap" in options and rng.random() < 0.5:
        options["soft_cap_after_bias"] = True
    if rng.random() < 0.25:
        arrays["sinks"] = np.asarray(normal(seed + 9, shape.q_heads)) * rng.choice((1, 4))
    if "bias" in arrays and "soft_cap" in options and backward and not options.get("soft_cap_after_bias"):
        del options["soft_cap"]  # which has no kernel
    gradient: dict[str, np.ndarray] = {}
    if backward:
        options["deterministic"] = rng.random() < 0.5
        gradient["out_grad"] = np.asarray(normal(seed + 5, *shape.out, dtype=dtype))
        if rng.random() < 0.3:
            gradient["lse_grad"] = np.asarray(normal(seed + 6, shape.batch, shape.q_heads, shape.q_tokens))
    truth_options = {k: v for k, v in options.items() if k != "deterministic"}
    wanted = cases.truth(*(arrays[x] for x in "qkv"), **truth_options, **masks, **_only(arrays, "bias", "sinks"), **gradient)
    note = _poison(rng, arrays, shape)
    seen = {k: v for k, v in options.items() if k in ("causal", "window")} | masks
    floors = _floors(shape, options.get("scale"), seen, arrays.get("bias"))
    return _of(f"{shape} {dtype}{note}", arrays, options, gradient, wanted, dtype, gpu, rng, floors)


def _floors(shape: cases.Shape, scale: float | None, masks: dict[str, Any], bias: np.ndarray | None) -> dict[str, np.ndarray]:
    """For each row of the gradients of q and of a bias: where it sees few keys, they are small differences of large numbers."""
    seen = cases.visible(shape.scores, **masks)
    keys = (seen if bias is None else seen & ~np.isneginf(bias)).sum(-1, keepdims=True)
    floor = 0.6 * np.sqrt((shape.v_dim or shape.head_dim) / 64) / np.maximum(keys, 1)
    of_q = floor.swapaxes(1, 2) * abs(scale or 1 / np.sqrt(shape.head_dim))
    found = {"q": np.maximum(_FLOOR, of_q)}
    if bias is not None:
        shared = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        found["bias"] = np.maximum(_FLOOR, floor.max(shared, keepdims=True))
    return found


def _shape(rng: random.Random, tiny: bool, backward: bool) -> cases.Shape:
    most = 200 if tiny else 900
    head_dim = rng.choice(HEAD_DIMS[:3] if tiny else HEAD_DIMS)
    v_dim = (
        None if rng.random() < 0.8 else rng.choice((128 if head_dim == 192 else 64, 32, head_dim + 8 if head_dim < 248 else 64))
    )
    q = side(rng, 1, most)
    kv = q if rng.random() < 0.4 else side(rng, 1, most)
    if not backward and rng.random() < 0.3:
        q, kv = rng.choice((1, 1, 2, 5, 16)), side(rng, 1, 3 * most)
    kv_heads = rng.choice((1, 1, 2, 3))
    group = rng.choice((1, 1, 2, 3, 4)) if q > 16 else rng.choice((1, 2, 5, 8))
    return cases.Shape(
        rng.choice((1, 1, 2, 3)) if not tiny else rng.choice((1, 2)), q, kv, kv_heads * group, kv_heads, head_dim, v_dim
    )


def _masks(rng: random.Random, s: cases.Shape, dtype: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of the call; and those of them that `cases.visible` takes."""
    numbers, found = np.random.default_rng(seed), {}
    for name, tokens in (("q_lengths", s.q_tokens), ("kv_lengths", s.kv_tokens)):
        if rng.random() < 0.3:
            drawn = [
                rng.choice((0, 1, tokens, tokens + 5, rng.randint(0, tokens), rng.randint(0, tokens))) for _ in range(s.batch)
            ]
            found[name] = np.array(drawn, np.int32)
    if rng.random() < 0.25:
        how = rng.choice(("packed", "any", "same"))
        for name, tokens in (("q_segment_ids", s.q_tokens), ("kv_segment_ids", s.kv_tokens)):
            ids = numbers.integers(0, 1 if how == "same" else 4, (s.batch, tokens))
            found[name] = (np.sort(ids, 1) if how == "packed" else ids).astype(np.int32)
    if rng.random() < 0.2:
        found["mask"] = numbers.random(_broadcast(rng, s.scores)) < rng.choice((0.5, 0.95))
    masks = dict(found)
    if rng.random() < 0.3:
        bias = numbers.standard_normal(_broadcast(rng, s.scores)).astype(np.float32)
        if rng.random() < 0.3:
            bias[numbers.random(bias.shape) < 0.3] = -np.inf
        found["bias"] = np.asarray(jax.numpy.asarray(bias).astype(rng.choice((dtype, "float32"))))
    return found, masks


def _broadcast(rng: random.Random, scores: tuple[int, ...]) -> tuple[int, ...]:
    batch, heads, rows, keys = scores
    return rng.choice((1, batch)), rng.choice((1, heads)), rng.choice((rows, rows, rows, 1)), keys


def _only(arrays: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: arrays[name] for name in names if name in arrays}


def _poison(rng: random.Random, arrays: dict[str, np.ndarray], s: cases.Shape) -> str:
    """NaN in what lengths cut off, most of the time."""
    if not {"q_lengths", "kv_lengths"} & arrays.keys() or rng.random() < 0.2:
        return ""
    for names, lengths in (("q", "q_lengths"), ("kv", "kv_lengths")):
        for name in names if lengths in arrays else ():
            arrays[name] = arrays[name].copy()
            for b, length in enumerate(arrays[lengths]):
                arrays[name][b, max(int(length), 0) :] = np.nan
    return " NaN past lengths"


def _of(
    note: str,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    gradient: dict[str, np.ndarray],
    truth: dict[str, np.ndarray],
    dtype: str,
    gpu: Gpu,
    rng: random.Random,
    floors: dict[str, np.ndarray] | None = None,
) -> Case:
    names, cotangents = list(arrays), list(gradient)
    differentiable = [name for name in ("q", "k", "v", "bias", "sinks") if name in arrays] if gradient else []

    def results(backend: str, configs: Any, *given: Any) -> Any:
        named = dict(zip([*names, *cotangents], given, strict=True))

        def attend(*chosen: Any) -> Any:
            own = {name: named[name] for name in names} | dict(zip(differentiable, chosen, strict=True))
            return flash_attention(**own, **options, return_lse=True, backend=backend)

        with use_configs(configs) if configs else gpus.target(gpu):
            (out, lse), pull = jax.vjp(attend, *(named[name] for name in differentiable))
            if not gradient:
                return {"out": out, "lse": lse}
            dlse = named.get("lse_grad", jax.numpy.zeros_like(lse))
            return {"out": out, "lse": lse} | dict(zip(differentiable, pull((named["out_grad"], dlse)), strict=True))

    given = (*arrays.values(), *gradient.values())
    with jax.default_device(jax.devices("cpu")[0]):
        uses = capture(lambda *xs: results("mosaic", None, *xs), gpu)(*given).uses
    configs: dict[str, Any] = {}
    for use in uses:
        configs.setdefault(use.op, []).append((use.problem, config_of(SPECS[use.op], use.problem, gpu, rng)))

    def function(backend: str) -> Callable[..., Any]:
        def call(*xs: Any) -> Any:
            with gpus.target(gpu):
                return results(backend, configs, *xs)

        return call

    label = f"{note} {options} {[f'{name}{list(x.shape)}' for name, x in arrays.items() if name not in 'qkv']} sms={gpu.sms}"
    label += "".join(f" {short(problem)} {short(config)}" for pairs in configs.values() for problem, config in pairs)
    limits = {"out": _FORWARD, "lse": _LSE / _LIMITS[dtype]}
    order = sorted({"out", "lse", *differentiable})
    wanted = tuple(
        Wanted(name, truth[name], limits.get(name, _GRADIENT) * _LIMITS[dtype], floor=(floors or {}).get(name, _FLOOR))
        for name in order
    )
    return Case(label, gpu, function, given, wanted, not gradient or options["deterministic"])
