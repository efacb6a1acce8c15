"""All ops at a glance: a line or two of each, on H200s and on an H100."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scripts.figures.lines import HEAD, Problem, Strip, files, line, line_of, problems, published_matmuls, sources, strip
from scripts.figures.ops import layers_of_experts
from scripts.figures.programs import steps_of_programs, training_steps


def strips(results: Path) -> Iterator[Strip]:
    """An op or two lines of it, each beside the fastest that JAX users have."""
    matmuls, grads = published_matmuls(results), problems(results, r"h200-matmul\+grad")
    both = problems(results, "h200-flash_attention[+-]grad.*")
    few, gated = problems(results, "h200-flash_attention-decode"), problems(results, "h200-gated_matmul-llama3-8b")
    training, decoding = problems(results, "h200-grouped_matmul-training"), problems(results, "h200-grouped_matmul-decoding")
    weights = problems(results, "h200-ragged_contraction")
    beside_both = problems(results, "h200-flash_attention", "cudnn", "tokamax")
    yield strip("attention, forward", "faster of cuDNN, tokamax", beside_both, "cudnn", "tokamax")
    yield strip("attention, forward + backward", "cuDNN", both, "cudnn")
    yield from drawn_attention(results, "h200")
    for what, kind in (("attention, other models, untuned", ""), ("other models, forward + backward", "-grad(-slots)?")):
        models = problems(results, f"h200-flash_attention-other-models{kind}", "cudnn")
        yield strip(what, "cuDNN", models, "cudnn")
    yield strip("attention, decoding", "cuDNN", few, "cudnn")
    yield strip("grouped matmul, training", "faster of JAX's, tokamax", training, "jax-pallas", "tokamax")
    yield strip("grouped matmul, decoding", "faster of JAX's, tokamax", decoding, "jax-pallas", "tokamax")
    yield strip("grouped matmul, gradient of weights", "JAX's kernel", weights, "jax-pallas")
    yield from grouped_of_other_models(results)
    yield strip("matmul, m = 128", "XLA (cuBLAS)", [p for p in matmuls if p.shape[0] == 128], "xla")
    yield strip("matmul, m >= 256", "XLA (cuBLAS)", [p for p in matmuls if p.shape[0] >= 256], "xla")
    yield strip("matmul, random shapes, untuned", "XLA (cuBLAS)", problems(results, "h200-matmul-anywhere"), "xla")
    yield strip("matmul, other models, untuned", "XLA (cuBLAS)", problems(results, "h200-matmul-other-models"), "xla")
    epilogues = problems(results, "h200-matmul-anywhere-epilogues")
    yield strip("matmul with random epilogues, untuned", "XLA", epilogues, "xla")
    eight_bits = problems(results, "h200-matmul-anywhere-8-bits")
    yield strip("matmul of FP8 and int8, random shapes, untuned", "XLA", eight_bits, "xla")
    rows = problems(results, "h200-matmul-llm-rows")
    yield strip("matmul, layers of Llama 3, 1 to 16384 rows", "XLA (cuBLAS)", rows, "xla")
    yield strip("matmul, forward + backward", "XLA (cuBLAS)", grads, "xla")
    yield strip("gated matmul", "XLA (two products)", gated, "xla")
    gated = problems(results, "h200-gated_matmul-other-models")
    yield strip("gated matmul, other models, untuned", "XLA (two products)", gated, "xla")
    yield from [*training_steps(results), *untuned_models(results), *models_with_experts(results)]
    yield strip("mixture of experts, forward", "fastest parts of others", layers_of_experts(results), "fastest-parts")
    grads = layers_of_experts(results, "+grad")
    yield strip("mixture of experts, forward + backward", "fastest parts of others", grads, "fastest-parts")
    yield strip("cross-entropy, forward", "XLA", problems(results, "h200-cross_entropy"), "xla")
    yield strip("cross-entropy, gradient", "XLA", problems(results, "h200-cross_entropy-gradient"), "xla")

    two, four = problems(results, "h200x2-all_reduce"), problems(results, "h200x4-all_reduce")
    workspace = "mgpu_ops, workspace"
    small = [p for p in two if workspace in p.rows]
    large = [p for p in two if p not in small]
    yield strip(
        "all_reduce, 2 GPUs, <= 1 MiB, workspace", "XLA, no NVLS", small, "xla", ratio=lambda p: p.us("xla") / p.us(workspace)
    )
    yield strip("all_reduce, 2 GPUs, >= 4 MiB", "XLA (NCCL, no NVLS)", large, "xla")
    yield strip(
        "all_reduce, 4 GPUs, kernel (calls up to 1 MiB run XLA)", "XLA, no NVLS", [p for p in four if runs_kernel(p)], "xla"
    )


def drawn_attention(results: Path, gpu: str) -> Iterator[Strip]:
    others, what = ("cudnn", "tokamax"), f"{gpu}-flash_attention-anywhere"
    yield strip("attention, random shapes, untuned", "faster of cuDNN, tokamax", problems(results, what), *others, least=1)
    yield strip("the same, forward + backward", "cuDNN", problems(results, f"{what}-grad"), "cudnn")


def grouped_of_other_models(results: Path) -> Iterator[Strip]:
    """Products and weights' gradients of models that nothing is tuned for; the others have settings that won elsewhere."""
    products = problems(results, "h200-grouped_matmul-other-models")
    weights = problems(results, "h200-ragged_contraction-other-models", "jax-pallas")
    what = "grouped matmul, other models, untuned"
    yield strip(what, "faster of JAX's, tokamax", products, "jax-pallas", "tokamax", least=1)
    yield strip("the same, gradient of weights", "JAX's kernel", weights, "jax-pallas")


_OF_A_LAYER = ("gated_matmul", "rms_norm", "rotary", "embedding", "cross_entropy", "quantize")


def h100(results: Path) -> Iterator[str]:
    """What was timed on an H100, with the configs of the H200."""
    forward, both = problems(results, "h100-flash_attention-llm"), problems(results, r"h100-flash_attention\+grad-llm")
    products, grouped = problems(results, "h100-matmul-llm"), problems(results, "h100-grouped_matmul-training")
    rows, drawn = problems(results, "h100-matmul-llm-rows"), problems(results, "h100-matmul-anywhere")
    decoding = problems(results, "h100-grouped_matmul-decoding")
    yield from HEAD
    yield line("attention, forward", "cuDNN", forward, "cudnn")
    yield line("attention, forward + backward", "cuDNN", both, "cudnn")
    yield from map(line_of, drawn_attention(results, "h100"))
    yield line("matmul", "XLA (cuBLAS)", products, "xla")
    yield line("matmul, layers of Llama 3, 1 to 16384 rows", "XLA (cuBLAS)", rows, "xla")
    yield line("matmul, random shapes, untuned", "XLA (cuBLAS)", drawn, "xla")
    yield line("grouped matmul, training", "JAX's kernel", grouped, "jax-pallas")
    yield line("grouped matmul, decoding", "faster of JAX's, tokamax", decoding, "jax-pallas", "tokamax")
    layers = [layers_of_experts(results, passes, "h100") for passes in ("", "+grad")]
    for what, found in zip(("forward", "forward + backward"), layers, strict=True):
        yield line(f"mixture of experts, {what}", "fastest parts of others", found, "fastest-parts")
    others = [(op, problems(results, f"h100-{op}-anywhere")) for op in _OF_A_LAYER]
    for op, found in others:
        yield line(f"{op}, random shapes, untuned", "XLA", found, "xla")
    norms = problems(results, "h100-rotary-norms")
    yield line("rotary after norms of heads, forward and gradients, untuned", "XLA", norms, "xla")
    yield from map(line_of, [*training_steps(results, "h100"), *untuned_models(results, "h100")])
    steps = (path for models in ("llama", "llama-models") for path in steps_of_programs(results, "h100", models)[1])
    attention = (problems(results, f"h100-flash_attention-anywhere{kind}") for kind in ("", "-grad"))
    timed = (forward, both, *attention, products, rows, drawn, grouped, decoding, *layers, norms)
    yield next(sources(*files(*timed, *(found for _, found in others)), *steps))


def runs_kernel(p: Problem) -> bool:
    return not p.rows["mgpu_ops"]["config"].startswith("algorithm=xla ")


def summary(results: Path) -> Iterator[str]:
    yield from HEAD
    yield from map(line_of, strips(results))


def untuned_models(results: Path, gpu: str = "h200") -> Iterator[Strip]:
    """Training steps of models that nothing is tuned for."""
    return training_steps(results, gpu, "llama-models", ", other models, untuned")


def models_with_experts(results: Path) -> Iterator[Strip]:
    """Training steps of them."""
    beside = "XLA, cuDNN and JAX's ragged_dot"
    return training_steps(results, models="llama-experts", of=", models with experts", beside=beside)


_GLANCE = (  # of the `strips`, for a first look: each kind of op, tuned and untuned, and what is behind
    "attention, forward + backward",
    "attention, random shapes, untuned",
    "attention, decoding",
    "matmul, m >= 256",
    "matmul, random shapes, untuned",
    "matmul, other models, untuned",
    "matmul of FP8 and int8, random shapes, untuned",
    "grouped matmul, training",
    "grouped matmul, other models, untuned",
    "a training step in 16 bits",
    "a training step in 16 bits, other models, untuned",
    "a training step in 16 bits, models with experts",
    "all_reduce, 4 GPUs, kernel (calls up to 1 MiB run XLA)",
)


def glance(results: Path) -> Iterator[str]:
    yield "| | beside | problems | mean | worst | best | earlier config |"
    yield "|---" * 7 + "|"
    by_what = {s.what: s for s in strips(results)}
    for s in (by_what[what] for what in _GLANCE):
        extremes = f"{s.ratios[0][0]:.2f}x | {s.ratios[-1][0]:.2f}x"
        earlier = "" if s.earlier is None else s.earlier
        yield f"| {s.what} | {s.beside} | {len(s.ratios)} | {s.mean:.2f}x | {extremes} | {earlier} |"
