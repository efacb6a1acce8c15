"""Calls each public function with one argument that is nonsense: is it told so, in our words?

    python -m tests.drawn.nonsense [--only FUNCTION ...] [--gpu h200] [--accepted] [--told]

Each argument of a good call takes each of `VALUES`, and each array each of `CHANGES`. A call must give a result, or an error
(TypeError, ValueError or NotImplementedError) that mgpu_ops raises itself and that names an argument. --gpu traces the kernels'
paths. Left out are einsum and other functions of JAX's, which may answer in JAX's words.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import mgpu_ops
from mgpu_ops.core import gpu as gpus

ROOT = Path(__file__).resolve().parents[2]
type Arguments = dict[str, Any]

_KEY = jax.random.key(0)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 10**400, 1.5, -1.0, 0.0, float("nan"), float("inf"), 1j, "silu", "", b"x", (), (1, 2),
    (None,), (-1, 0), [1.5], {}, object(), print, int, jnp.bfloat16, "bfloat16", np.float64(2), np.int8(1), np.array("x"),
    np.zeros(3), np.zeros((), bool), np.array([object()]), float("-inf"),
    (2**40, 1), (1, 2, 3), [[1], [1, 2]], slice(3), _KEY,
)  # fmt: skip
CHANGES: dict[str, Callable[[Any], Any]] = {
    **{f"of {to}": functools.partial(lambda to, x: x.astype(to), to) for to in ("int32", "bool", "complex64", "uint8", "int4")},
    **{f"of {to}": functools.partial(lambda to, x: x.astype(to), to) for to in ("float32", "float16", "float8_e4m3fn")},
    "a scalar": lambda x: x.ravel()[0],
    "flat": lambda x: x.ravel(),
    "of one more axis": lambda x: x[None],
    "of three more axes": lambda x: x[None, None, None],
    "empty": lambda x: x[:0],
    "of no columns": lambda x: x[..., :0],
    "one row less": lambda x: x[:-1],
    "one column less": lambda x: x[..., :-1],
    "one row": lambda x: x[:1],
    "one column": lambda x: x[..., :1],
    "twice as long": lambda x: jnp.concatenate([x, x]),
    "twice as wide": lambda x: jnp.concatenate([x, x], -1),
    "transposed": lambda x: jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x,
    "a list": lambda x: np.asarray(x, np.float32).tolist() if x.dtype.kind not in "iu" else np.asarray(x).tolist(),
    "of NumPy's strings": lambda x: np.asarray(x, np.float32).astype(str),
    "float64": lambda x: np.asarray(x, np.float64),
    "nan": lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.full_like(x, -(2**31)),
}


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def _whole(*values: int) -> Any:
    return jnp.asarray(values, jnp.int32)


def good() -> dict[str, list[Arguments]]:
    """Good calls of each public function."""
    x, w, sizes, f32 = _array(16, 32), _array(32, 64), _whole(4, 12), jnp.float32
    w3, qkv, cos = _array(2, 32, 64), _array(2, 16, 4 * 64), _array(16, 32, dtype=f32)
    q, kv = _array(2, 16, 4, 64), _array(2, 16, 2, 64)
    mlp = {"x": x, "w_gate": w, "w_up": w, "w_down": w.T}
    w8 = jnp.ones((32, 64), jnp.int8)
    f8, s16, s64 = _array(16, 32, dtype=jnp.float8_e4m3fn), _array(16, dtype=f32), _array(64)
    experts = _whole(*[0, 1] * 16).reshape(16, 2)
    grouped: Arguments = {"lhs": x, "rhs": w3, "group_sizes": sizes}
    dispatch = mgpu_ops.moe_dispatch(x, experts, 2)
    quantized = {"x": x, "w_gate_up": jnp.ones((2, 128, 32), jnp.int8), "w_down": jnp.ones((2, 32, 64), jnp.int8)}
    quantized |= {"gate_up_scales": _array(2, 128, dtype=f32), "gate_up_zero_points": jnp.ones((2, 128), f32)}
    quantized |= {"down_scales": _array(2, 32, dtype=f32), "down_zero_points": jnp.ones((2, 32), f32)}
    return {
        "matmul": [
            {"a": x, "b": w, "bias": _array(64), "activation": "silu", "residual": _array(16, 64), "rms_epsilon": 1e-5},
            {"a": f8, "b": f8, "scale_a": s16, "scale_b": s16, "transpose_b": True, "out_dtype": jnp.bfloat16},
            {"a": _array(2, 16, 32), "b": w, "precision": None, "preferred_element_type": f32, "transpose_a": False},
        ],
        "gated_matmul": [{"x": x, "w_gate": w, "w_up": w, "activation": "gelu", "rms_epsilon": 1e-5, "out_dtype": f32}],
        "gated_mlp": [mlp | {"activation": "silu", "residual": x}],
        "fp8_gated_mlp": [mlp | {"residual": x}, mlp | {"state": mgpu_ops.Fp8GatedState.init(2)}],
        "gated_activation": [{"gate_up": _array(16, 64), "activation": "silu", "rms_rows": x, "rms_epsilon": 1e-6}],
        "fp8_matmul": [
            {"x": x, "w": w, "bias": _array(64), "residual": _array(16, 64, dtype=f32), "scheme": "row", "out_dtype": f32}
        ],
        "quantize": [{"x": x, "scheme": "tensor", "axis": -1, "dtype": jnp.float8_e4m3fn, "transpose": True}],
        "quantized_matmul": [
            {"x": x, "w": w8, "scales": _array(64, dtype=f32), "zero_points": jnp.ones(64, f32), "out_dtype": f32}
            | {"bias": _array(64), "residual": _array(16, 64, dtype=f32)}
        ],
        "quantized_grouped_matmul": [
            {"lhs": x, "rhs": w8[None].repeat(2, 0), "scales": _array(2, 64), "group_sizes": sizes, "spread": "random"}
            | {"zero_points": jnp.ones((2, 64)), "group_offset": jnp.int32(0), "out_dtype": f32}
        ],
        "grouped_matmul": [
            grouped | {"bias": _array(2, 64), "row_scale": _array(16, dtype=f32), "activation": "silu", "spread": "random"},
            grouped
            | {"row_indices": _whole(*range(16)), "group_offset": jnp.int32(0), "out_dtype": f32}
            | {"residual": _array(16, 64, dtype=f32)},
            {"lhs": f8, "rhs": _array(2, 64, 32, dtype=jnp.float8_e4m3fn), "group_sizes": sizes, "transpose_rhs": True}
            | {"scale_lhs": s16, "scale_rhs": _array(2, 64, dtype=f32), "out_dtype": f32},
        ],
        "gated_grouped_matmul": [
            {"lhs": x, "w_gate": w3, "w_up": w3, "group_sizes": sizes, "row_indices": _whole(*range(16)), "activation": "gelu"}
        ],
        "fp8_grouped_matmul": [grouped | {"scheme": "row", "group_offset": jnp.int32(0), "out_dtype": f32}],
        "ragged_contraction": [{"lhs": x, "rhs": _array(16, 64), "group_sizes": sizes, "num_groups": None, "out_dtype": f32}],
        "moe": [
            {"x": x, "router_logits": _array(16, 2, dtype=f32), "w_gate": w3, "w_up": w3, "w_down": jnp.swapaxes(w3, 1, 2)}
            | {"top_k": 2, "norm_topk_prob": True, "activation": "silu", "spread": "random"}
        ],
        "quantized_moe": [quantized | {"router_logits": _array(16, 2, dtype=f32), "top_k": 2, "norm_topk_prob": True}],
        "quantized_moe_experts": [
            quantized
            | {
                "weights": _array(16, 2),
                "experts": experts,
                "num_experts": 2,
                "group_offset": jnp.int32(0),
                "activation": "silu",
            }
        ],
        "fp8_moe": [
            {"x": x, "router_logits": _array(16, 2, dtype=f32), "w_gate": w3, "w_up": w3, "w_down": jnp.swapaxes(w3, 1, 2)}
            | {"top_k": 2, "norm_topk_prob": True, "spread": "random"}
            | more
            for more in ({}, {"state": mgpu_ops.Fp8GatedState.init(2)})
        ],
        "fp8_moe_experts": [
            {"x": x, "weights": _array(16, 2), "experts": experts, "w_gate": w3, "w_up": w3, "w_down": jnp.swapaxes(w3, 1, 2)}
            | {"num_experts": 2, "group_offset": jnp.int32(0)}
        ],
        "moe_route": [{"router_logits": _array(16, 2, dtype=f32), "top_k": 2, "norm_topk_prob": True}],
        "moe_dispatch": [{"x": x, "experts": experts, "num_experts": 2}],
        "moe_combine": [{"rows": dispatch.rows, "order": dispatch.order, "positions": dispatch.positions, "out_dtype": f32}],
        "moe_experts": [
            {"x": x, "weights": _array(16, 2), "experts": experts, "w_gate": w3, "w_up": w3, "w_down": jnp.swapaxes(w3, 1, 2)}
            | {"num_experts": 2, "group_offset": jnp.int32(0), "activation": "silu"}
        ],
        "flash_attention": [
            {"q": q, "k": kv, "v": kv, "bias": _array(1, 4, 16, 16), "mask": jnp.ones((2, 1, 16, 16), bool), "causal": True}
            | {"window": (3, 0), "q_lengths": _whole(3, 9), "kv_lengths": _whole(4, 16), "sinks": _array(4), "scale": 0.3}
            | {"q_segment_ids": _whole(*[1] * 32).reshape(2, 16), "kv_segment_ids": _whole(*[1] * 32).reshape(2, 16)}
            | {"soft_cap": 3.0, "soft_cap_after_bias": True, "return_lse": True, "deterministic": True},
            {"q": q[:, :1], "k": kv, "v": kv, "page_table": _whole(0, 1, 1, 0).reshape(2, 2), "kv_lengths": _whole(9, 30)},
        ],
        "rotary_qkv": [
            {"qkv": qkv, "cos": cos, "sin": cos, "heads": 2, "kv_heads": 1},
            {"qkv": qkv, "cos": cos, "sin": cos, "heads": 2, "kv_heads": 1, "q_norm": s64, "k_norm": s64, "epsilon": 1e-5},
        ],
        "rotary_attention": [
            {"qkv": qkv, "cos": cos, "sin": cos, "heads": 2, "kv_heads": 1, "causal": True, "window": (3, 0), "scale": 0.3}
            | {"soft_cap": 3.0, "deterministic": True, "q_norm": s64, "k_norm": s64, "epsilon": 1e-5}
        ],
        "rotary_into_cache": [
            {"qkv": qkv[:, 0], "cos": cos[:2], "sin": cos[:2], "k_cache": kv[:, :, :1], "v_cache": kv[:, :, :1]}
            | {"positions": _whole(3, 4), "rms_rows": _array(2, 128), "rms_epsilon": 1e-6}
            | {"q_norm": s64, "k_norm": s64, "epsilon": 1e-5},
            {"qkv": qkv[:, 0], "cos": cos[:2], "sin": cos[:2], "k_cache": kv[:, :, :1], "v_cache": kv[:, :, :1]}
            | {"positions": _whole(3, 4), "page_table": _whole(0, 1)[:, None]},
        ],
        "rms_norm": [{"x": x, "weight": _array(32), "epsilon": 1e-6, "return_x": True}],
        "cross_entropy": [{"logits": x, "labels": _whole(*range(16)), "return_lse": True}],
        "embedding": [{"table": w, "tokens": _whole(*range(16))}],
    }


def calls(function: str) -> Iterator[tuple[str, Arguments]]:
    """(what is wrong, arguments) of each call."""
    for arguments in good()[function]:
        options = {name: p.default for name, p in inspect.signature(getattr(mgpu_ops, function)).parameters.items()}
        for name in [*arguments, *(o for o in options if o not in arguments and o in ("config", "backend", "backward_config"))]:
            for value in VALUES:
                yield f"{name} = {value!r:.60}", arguments | {name: value}
            if hasattr(arguments.get(name), "shape"):
                for what, change in CHANGES.items():
                    yield f"{name} {what}", arguments | {name: _changed(change, arguments[name])}
            if name in arguments and options[name] is not inspect.Parameter.empty:
                yield f"no {name}", {k: v for k, v in arguments.items() if k != name}


def _changed(change: Callable[[Any], Any], x: Any) -> Any:
    try:
        return change(x)
    except (ValueError, TypeError, IndexError):
        return x


def outcome(function: str, arguments: Arguments) -> tuple[str, str]:
    """("told", "accepted", or what is wrong with the error; its text or the result)."""
    arrays = {
        k: v for k, v in arguments.items() if isinstance(v, jax.Array) and not jnp.issubdtype(v.dtype, jax.dtypes.prng_key)
    }
    rest = {k: v for k, v in arguments.items() if k not in arrays}
    try:
        out = jax.eval_shape(lambda **xs: getattr(mgpu_ops, function)(**rest, **xs), **arrays)
        return "accepted", str(jax.tree.map(lambda o: f"{o.dtype}{list(o.shape)}", out))
    except Exception as e:
        where = Path(traceback.extract_tb(e.__traceback__)[-1].filename)
        text = f"{type(e).__name__}: {e} ({where.name})"
        if not isinstance(e, TypeError | ValueError | NotImplementedError):
            return "of another kind", text
        if not {ROOT / "mgpu_ops", ROOT / "core"} & {*where.resolve().parents}:
            return "foreign", text
        names = inspect.signature(getattr(mgpu_ops, function)).parameters
        return "told" if {*re.findall(r"\w+", str(e))} & {function, *names} else "unnamed", text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(good()))
    parser.add_argument("--gpu", help="trace the kernels' paths for this GPU")
    parser.add_argument("--accepted", action="store_true", help="print what gave a result")
    parser.add_argument("--told", action="store_true", help="print what was told")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for function in options.only or good():
        for what, arguments in calls(function):
            with gpus.target(options.gpu) if options.gpu else contextlib.nullcontext():
                kind, text = outcome(function, arguments)
            counts[kind] += 1
            if kind not in ("told", "accepted") or getattr(options, kind):
                print(f"{kind}: {function}({what}): {text[:400]}", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    return bool(set(counts) - {"told", "accepted"})


if __name__ == "__main__":
    sys.exit(main())
