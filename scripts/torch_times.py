"""Times `mgpu_ops.torch` beside torch's own functions, forward and with gradients: prints CSV.

    python scripts/torch_times.py > results/2026-11-22-h200-torch.txt     # on a Hopper GPU, with torch and JAX that have CUDA
    python scripts/torch_times.py --small                                # that it runs, on any machine

A time is that of one call in a row of calls, by the wall clock, the median of repeats in which all implementations take turns.
So what the host does for a call counts where the GPU is done sooner.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

import mgpu_ops.torch as ours

Function = Callable[..., Any]
REPEATS = 7


def products(device: str, small: bool) -> Iterator[tuple[str, dict[str, Function], list[Any]]]:
    shapes = [(128, 64, 64)] if small else [(128, 28672, 4096), (4096, 28672, 4096), (8192, 8192, 8192)]
    for m, n, k in shapes:
        tensors = [tensor(device, m, k), tensor(device, k, n)]
        yield f"matmul {m}x{n}x{k}", {"mgpu_ops": ours.matmul, "torch.matmul": torch.matmul}, tensors


def attentions(device: str, small: bool) -> Iterator[tuple[str, dict[str, Function], list[Any]]]:
    shapes = [(1, 128, 4, 2, 64)] if small else [(4, 2048, 32, 8, 128), (1, 16384, 32, 8, 128)]
    for batch, tokens, heads, kv_heads, dim in shapes:
        tensors = [tensor(device, batch, tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
        causal: dict[str, Function] = {
            "mgpu_ops": functools.partial(ours.flash_attention, causal=True),
            "scaled_dot_product_attention": sdpa,
        }
        if not small:
            causal["FlexAttention"] = flex(tokens, device)
        yield f"flash_attention {batch}x{tokens}x{heads}x{kv_heads}x{dim} causal", causal, tensors


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """As [batch, heads, tokens, head_dim], which torch's kernels read without a copy."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flex(tokens: int, device: str) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)


def tensor(device: str, *shape: int) -> Any:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)


def with_gradients(function: Function, tensors: list[Any]) -> None:
    out = function(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def microseconds(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Of one call in a row of calls that takes about so long."""

    def row(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    row(2)
    calls = max(2, int(seconds / max(row(2) / 2, 1e-6)))
    return row(calls) / calls * 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny problems, on the CPU too")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a row of calls (default 0.2)")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.small:
        parser.error("no GPU is here that torch can use: see --small")
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["op", "problem", "pass", "impl", "median_us", "spread_us"])
    for label, functions, tensors in (*products(device, given.small), *attentions(device, given.small)):
        op, problem = label.split(" ", 1)
        for kind in ("forward", "forward+backward"):
            run = {name: functools.partial(with_gradients, f, tensors) for name, f in functions.items()}
            if kind == "forward":
                plain = [x.detach() for x in tensors]
                run = {name: functools.partial(f, *plain) for name, f in functions.items()}
            times: dict[str, list[float]] = {name: [] for name in run}
            for _ in range(2 if given.small else REPEATS):
                for name, work in run.items():
                    times[name].append(microseconds(work, device, 0.001 if given.small else given.seconds))
            for name, found in times.items():
                spread = max(found) - min(found)
                table.writerow([op, problem, kind, name, f"{statistics.median(found):.1f}", f"{spread:.1f}"])
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
