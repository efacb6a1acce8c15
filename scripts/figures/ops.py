"""Tables of single ops, of collectives, and of the models of their time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.figures.lines import (
    HEAD,
    MATMULS,
    Problem,
    files,
    line,
    newest,
    of_dense,
    problems,
    published_matmuls,
    sources,
    strip,
)


def rooflines(results: Path, *landmarks: tuple[str, str, str, tuple[str, ...]]) -> Iterator[str]:
    """Problems beside the datasheet's bound, the longer of arithmetic and HBM: (benchmark, label, problem, others)."""
    yield "| problem | FLOP/byte | bound by the datasheet, us | ours, us | share of the bound | fastest other, us |"
    yield "|---" * 6 + "|"
    shown = []
    for benchmark, what, name, others in landmarks:
        p = next(p for p in problems(results, benchmark) if p.name == name)
        bound, beside = p.rows["roofline"], [p.us(other) for other in others if other in p.rows]
        intensity = 1000 * float(bound["tflops"]) / float(bound["gbs"])
        share = f"{100 * p.us('roofline') / p.us('mgpu_ops'):.0f} %"
        cells = (f"{p.us('roofline'):.4g}", f"{p.us('mgpu_ops'):.4g}", share, f"{min(beside):.4g}" if beside else "")
        yield f"| {what or name} | {intensity:.0f} | {' | '.join(cells)} |"
        shown.append(p.file)
    yield next(sources(*shown))


def matmul_roofline(results: Path) -> Iterator[str]:
    bursts = ("square-8192", "llama3-8b-qkv-4096", "llama3-8b-gate_up-128", "llama3-8b-out-128", "llama3-8b-down-256")
    held = ("h200-matmul-sustained", "llama3-70b-qkv-8192, without pause", "llama3-70b-qkv-8192", ("xla",))
    yield from rooflines(results, *((MATMULS, "", name, ("xla",)) for name in bursts), held)


def flash_attention_roofline(results: Path) -> Iterator[str]:
    forward, both, others = "h200-flash_attention", "h200-flash_attention[+-]grad.*", ("cudnn", "tokamax")
    causal, decode = "llama3-8b-8192-causal", "h200-flash_attention-decode"
    yield from rooflines(
        results,
        *((forward, "", name, others) for name in ("mha64-4096", "mha128-4096", "mha256-4096", causal)),
        (both, f"{causal}, forward + backward", causal, others),
        *((decode, "", f"llama3-8b-decode-{size}", others) for size in ("16x8192", "1x8192")),
    )


def quantized_matmul_roofline(results: Path) -> Iterator[str]:
    sizes = ("llama3-70b-gate_up-1", "llama3-8b-down-1", "llama3-8b-down-16", "llama3-8b-out-1", "llama3-70b-gate_up-64")
    names = ((f"h200-quantized_matmul-w{bits}", f"{size}-w{bits}") for bits in (8, 4) for size in sizes)
    yield from rooflines(results, *((benchmark, "", name, ("xla",)) for benchmark, name in names))


def grouped_matmul_roofline(results: Path) -> Iterator[str]:
    training, weights = "deepseek-v3-ep8-gate_up-4096-random", "qwen3-235b-gate_up-8192-even"
    decoding = ("mixtral-8x7b-gate_up-16-random", "mixtral-8x7b-down-128-random", "deepseek-v3-ep8-down-64-sparse")
    others = ("jax-pallas", "tokamax")
    yield from rooflines(
        results,
        *(("h200-grouped_matmul-training", "", name, others) for name in (training, weights)),
        ("h200-ragged_contraction", "", f"{weights}-drhs", others),
        *(("h200-grouped_matmul-decoding", "", name, others) for name in decoding),
    )


def matmul(results: Path) -> Iterator[str]:
    forward, both = published_matmuls(results), problems(results, r"h200-matmul\+grad")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "XLA (cuBLAS)", found, "xla")
        yield line(f"{what}, m >= 2048", "XLA (cuBLAS)", [p for p in found if p.shape[0] >= 2048], "xla")
        for m in sorted({p.shape[0] for p in found if p.shape[0] < 2048}):
            yield line(f"{what}, m = {m}", "XLA (cuBLAS)", [p for p in found if p.shape[0] == m], "xla")
    sampled, drawn = problems(results, r"h200-matmul", "jax-pallas"), problems(results, r"h200-matmul-anywhere")
    yield line("forward", "JAX's sample kernel, tuned", sampled, "jax-pallas")
    yield line("forward, random shapes, untuned", "XLA (cuBLAS)", drawn, "xla")
    sustained = problems(results, r"h200-matmul-sustained")
    yield line("without pause, m >= 4096", "XLA (cuBLAS)", sustained, "xla")
    yield from sources(*files(forward, both, sampled, drawn, sustained))


_TRAINING = 8192  # rows of all groups, from which on a product is one of training


def grouped_matmul(results: Path) -> Iterator[str]:
    training, decoding = problems(results, "h200-grouped_matmul-training"), problems(results, "h200-grouped_matmul-decoding")
    dlhs, drhs = problems(results, "h200-grouped_matmul-dlhs"), problems(results, "h200-ragged_contraction")
    dense, jax, tokamax = "rate of one dense matmul (cuBLAS)", "JAX's kernel, tuned", "tokamax, tuned"
    yield from HEAD
    yield line("training", dense, training, "dense", ratio=of_dense)
    yield line("gradient of lhs", dense, dlhs, "dense", ratio=of_dense)
    yield line("gradient of rhs", dense, drhs, "dense", ratio=of_dense)
    yield line("training", jax, training, "jax-pallas")
    yield line("training", tokamax, training, "tokamax")
    yield line("training", "the faster of the two", training, "jax-pallas", "tokamax")
    yield line("gradient of lhs", jax, dlhs, "jax-pallas")
    yield line("gradient of lhs", tokamax, dlhs, "tokamax")
    yield line("gradient of rhs", jax, drhs, "jax-pallas")
    yield line("decoding", jax, decoding, "jax-pallas")
    yield line("decoding", tokamax, decoding, "tokamax")
    yield line("decoding", "the faster of the two", decoding, "jax-pallas", "tokamax")
    untuned = [
        p for p in problems(results, "h200-grouped_matmul-other-models", "jax-pallas", "tokamax") if p.shape[0] >= _TRAINING
    ]
    untuned_drhs = problems(results, "h200-ragged_contraction-other-models", "jax-pallas")
    yield line("other models, untuned, training", dense, untuned, "dense", ratio=of_dense)
    yield line("other models, untuned, training", "the faster of the two", untuned, "jax-pallas", "tokamax")
    yield line("other models, untuned, gradient of rhs", dense, untuned_drhs, "dense", ratio=of_dense)
    yield line("other models, untuned, gradient of rhs", "JAX's kernel", untuned_drhs, "jax-pallas")
    rates = [float(p.rows["mgpu_ops"]["gbs"]) / 1000 for p in decoding]
    yield f"\nDecoding moves {min(rates):.1f} to {max(rates):.1f} TB/s."
    yield from sources(*files(training, decoding, dlhs, drhs, untuned, untuned_drhs))


def grouped_problems(results: Path) -> Iterator[str]:
    """A line a problem: our rate over dense's, forward and both gradients; the fastest competitor's time over ours."""
    training = problems(results, "h200-grouped_matmul-training")
    gradients = [problems(results, what) for what in ("h200-grouped_matmul-dlhs", "h200-ragged_contraction")]
    rates = {p.name: of_dense(p) for found in gradients for p in found}
    yield "| problem | rows per group | forward of dense | x best competitor | dlhs of dense | drhs of dense |"
    yield "|---|---|---|---|---|---|"
    for p in training:
        (groups,) = re.findall(r" g=(\d+)", p.rows["mgpu_ops"]["problem"])
        best = min(p.us("jax-pallas"), p.us("tokamax")) / p.us("mgpu_ops")
        numbers = (of_dense(p), best, rates[f"{p.name}-dlhs"], rates[f"{p.name}-drhs"])
        yield f"| {p.name} | {p.shape[0] // int(groups)} | {' | '.join(f'{x:.2f}' for x in numbers)} |"


def flash_attention(results: Path) -> Iterator[str]:
    forward, both = problems(results, "h200-flash_attention"), problems(results, "h200-flash_attention[+-]grad.*")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "cuDNN", found, "cudnn")
        for dim in sorted({p.shape[-1] for p in found}):
            yield line(f"{what}, head dim {dim}", "cuDNN", [p for p in found if p.shape[-1] == dim], "cudnn")
    beside_both = problems(results, "h200-flash_attention", "cudnn", "tokamax")
    yield line("forward", "tokamax, tuned", beside_both, "tokamax")
    yield line("forward", "the faster of the two", beside_both, "cudnn", "tokamax")
    decoding = problems(results, "h200-flash_attention-decode")
    other_dims = problems(results, "h200-flash_attention-decode-heads")
    yield line("decoding, the kernel", "cuDNN", decoding, "cudnn")
    yield line("decoding, other head dims, untuned", "cuDNN", other_dims, "cudnn")
    yield from sources(*files(forward, beside_both, both, decoding, other_dims))


def gated_matmul(results: Path) -> Iterator[str]:
    found = problems(results, "h200-gated_matmul-.*")
    gradients = [p for p in found if p.name.endswith("-gradient")]
    yield from HEAD
    yield line("forward", "XLA (two products, cuBLAS)", [p for p in found if p not in gradients], "xla")
    yield line("gradients of gate and up", "XLA (two products, cuBLAS)", gradients, "xla")
    yield from sources(*files(found))


def quantized_matmul(results: Path) -> Iterator[str]:
    """Products with 8- and 4-bit weights, by rows of x: the share of the H200's bandwidth that the packed bytes reach."""
    yield "| weights | m | problems | least share of 4.8 TB/s | most | XLA's time over ours, mean |"
    yield "|---" * 6 + "|"
    found = {bits: problems(results, f"h200-quantized_matmul-w{bits}") for bits in (8, 4)}
    for bits, m in itertools.product(found, (1, 8, 16, 64)):
        here = [p for p in found[bits] if p.shape[0] == m]
        shares = sorted((float(p.rows["mgpu_ops"]["gbs"]) / 4800, p.name.rsplit("-", 2)[0]) for p in here)
        least, most = (f"{share:.2f} ({name})" for share, name in (shares[0], shares[-1]))
        yield f"| int{bits} | {m} | {len(here)} | {least} | {most} | {strip('', '', here, 'xla').mean:.2f}x |"
    yield from sources(*files(*found.values()))


def cross_entropy(results: Path) -> Iterator[str]:
    forward, gradient = problems(results, "h200-cross_entropy"), problems(results, "h200-cross_entropy-gradient")
    yield from HEAD
    yield line("forward", "XLA", forward, "xla")
    yield line("gradient", "XLA", gradient, "xla")
    rates = [float(p.rows["mgpu_ops"]["gbs"]) / 1000 for p in forward + gradient if p.shape[0] >= 4096]
    yield f"\nWith 4096 tokens the kernels move {min(rates):.1f} to {max(rates):.1f} TB/s."
    yield from sources(*files(forward, gradient))


def moe(results: Path) -> Iterator[str]:
    layers, both, every = layers_of_experts(results), layers_of_experts(results, "+grad"), problems(results, r"h200-moe\+grad")
    parts = "the faster of JAX's and tokamax's kernels for each product, and XLA"
    yield from HEAD
    yield line("whole layer, forward", parts, layers, "fastest-parts")
    yield line("whole layer, forward + backward", parts, both, "fastest-parts")
    yield line("whole layer, forward + backward", "arithmetic at the datasheet's rate", every, "roofline")
    elsewhere = [layers_of_experts(results, passes, "h100") for passes in ("", "+grad")]
    for what, found in zip(("forward", "forward + backward"), elsewhere, strict=True):
        yield line(f"on an H100, {what}", parts, found, "fastest-parts")
    yield from sources(*files(layers, both, every, *elsewhere))


def moe_fp8(results: Path) -> Iterator[str]:
    """Layers of experts, forward and backward, in 16 and in 8 bits."""
    yield "| GPU | layer | rows an expert | `moe`, ms | `fp8_moe`, ms | `fp8_moe` with a state, ms | `moe` over that |"
    yield "|---" * 7 + "|"
    found = on_each_gpu(results, "moe-grad-fp8")
    for gpu, p in found:
        tokens, _, _, top_k = p.shape
        experts = int(re.search(r"g=(\d+)", p.rows["mgpu_ops"]["problem"])[1])  # type: ignore[index]
        times = [p.us(impl) / 1000 for impl in ("mgpu_ops", "fp8", "fp8-delayed")]
        cells = gpu, p.name, tokens * top_k // experts, *(f"{ms:.2f}" for ms in times), f"{times[0] / times[2]:.2f}x"
        yield f"| {' | '.join(map(str, cells))} |"
    yield from sources(*files([p for _, p in found]))


def moe_quantized(results: Path) -> Iterator[str]:
    """Layers of experts in decoding, with matrices of 16, 8 and 4 bits."""
    yield "| GPU | layer | tokens | `moe`, us | int8, us | `moe` over int8 | int4, us | `moe` over int4 |"
    yield "|---" * 8 + "|"
    found = on_each_gpu(results, "moe-quantized")
    for gpu, p in found:
        wide, *narrow = (p.us(impl) for impl in ("mgpu_ops", "int8", "int4"))
        of_each = (cell for us in narrow for cell in (f"{us:.0f}", f"{wide / us:.2f}x"))
        yield f"| {gpu} | {p.name} | {p.shape[0]} | {wide:.0f} | {' | '.join(of_each)} |"
    yield from sources(*files([p for _, p in found]))


def on_each_gpu(results: Path, what: str) -> list[tuple[str, Problem]]:
    """The problems of a benchmark, of which a GPU may have none, with the GPU's name."""
    names = [name for name in ("H200", "H100") if any(newest(results, f"{name.lower()}-{what}"))]
    return [(name, p) for name in names for p in problems(results, f"{name.lower()}-{what}")]


def layers_of_experts(results: Path, passes: str = "", gpu: str = "h200") -> list[Problem]:
    """Whole layers beside the fastest parts of others; passes: "+grad" with gradients."""
    return problems(results, f"{gpu}-moe{re.escape(passes)}-fastest")


def size(n: int) -> str:
    return next(f"{n // scale} {unit}" for scale, unit in ((2**20, "MiB"), (2**10, "KiB"), (1, "B")) if n >= scale)


def collectives(results: Path) -> Iterator[str]:
    """Of what a call adds to a chain of calls: XLA's time over ours."""
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    found = {
        (int(row["devices"]), row["op"], int(row["bytes"])): p
        for p in problems(results, rf"h200(x\d+)?-({'|'.join(ops)})(-.*)?")
        if "bfloat16" in (row := p.rows["xla"])["problem"]
    }
    keys = sorted(found, key=lambda key: (key[0], ops.index(key[1]), key[2]))

    def cell(devices: int, op: str, payload: int, impl: str) -> str:
        p = found.get((devices, op, payload))
        if p is None or impl not in p.rows:
            return ""
        if impl == "mgpu_ops" and p.rows[impl]["config"].startswith(("algorithm=xla ", "xla")):
            return "XLA runs"
        return f"{p.us('xla') / p.us(impl):.2f}x"

    columns = list(
        dict.fromkeys((*key[:2], impl) for key in keys for impl in sorted(found[key].rows) if impl.startswith("mgpu_ops"))
    )
    columns.sort(key=lambda column: (column[0], ops.index(column[1])))
    titles = [f"{n} GPUs: {op}{impl.removeprefix('mgpu_ops')}" for n, op, impl in columns]
    yield f"| payload | {' | '.join(titles)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for payload in sorted({key[2] for key in keys}):
        yield f"| {size(payload)} | {' | '.join(cell(n, op, payload, impl) for n, op, impl in columns)} |"
    yield from sources(*(found[key].file for key in keys))


_MODELLED = re.compile(
    r"(\w+)('s baseline)?, (.+): (\d+) problems, (\d+) times; error median ([\d.]+), 95th percentile ([\d.]+)"
    r"(?:; the model's choice over the fastest: mean ([\d.]+), worst ([\d.]+))?"
)


def model_error(results: Path) -> Iterator[str]:
    """How far the cost models are from what was measured (`scripts/model_error.py`). LookupError where no file says so."""
    paths = sorted(results.glob("????-??-??-h200-model-error.txt"))
    if not paths:
        raise LookupError(f"{results} has no model-error.txt")
    yield "| op | problems | times | error, median | p95 | the model's choice, mean | worst |"
    yield "|---" * 7 + "|"
    for told in paths[-1].read_text().splitlines():
        if (found := _MODELLED.fullmatch(told)) is None:
            continue
        op, baseline, what, problems_of_it, times, median, p95, mean, worst = found.groups()
        if baseline:
            op = f"{'cuDNN' if op.startswith('flash_attention') else 'XLA'}'s {op}"
        chosen = (mean, worst) if mean and times != problems_of_it else ("", "")
        yield (
            f"| {op}, {what} | {problems_of_it} | {times} | {100 * float(median):.1f} % | {100 * float(p95):.1f} % "
            f"| {chosen[0]} | {chosen[1]} |"
        )
    yield next(sources(paths[-1]))
