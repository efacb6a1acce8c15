"""Measures products of 8-bit floats beside XLA's and beside our bf16, all of a problem in turn. Needs a Hopper GPU.

    python scripts/measure_fp8.py --output results/DATE-GPU-matmul-fp8.jsonl [--suites fp8,fp8-block] [--seconds 60]
    python scripts/measure_fp8.py --op grouped_matmul --output results/DATE-GPU-grouped_matmul-fp8.jsonl

It writes one line of JSON for each problem of the suites: XLA's times for the same product of 8 bits (of matmul alone: a loop
over groups takes too long), those of the bf16 product of the same sides with the config that a call uses; and for each config
its times, spills, and error against XLA's result. The configs are the one that a call uses, the default, and those of the next
best tiles by the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops import spec_of
from mgpu_ops.core import aot
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.grouped.sizes import draw_sizes
from mgpu_ops.registry import resolution
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import measure, suites
from mgpu_ops.tuning.compile_pool import CompileJob, Pool

SUITES = ("fp8", "fp8-row", "fp8-block")
ROUNDS = 7


def problems(spec: OpSpec, names: list[str]) -> dict[str, Any]:
    """Those of the suites, in turn: if time ends, some of each are measured."""
    of_suites = [list(suites.problems(spec, name).items()) for name in names]
    return {name: p for row in itertools.zip_longest(*of_suites) for name, p in filter(None, row)}


def in_bf16(problem: Any) -> Any:
    """The product of the same sides, of 16 bits as a program stores them."""
    own = {name: "none" for name in ("scales", "b_dtype", "rhs_dtype") if hasattr(problem, name)}
    return dataclasses.replace(problem, dtype="bfloat16", out_dtype="bfloat16", layout="nn", **own)


def chosen(spec: OpSpec, problem: Any, gpu: Gpu, count: int) -> list[Any]:
    """What a call uses, and of the best tiles by the model so many, each with its best config."""
    used = resolution.resolve(spec, problem, gpu).config
    of_tile: dict[tuple[int, int, int], Any] = {}
    for c in spec.candidates(problem, gpu):
        of_tile.setdefault((c.tile_m, c.tile_n, c.tile_k), c)
    return list(dict.fromkeys(c for c in (used, *list(of_tile.values())[:count]) if c is not None))


class Arrays:
    """Random operands of any shape, cut from one buffer for each dtype: normal numbers; of float32, scales from 1/2 to 2.

    Sizes of groups are those that the op draws.
    """

    def __init__(self, spec: OpSpec) -> None:
        self._spec = spec
        count = 2**29 if spec.name == "matmul" else 2**31 - 2**10
        normal = jax.jit(lambda key, dtype: jax.random.normal(key, (count,), jnp.bfloat16).astype(dtype), static_argnums=1)
        self._buffers = {dtype: normal(jax.random.key(0), dtype) for dtype in ("bfloat16", "float8_e4m3fn")}
        self._buffers["float32"] = 2.0 ** jax.random.uniform(jax.random.key(1), (2**24,), jnp.float32, -1.0, 1.0)

    def of(self, problem: Any) -> list[jax.Array]:
        shapes = jax.eval_shape(partial(self._spec.inputs, problem), jax.random.key(0))
        return [
            draw_sizes(problem.spread, problem.m, problem.groups, jax.random.key(0))
            if x.dtype == jnp.int32
            else self._cut(x, 7919 * 1024 * number)
            for number, x in enumerate(shapes)
        ]

    def _cut(self, like: jax.ShapeDtypeStruct, start: int) -> jax.Array:
        buffer = self._buffers[like.dtype.name]
        start = min(start, buffer.size - like.size)
        return jax.lax.slice(buffer, (start,), (start + like.size,)).reshape(like.shape)


def of_problem(spec: OpSpec, problem: Any, tasks: dict[Any, Future], bf16: Future, made: Arrays, gpu: Gpu) -> dict[str, Any]:
    """The record of a problem."""
    arrays, wide = made.of(problem), made.of(in_bf16(problem))
    xla = partial(jax.jit(partial(spec.reference, problem)).lower(*arrays).compile(), *arrays)
    reference = xla()
    calls = {"xla": xla} if spec.name == "matmul" else {}
    calls["bf16"] = partial(aot.load(bf16.result()), *wide)
    used, records = next(iter(tasks)), []
    for config, task in tasks.items():
        records.append(record := {"config": dataclasses.asdict(config), "used": config == used})
        found = task.result()
        if not isinstance(found, Executable):
            record["failed"] = found.detail
            continue
        calls[str(config)] = call = partial(aot.load(found), *arrays)
        record |= {"spills": found.spills, "error": measure.error(call(), reference)}
    cold, warm = (timer(list(calls.values()), gpu, ROUNDS) for timer in (measure.interleaved, measure.warm))
    times = {name: (measure.median_us(x), measure.median_us(y)) for name, x, y in zip(calls, cold, warm, strict=True)}
    for record, config in zip(records, tasks, strict=True):
        if str(config) in times:
            record["us"], record["warm_us"] = times[str(config)]
    others = {name: times[name] for name in ("xla", "bf16") if name in times}
    return {"problem": dataclasses.asdict(problem), "others": others, "configs": records}


def told(name: str, record: dict[str, Any]) -> str:
    """One line for a problem."""
    p, configs = record["problem"], [c for c in record["configs"] if "us" in c]
    used, best = configs[0]["us"], min(configs, key=lambda c: c["us"])
    others = ", ".join(f"{us / used:.3f}x of {other}" for other, (us, _) in record["others"].items())
    fields = ("tile_m", "tile_n", "tile_k", "wg_dimension", "compute_warpgroups", "cluster", "split_k", "max_concurrent_steps")
    config = " ".join(str(best["config"][field]) for field in fields if field in best["config"])
    return (
        f"{name} {p['m']}x{p['n']}x{p['k']}: {used:.1f} us, {2 * p['m'] * p['n'] * p['k'] / used / 1e6:.0f} TFLOP/s, {others}; "
        f"best {best['us']:.1f} us with {config}; error {max(c['error'] for c in configs):.2g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="matmul", choices=("matmul", "grouped_matmul"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--configs", type=int, default=4, help="of the model's best, for each problem")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after this time")
    arguments = parser.parse_args()
    start, gpu, spec = time.monotonic(), gpus.current(), spec_of(arguments.op)
    if gpu is None:
        parser.error("this machine has no Hopper GPU")
    about = {"gpu": gpu.name, "driver": gpus.driver_version(), "jax": jax.__version__}
    topology, queued, made = aot.attached(), [], Arrays(spec)
    with Pool(seconds=60.0) as pool, arguments.output.open("a", encoding="utf-8") as stream:
        for name, problem in problems(spec, arguments.suites.split(",")).items():
            jobs = {c: CompileJob(spec.name, problem, c, gpu, topology) for c in chosen(spec, problem, gpu, arguments.configs)}
            plain = in_bf16(problem)
            config = resolution.resolve(spec, plain, gpu).config or spec.default(plain, gpu)
            bf16 = pool.submit(CompileJob(spec.name, plain, config, gpu, topology))
            queued.append((name, problem, {c: pool.submit(job) for c, job in jobs.items()}, bf16))
        for name, problem, tasks, bf16 in queued:
            if time.monotonic() - start > arguments.seconds:
                print("out of time")
                break
            try:
                record = {"name": name} | of_problem(spec, problem, tasks, bf16, made, gpu) | about
            except Exception as error:
                print(name, "failed:", str(error)[:300], flush=True)
                continue
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            print(f"{time.monotonic() - start:6.1f} s {told(name, record)}", flush=True)


if __name__ == "__main__":
    main()
