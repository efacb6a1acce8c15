"""Measures matmul configs and XLA on problems drawn by a seed, to fit the models of their time. Needs a Hopper GPU.

    python scripts/measure_drawn.py --output results/DATE-GPU-matmul-drawn.jsonl [--kinds few,any] [--seconds 300]

It writes one line of JSON for each problem: XLA's times; and for each config its times, its error against XLA's result, and its
spills. The configs are the default, the best ones by the model with and without clusters, and some drawn ones. All of a problem
are timed in turn within one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import aot
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.matmul.choices import deepest
from mgpu_ops.matmul.quantities import bytes_moved
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.compile_pool import CompileJob, Pool

MATMUL = spec_of("matmul")
KINDS = ("few", "any", "large", "heads", "batches")
_MOST_BYTES = 3 * 2**30
_MOST_FLOPS = 1e13
_PROJECTIONS = (
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (10240, 8192),
    (57344, 8192),
    (8192, 28672),
)
_HEADS = ((128256, 4096), (32000, 4096), (151936, 3584), (50304, 768), (256000, 2304))


def draw(kind: str, rng: random.Random) -> MatmulProblem:
    """A problem of a kind; log-uniform sides in steps of 8."""

    def side(low: int, high: int, step: int = 8) -> int:
        return max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))) / step) * step)

    layout = rng.choice(("nn", "nn", "nt", "tn", "tt"))
    if kind == "few":  # a decoding step
        m = rng.choice((1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64))
        n, k = rng.choice(_PROJECTIONS) if rng.random() < 0.7 else (side(1024, 32768), side(1024, 32768))
        return MatmulProblem(m, n, k, layout=rng.choice(("nn", "nn", "nt")))
    if kind == "large":
        m = side(2048, 16384, rng.choice((8, 128, 512)))
        n, k = rng.choice(_PROJECTIONS) if rng.random() < 0.5 else (side(1024, 16384, 64), side(1024, 16384, 64))
        return MatmulProblem(m, n, k, layout=layout)
    if kind == "heads":
        n, k = rng.choice(_HEADS)
        return MatmulProblem(side(16, 8192, 16), n, k, layout=rng.choice(("nn", "nt")))
    batch = rng.choice((2, 4, 8, 16, 32)) if kind == "batches" else 1
    high = 8192 if kind == "batches" else 32768
    m = side(1, 16384, 1) if layout[0] == "n" else side(8, 16384)
    return MatmulProblem(m, side(128, high), side(128, high), layout=layout, batch=batch)


def problems(kinds: Sequence[str], each: int, seed: int) -> Iterator[MatmulProblem]:
    """`each` problems of each kind that fit, in turn."""
    rngs = {kind: random.Random(f"{seed}/{kind}") for kind in kinds}
    for _ in range(each):
        for kind in kinds:
            while True:
                problem = draw(kind, rngs[kind])
                if bytes_moved(problem) < _MOST_BYTES and MATMUL.flops(problem) < _MOST_FLOPS:
                    break
            yield problem


def legal_configs(problem: MatmulProblem, gpu: Gpu) -> list[MatmulConfig]:
    """Configs over tiles, clusters and splits, each with the deepest pipeline that fits; the least modelled time first."""
    tile_ms = [m for m in (8, 16, 24, 32, 48) if m >= min(problem.m, 48) and m - problem.m < 16]
    clusters = [*itertools.product(("none", "m", "n"), (1, 2, 3, 4, 8)), *(("k", parts) for parts in (2, 4, 8))]
    tiles = itertools.product((*tile_ms, 64, 128, 192, 256), (64, 128, 192, 256), (64, 128))
    divisions = ((1, "n"), (2, "n"), (2, "m"))
    base, found = MATMUL.default(problem, gpu), []
    for (tile_m, tile_n, tile_k), (cluster, split_k), (warpgroups, wg_dimension) in itertools.product(
        tiles, clusters, divisions
    ):
        config = dataclasses.replace(
            base,
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            cluster=cluster,
            split_k=split_k,
            compute_warpgroups=warpgroups,
            wg_dimension=wg_dimension,
            schedule="cooperative",
        )
        if (legal := deepest(problem, config, gpu)) is not None:
            found.append(legal)
    return sorted(found, key=lambda config: MATMUL.cost(problem, config, gpu))


def chosen(problem: MatmulProblem, gpu: Gpu, rng: random.Random) -> list[MatmulConfig]:
    """The default, the best of each schedule by the model, and two drawn ones."""
    legal = legal_configs(problem, gpu)
    picked = [MATMUL.default(problem, gpu)]

    def take(count: int, wanted: Callable[[MatmulConfig], bool]) -> None:
        tiles: set[tuple[Any, ...]] = set()
        for config in legal:
            key = (config.tile_m, config.tile_n, config.split_k)
            if wanted(config) and key not in tiles and config not in picked and len(tiles) < count:
                tiles.add(key)
                picked.append(config)

    few = problem.m <= 64
    take(2, lambda c: c.cluster == "none" and c.tile_m >= 64)
    take(1, lambda c: c.cluster == "m" and c.tile_m >= 64)
    take(2, lambda c: c.cluster == "n" and c.tile_m >= 64)
    take(2, lambda c: c.cluster == "k" and c.tile_m >= 64)
    if few:
        take(3, lambda c: c.cluster == "none" and c.tile_m < 64)
        take(3, lambda c: c.cluster == "k" and c.tile_m < 64)
        take(1, lambda c: c.cluster in ("m", "n") and c.tile_m < 64)
    near = [c for c in legal if MATMUL.cost(problem, c, gpu) < 2 * MATMUL.cost(problem, legal[0], gpu)]
    picked += [c for c in rng.sample(near, min(2, len(near))) if c not in picked]
    return picked


class Arrays:
    """Random operands of any shape, cut from one buffer."""

    def __init__(self, dtype: str, most: int = 2**30) -> None:
        """most: elements of an operand."""
        self._buffer = jax.block_until_ready(jax.jit(lambda k: jax.random.normal(k, (most,), dtype))(jax.random.key(0)))

    def __call__(self, shape: Sequence[int], start: int) -> jax.Array:
        size = math.prod(shape)
        start = min(start, self._buffer.size - size)
        return jax.lax.slice(self._buffer, (start,), (start + size,)).reshape(shape)


def of_problem(problem: MatmulProblem, made: Sequence[tuple[MatmulConfig, Any]], arrays: Arrays, gpu: Gpu) -> dict[str, Any]:
    """The record of a problem whose configs are compiled."""
    shapes = jax.eval_shape(partial(MATMUL.inputs, problem), jax.random.key(0))
    inputs = [arrays(x.shape, 7919 * 1024 * number) for number, x in enumerate(shapes)]
    xla = partial(jax.jit(partial(MATMUL.reference, problem)).lower(*inputs).compile(), *inputs)
    reference = xla()
    calls, records = [xla], []
    for config, found in made:
        record: dict[str, Any] = {"config": dataclasses.asdict(config), "default": config == made[0][0]}
        records.append(record)
        if not isinstance(found, Executable):
            record["failed"] = found.detail
            continue
        call = partial(aot.load(found), *inputs)
        record |= {"spills": found.spills, "error": measure.error(call(), reference)}
        record["call"] = len(calls)
        calls.append(call)
    rounds = 7
    cold, warm = (timer(calls, gpu, rounds) for timer in (measure.interleaved, measure.warm))
    for record in records:
        if "call" in record:
            number = record.pop("call")
            record |= {"us": measure.median_us(cold[number]), "warm_us": measure.median_us(warm[number])}
    times = {"xla_us": measure.median_us(cold[0]), "xla_warm_us": measure.median_us(warm[0])}
    return {"problem": dataclasses.asdict(problem), **times, "configs": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--each", type=int, default=20, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this time")
    arguments = parser.parse_args()
    start = time.monotonic()
    gpu = gpus.current()
    if gpu is None:
        parser.error("this machine has no Hopper GPU")
    topology = aot.attached()
    rng = random.Random(arguments.seed)
    arrays = Arrays("bfloat16")
    with Pool(seconds=60.0) as pool, arguments.output.open("a", encoding="utf-8") as stream:
        queued = []
        for problem in problems(arguments.kinds.split(","), arguments.each, arguments.seed):
            tasks = [(c, pool.submit(CompileJob("matmul", problem, c, gpu, topology))) for c in chosen(problem, gpu, rng)]
            queued.append((problem, tasks))
        for problem, tasks in queued:
            if time.monotonic() - start > arguments.seconds:
                print("out of time")
                break
            try:
                record = of_problem(problem, [(c, task.result()) for c, task in tasks], arrays, gpu)
            except Exception as error:
                print(problem, "failed:", str(error)[:300], flush=True)
                continue
            about = {
                "gpu": gpu.name,
                "driver": gpus.driver_version(),
                "jax": jax.__version__,
                "date": str(datetime.date.today()),
            }
            stream.write(json.dumps(record | about) + "\n")
            stream.flush()
            print(f"{time.monotonic() - start:6.1f} s {told(record)}", flush=True)


def told(record: dict[str, Any]) -> str:
    """One line for a problem."""
    p, configs = record["problem"], [c for c in record["configs"] if "us" in c]
    best = min(configs, key=lambda c: c["us"])
    default = next((c for c in configs if c["default"]), best)
    worst = max(c["error"] for c in configs)
    c = best["config"]
    tiles = f"{c['tile_m']}x{c['tile_n']}x{c['tile_k']} {c['cluster']} split {c['split_k']} wgs {c['compute_warpgroups']}"
    problem = f"{p['batch']}x{p['m']}x{p['n']}x{p['k']} {p['layout']}"
    return (
        f"{problem}: xla {record['xla_us']:.1f} ({record['xla_warm_us']:.1f} warm), default {default['us']:.1f} "
        f"({default['warm_us']:.1f}), best {best['us']:.1f} ({best['warm_us']:.1f}) with {tiles}; error {worst:.2g}; "
        f"{len(record['configs']) - len(configs)} failed"
    )


if __name__ == "__main__":
    main()
