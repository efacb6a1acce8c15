"""Prints how far matmul's model of time is from what was measured: from recorded sweeps and drawn problems under results/.

    python scripts/model_error.py > results/DATE-GPU-matmul-model.txt

The error of a config is |log(modelled / measured)|, about the relative error. What the model chooses is the config of a problem
with the least modelled time of those that were measured; it is given as its time over that of the fastest.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning.replay import sweep

RESULTS = Path(__file__).parents[1] / "results"
DRAWN = RESULTS / "2026-11-22-h200-matmul-drawn.json.gz"
MATMUL, H200 = spec_of("matmul"), gpu.find("h200")

Measured = Sequence[tuple[MatmulConfig, float]]  # configs of a problem, and their times in us


def sweeps() -> Iterable[tuple[MatmulProblem, Measured]]:
    """The recorded sweeps, with a cold L2."""
    for found in sweep.read_all(RESULTS / "replay"):
        if found.op == "matmul":
            pairs = zip(found.configs(MATMUL), found.rows, strict=True)
            yield database.to_problem(MATMUL, found.problem), [(config, row.us) for config, row in pairs if row.kind == "ok"]


def drawn() -> Iterable[tuple[MatmulProblem, Measured]]:
    """The drawn problems, with a warm L2. Of the first run without the configs whose copies the kernel has changed since."""
    for number, run in enumerate(json.loads(gzip.decompress(DRAWN.read_bytes()))["runs"]):
        for entry in run["problems"]:
            p = MatmulProblem(**entry["problem"])
            pairs = [(MatmulConfig(**c["config"]), c["us"]) for c in entry["configs"]]
            if number == 0:
                pairs = [(c, us) for c, us in pairs if not _ragged(p, c)]
            if pairs:
                yield p, pairs


def _ragged(p: MatmulProblem, c: MatmulConfig) -> bool:
    """Whether an operand's rows end within a swizzle tile, and its blocks are wider than one."""
    a = p.layout[0] == "t" and p.m % 64 and c.tile_m > 64
    return bool(a or (p.layout[1] == "n" and p.n % 64 and c.tile_n > 64))


def summary(name: str, problems: Iterable[tuple[MatmulProblem, Measured]]) -> str:
    errors, chosen = [], []
    for problem, measured in problems:
        us = np.array([time for _, time in measured])
        modelled = np.array([1e6 * MATMUL.cost(problem, config, H200) for config, _ in measured])
        errors.extend(np.abs(np.log(modelled / us)))
        chosen.append(us[np.argmin(modelled)] / us.min())
    return (
        f"{name}: {len(chosen)} problems, {len(errors)} configs; error median {np.median(errors):.3f}, 95th percentile "
        f"{np.quantile(errors, 0.95):.3f}; the model's choice over the fastest: mean {np.exp(np.mean(np.log(chosen))):.3f}, "
        f"worst {max(chosen):.3f}"
    )


if __name__ == "__main__":
    print(summary("drawn", drawn()))
    print(summary("sweeps", sweeps()))
