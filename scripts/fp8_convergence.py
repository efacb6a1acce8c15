"""Trains a small language model with products in 16 bits and in 8 bits by each recipe, and draws their losses.

    python scripts/fp8_convergence.py --output results/DATE-cpu-matmul-fp8-convergence    # writes .json and .png

The model, its text and its optimizer are those of examples/llama.py. Every product of a layer is `mgpu_ops.fp8_matmul`, or
those of the gated layer are `mgpu_ops.fp8_gated_mlp`; or all are in bfloat16. The head is bfloat16. All see the same text, and
all but one begin with the same weights. On CPUs numbers are rounded to 8 bits as for the kernel, and sums over k are float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mgpu_ops

sys.path.append(str(Path(__file__).parents[1]))
from examples import llama

MODEL = llama.Model()


def _backend(product: Callable[..., jax.Array], amax_history: int = 0) -> llama.Backend:
    """With all products of a layer by this one."""
    mlp = functools.partial(llama.mlp_of, product)
    return dataclasses.replace(llama.OURS, product=product, mlp=mlp, amax_history=amax_history)


def _with(**arguments: Any) -> llama.Backend:
    def product(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        return mgpu_ops.fp8_matmul(x, w, residual=residual, **arguments)

    return _backend(product)


RECIPES = {
    "bfloat16": llama.OURS,
    "a scale for each array": _with(),
    "delayed scaling": _backend(llama.delayed_product, amax_history=16),
    "rows and columns": _with(scheme="row"),
    "blocks": _with(scheme="block"),
    "weight gradients in 16 bits": _with(high_precision_weight_grad=True),
    "fp8_gated_mlp": llama.BACKENDS["fp8"],
    "fp8_gated_mlp, delayed scaling": llama.BACKENDS["fp8_delayed"],
}
_RATE = 2e-3  # of learning, in the first step
_AGAIN = "bfloat16, other weights"  # how far two runs are apart in any case
_SMOOTH = 20  # steps of a mean in the picture


def losses(backend: llama.Backend, steps: int = 300, seed: int = 0) -> list[float]:
    """The loss of each step of training, from weights that the seed decides. The learning rate falls to zero."""
    return llama.trained_by(backend, MODEL, steps, seed=seed, rate=lambda step: _RATE * (1.0 - step / steps))[1]


def last(curve: list[float]) -> float:
    """The mean loss of the last tenth of the steps."""
    return float(np.mean(curve[-max(1, len(curve) // 10) :]))


def draw(curves: Mapping[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    base = _smooth(curves["bfloat16"])
    steps = np.arange(_SMOOTH, len(curves["bfloat16"]) + 1)
    for name, curve in curves.items():
        whole.plot(
            steps,
            _smooth(curve),
            label=name,
            linewidth=2 if name == "bfloat16" else 1,
            linestyle=":" if name == _AGAIN else "-",
        )
        if name != "bfloat16":
            apart.plot(
                steps,
                100 * (_smooth(curve) / base - 1),
                **{key: getattr(whole.lines[-1], f"get_{key}")() for key in ("color", "linestyle")},
            )
    whole.set(xlabel="step", ylabel=f"loss, mean of {_SMOOTH} steps")
    whole.legend(fontsize=8)
    apart.set(xlabel="step", ylabel="more loss than in bfloat16, %")
    apart.axhline(0, color="black", linewidth=0.5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(curve: list[float]) -> np.ndarray:
    return np.convolve(curve, np.full(_SMOOTH, 1 / _SMOOTH), "valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="without a suffix")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for name, backend in RECIPES.items():
        curves[name] = losses(backend, steps=arguments.steps)
        more = last(curves[name]) / last(curves["bfloat16"]) - 1
        print(f"{name}: loss {last(curves[name]):.4f}, {100 * more:+.2f} % of that in bfloat16", flush=True)
    curves[_AGAIN] = losses(llama.OURS, steps=arguments.steps, seed=1)
    print(f"{_AGAIN}: loss {last(curves[_AGAIN]):.4f}", flush=True)
    about = {"model": dataclasses.asdict(MODEL), "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    record = about | {"losses": {name: [round(x, 5) for x in curve] for name, curve in curves.items()}}
    arguments.output.with_suffix(".json").write_text(json.dumps(record) + "\n")
    draw(curves, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
