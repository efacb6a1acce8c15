"""Measures how long programs take from `import jax` to an executable, by stage, beside other implementations.

    python scripts/compile_times.py                                    # on a machine with a GPU, for that one
    python scripts/compile_times.py --gpu h200                         # on any machine: the kernels alone, ours only
    python scripts/compile_times.py --case attention --case llama --output results/2026-01-31-h200-compile-times.jsonl
    python scripts/compile_times.py --cached kernels                   # of processes that find what one before them lowered
    python scripts/compile_times.py --cached jax                       # and what it compiled, in JAX's persistent cache

Each measurement is a process of its own, which has compiled nothing before. It reads no cache; with `--cached` that
of a process before it, in a folder of their own. Of a stage it tells
seconds by the clock, and of CPUs: those of the process and of what it started, such as ptxas. On a machine that others use too
the second says more, on an idle one with many cores the first. The median of `--repeat` processes is told.

Stages: "import" of JAX and the implementation; "start" of JAX's backend; "trace" to a jaxpr; "lower" to StableHLO, kernels
included; "compile".
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

STAGES = ("import", "start", "trace", "lower", "compile")
CASES = {  # and which implementations there are of it
    "attention": ("mgpu_ops", "cudnn", "tokamax"),
    "attention-forward": ("mgpu_ops", "cudnn", "tokamax"),
    "attention-deterministic": ("mgpu_ops",),
    "attention-segments": ("mgpu_ops",),
    "matmul": ("mgpu_ops",),
    "gated_matmul": ("mgpu_ops",),
    "rms_norm": ("mgpu_ops",),
    "grouped_matmul": ("mgpu_ops",),
    "llama": ("mgpu_ops", "xla"),
}
FIELDS = ("case", "implementation", "stage", "seconds", "cpu_seconds", "processes", "gpu", "jax", "cores", "date")


# --- What is compiled: (function, shapes of its arguments) --------------------------------------------------------------


def attention(implementation: str, *, gradient: bool = True, segments: bool = False, deterministic: bool = False) -> Any:
    """8192 tokens, 32 heads on 8 of keys, head dim 128, causal: output, and gradients of all three."""
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any) -> Any:
        if implementation == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        if implementation == "tokamax":
            import tokamax

            return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic")
        import mgpu_ops

        ids = jnp.arange(8192)[None] // 1024 if segments else None
        options: dict[str, Any] = {"deterministic": deterministic, "q_segment_ids": ids, "backend": "mosaic"}
        return mgpu_ops.flash_attention(q, k, v, causal=True, **options)

    def with_gradient(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    q, kv = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    return (with_gradient if gradient else attend), (q, kv, kv)


def op(name: str) -> Any:
    """One of 8192 rows of 4096, by 4096 or 14336."""
    import jax
    import jax.numpy as jnp

    import mgpu_ops

    x, down, up = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 4096), (4096, 4096), (4096, 14336)))
    experts = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16)
    shapes = {
        "matmul": (x, down),
        "gated_matmul": (x, up, up),
        "rms_norm": (x, jax.ShapeDtypeStruct((4096,), jnp.bfloat16)),
        "grouped_matmul": (x, experts, jax.ShapeDtypeStruct((8,), jnp.int32)),
    }
    return functools.partial(getattr(mgpu_ops, name), backend="mosaic"), shapes[name]


def llama(implementation: str) -> Any:
    """The step of training of `examples/llama.py`: 8192 tokens through four layers of Llama-3 8B, loss and gradients."""
    import jax
    import jax.numpy as jnp

    sys.path.append(str(Path(__file__).parents[1]))
    from examples import llama as example

    model = example.LLAMA3_8B
    params = jax.eval_shape(functools.partial(example.init, model, dtype=jnp.bfloat16), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 8193), jnp.int32)
    return functools.partial(example.gradients, model, example.BACKENDS[implementation]), (params, tokens)


def program(case: str, implementation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    options = {
        "attention": {},
        "attention-forward": {"gradient": False},
        "attention-deterministic": {"deterministic": True},
        "attention-segments": {"segments": True},
    }
    if case in options:
        return attention(implementation, **options[case])
    return llama(implementation) if case == "llama" else op(case)


# --- One measurement, in a process of its own ---------------------------------------------------------------------------

Times = dict[str, tuple[float, float]]  # of a stage, seconds by the clock and of CPUs


@contextmanager
def stage(name: str, times: Times) -> Iterator[None]:
    clock, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    times[name] = (time.perf_counter() - clock, sum(os.times()[:4]) - cpu)


def measure(case: str, implementation: str, gpu: str | None) -> dict[str, Any]:
    """The stages' times, with the GPU's name and JAX's version."""
    times: Times = {}
    with stage("import", times):
        import jax

        if implementation == "tokamax":
            import tokamax  # noqa: F401
        else:
            import mgpu_ops  # noqa: F401
    with stage("start", times):
        around, place = _somewhere_else(gpu) if gpu else (nullcontext(), lambda shapes: shapes)
        name = gpu or jax.devices()[0].device_kind
        function, shapes = program(case, implementation)
    with around:
        with stage("trace", times):
            traced = jax.jit(function).trace(*place(shapes))
        with stage("lower", times):
            lowered = traced.lower()
        with stage("compile", times):
            lowered.compile()
    return {"times": times, "gpu": name, "jax": jax.__version__}


def _somewhere_else(gpu: str) -> tuple[Any, Callable[[Any], Any]]:
    """For a GPU that is not here: the context to compile in, and what places the arguments there."""
    from mgpu_ops.core import aot

    if reason := aot.available():
        raise SystemExit(reason)
    return aot.elsewhere(gpu)


# --- All measurements ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    case: str
    implementation: str
    runs: list[dict[str, Any]]

    def seconds(self, name: str, which: Literal[0, 1] = 0) -> float:
        """The median of a stage, or of "all" but the import and start: by the clock (0) or of CPUs (1)."""
        names = ("trace", "lower", "compile") if name == "all" else (name,)
        return statistics.median(sum(run["times"][one][which] for one in names) for run in self.runs)

    def rows(self) -> Iterator[dict[str, Any]]:
        first = self.runs[0]
        for name in (*STAGES, "all"):
            values = (self.case, self.implementation, name, *(round(self.seconds(name, which), 3) for which in (0, 1)))
            about = (len(self.runs), first["gpu"], first["jax"], len(os.sched_getaffinity(0)), f"{datetime.date.today()}")
            yield dict(zip(FIELDS, (*values, *about), strict=True))

    def line(self) -> str:
        told = "  ".join(f"{name} {self.seconds(name):.2f} ({self.seconds(name, 1):.2f})" for name in (*STAGES, "all"))
        return f"{self.case:24} {self.implementation:9} {told}"


_JAXS, _OURS = "JAX_COMPILATION_CACHE_DIR", "MGPU_OPS_KERNEL_CACHE"
_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
Cached = Literal["kernels", "jax"]


def in_processes(case: str, implementation: str, gpu: str | None, repeat: int, cached: Cached | None = None) -> Measured | None:
    """None, with a line that says why, for what does not run here.

    cached: one more process fills our cache of kernels first, or JAX's persistent one.
    """
    command = [sys.executable, __file__, "--one", case, implementation, *(["--gpu", gpu] if gpu else [])]
    environment = {name: value for name, value in os.environ.items() if name != _JAXS} | {_OURS: "off"}
    if gpu:
        environment["JAX_PLATFORMS"] = "cpu"
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        if cached:
            environment |= {_OURS: folder} | ({_JAXS: folder, **_ALL} if cached == "jax" else {})
        for _ in range(repeat + bool(cached)):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(f"{case:24} {implementation:9} {(done.stderr.strip().splitlines() or ['failed'])[-1]}", flush=True)
                return None
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return Measured(case, implementation, runs[bool(cached) :])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this; may be repeated (default: all)")
    parser.add_argument("--implementation", action="append", choices=["mgpu_ops", "cudnn", "tokamax", "xla"], help="only this")
    parser.add_argument("--gpu", help="compile for this GPU, which is not here")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--output", type=Path, help="write the times to this file too, one line of JSON for each stage")
    cached = "times with a full cache: of our lowered kernels, or JAX's persistent compilation cache, which has these too"
    parser.add_argument("--cached", choices=["kernels", "jax"], help=cached)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "IMPLEMENTATION"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        case, implementation = given.one
        print(json.dumps(measure(case, implementation, given.gpu)))
        return
    for folder in ("core", "mgpu_ops"):  # as installing does
        compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)
    print(f"seconds by the clock (and of CPUs), the median of {given.repeat} processes", flush=True)
    rows: list[dict[str, Any]] = []
    for case in given.case or CASES:
        for implementation in CASES[case]:
            wanted = implementation == "mgpu_ops" or not given.gpu
            if not wanted or implementation not in (given.implementation or CASES[case]):
                continue
            if found := in_processes(case, implementation, given.gpu, given.repeat, given.cached):
                print(found.line(), flush=True)
                rows += found.rows()
                if given.output:
                    _write(given.output, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
