"""Every config that comes with the package can be read and compiles for its GPU without spills."""

from __future__ import annotations

import functools
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import mgpu_ops
from mgpu_ops import GatedMatmulProblem, MatmulProblem, RaggedContractionProblem, spec_of
from mgpu_ops.attention.heads import rounded
from mgpu_ops.attention.problem import Problem
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import database, resolution, winner
from mgpu_ops.registry.spec import baseline_of
from tests import thorough

FILES = sorted(Path(mgpu_ops.__path__[0], "configs").glob("*/*.json"))
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def kind_of(op: str, problem: Any) -> tuple[Any, ...]:
    """What of a problem, its sizes apart, decides which code its kernel is made of."""
    if isinstance(problem, Problem):
        flags = [v for v in vars(problem).values() if isinstance(v, str | bool)]
        return rounded(problem.head_dim), problem.q_heads == problem.kv_heads, problem.left is None, problem.right, *flags
    arrays = jax.eval_shape(functools.partial(spec_of(op).inputs, problem), jax.random.key(0))
    flags = [v for name, v in vars(problem).items() if not isinstance(v, int) and name != "spread"]  # that sizes are drawn with
    return *flags, *(x.ndim for x in arrays)


def timeless(config: Any) -> Any:
    """Less what only decides which block works on which tile when, and that beforehand."""
    return replace(config, section_waves=1) if hasattr(config, "section_waves") else config


def kernels() -> dict[str, tuple[str, Any, Any, str]]:
    """The distinct (op, problem, config, GPU) of all files; of several sizes, the smallest."""
    found: dict[Any, tuple[str, Any, Any, str]] = {}
    for path in FILES:
        spec = spec_of(path.stem)
        for entry in database.read(path).entries:
            problem = database.to_problem(spec, entry.problem)
            config = database.to_config(spec, entry.config)
            if spec.leaves_to_xla(config):
                continue
            # Sizes are constants of a kernel, but what it needs of the GPU does not depend on them.
            key = (path.parent.name, path.stem, *kind_of(path.stem, problem), timeless(config))
            if key not in found or spec.bytes(problem) < spec.bytes(found[key][1]):
                found[key] = (path.stem, problem, config, path.parent.name)
    return {
        f"{gpu_key}-{op}-" + "x".join(map(str, vars(problem).values())): row
        for row in found.values()
        for op, problem, _, gpu_key in [row]
    }


KERNELS = kernels()


def mostly(op: str, problem: Any, config: Any) -> tuple[Any, ...]:
    """What of a problem decides most of its kernel: of attention the head dims, few queries and the pass, but not the mask."""
    if not isinstance(problem, Problem):
        return kind_of(op, problem)
    return rounded(problem.head_dim), problem.v_dim, problem.q_tokens <= 16, getattr(config, "mode", "")


def size(config: Any) -> int:
    """Of the tile whose accumulators lie in registers: the kernel of a larger one is nearer to a spill."""
    return math.prod(v for name, v in vars(config).items() if name in ("tile_m", "tile_n", "compute_warpgroups"))


def sample() -> list[str]:
    """Of each op and kind of code, the kernel of the largest tile: those that `make test` compiles, an op's together."""
    found: dict[Any, str] = {}
    for name, (op, problem, config, _) in KERNELS.items():
        kind = (op, *mostly(op, problem, config))
        if kind not in found or size(config) > size(KERNELS[found[kind]][2]):
            found[kind] = name
    return sorted(found.values(), key=lambda name: KERNELS[name][0])


SAMPLE = sample()
OF_EACH_OP = {KERNELS[name][0]: name for name in reversed(SAMPLE)}  # compiled and disassembled below: not once more
REPEATED = KERNELS.keys() - set(SAMPLE) | set(OF_EACH_OP.values())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_is_valid_and_every_entry_can_run(path):
    assert database.validate(path, spec_of(path.stem)) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_stored_errors_are_within_the_tolerance(path):
    spec = spec_of(path.stem)
    for entry in database.read(path).entries:
        assert entry.evidence.error <= spec.tolerance(database.to_problem(spec, entry.problem))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_is_where_it_is_looked_for_and_written_as_the_writer_writes_it(path):
    file = database.read(path, gpu_key=path.parent.name, op=path.stem)
    assert path == database.shipped_path(file.gpu, file.op)
    assert path.read_bytes() == database.encode(file)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_entries_are_no_slower_than_the_default_in_their_own_run(path):
    for entry in database.read(path).entries:
        evidence = entry.evidence
        assert evidence.default_us is None or evidence.median_us <= evidence.default_us


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_entry_is_what_its_problem_gets(path, monkeypatch):
    spec = spec_of(path.stem)
    device = gpu.find(path.parent.name)
    for entry in database.read(path).entries:
        problem, config = database.to_problem(spec, entry.problem), database.to_config(spec, entry.config)
        monkeypatch.setenv("MGPU_OPS_OBJECTIVE", entry.evidence.objective)
        found = resolution.resolve(spec, problem, device)
        assert found.source == "shipped"
        assert found.config == (spec.default(problem, device) if spec.leaves_to_xla(config) else config)
        assert found.runs == winner.of_entry(entry, spec)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_call_runs_xla_where_its_entry_has_it_at_least_1_percent_faster_and_nowhere_else(path):
    spec = spec_of(path.stem)
    for entry in database.read(path).entries:
        e = entry.evidence
        same = baseline_of(spec, database.to_problem(spec, entry.problem)).differs is None
        faster = same and e.baseline_us is not None and e.median_us >= 1.01 * e.baseline_us
        no_kernel = spec.leaves_to_xla(database.to_config(spec, entry.config))
        assert winner.of_entry(entry, spec) == ("xla" if faster or no_kernel else "kernel")


def test_a_matmul_that_xla_won_is_xlas_own_and_the_kernel_runs_for_who_names_it(monkeypatch):
    ran = []

    def run(problem, config, device, *arrays, interpret):
        ran.append(config)
        return spec_of("matmul").reference(problem, *arrays)

    monkeypatch.setattr(sys.modules["mgpu_ops.matmul"], "SPEC", replace(spec_of("matmul"), run=run))
    spec, device = spec_of("matmul"), gpu.find("h200")
    entries = database.read(database.shipped_path("h200", "matmul")).entries
    problem = next(MatmulProblem(**entry.problem) for entry in entries if winner.of_entry(entry, spec) == "xla")
    a, b = (
        jax.ShapeDtypeStruct(shape[::-1] if stored == "t" else shape, problem.dtype)
        for shape, stored in zip(((problem.m, problem.k), (problem.k, problem.n)), problem.layout)
    )
    call = functools.partial(
        mgpu_ops.matmul,
        transpose_a=problem.layout[0] == "t",
        transpose_b=problem.layout[1] == "t",
        out_dtype=problem.out_dtype,
    )
    found = resolution.resolve(spec, problem, device)
    assert (found.source, found.runs) == ("shipped", "xla")
    with gpu.target("h200"):
        jax.eval_shape(call, a, b)
        assert ran == []
        jax.eval_shape(functools.partial(call, backend="mosaic"), a, b)
    assert ran == [found.config]


def assert_compiles(spec: Any, problem: Any, config: Any, device: Any) -> None:
    assert spec.check(problem, config, device) is None
    arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    run = functools.partial(spec.run, problem, config, device)
    devices = spec.devices(problem)
    report = aot.compile_for(device, run, *arrays, devices=devices)
    assert report.kernels
    assert report.spills <= spec.spills_outside_loops(config)
    assert report.serialized == ""
    ll = devices > 1 and config.algorithm.startswith("ll_")  # where data go through registers, not TMA
    of_one_gpu = "UTMALDG" if spec.name in ("cross_entropy", "rms_norm", "rotary") else "HGMMA"
    assert re.search(of_one_gpu if devices == 1 else r"STG\.E\.(64|128)\.STRONG\.SYS" if ll else "UBLKCP", report.sass)
    assert report.smem_bytes <= device.smem_per_block


def assert_builds(spec: Any, problem: Any, config: Any, device: Any, spills: int = 0) -> None:
    """As `assert_compiles` in half the time: no kernel is disassembled."""
    assert spec.check(problem, config, device) is None
    arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    made = aot.build(device, functools.partial(spec.run, problem, config, device), *arrays, devices=spec.devices(problem))
    assert made.registers > 0
    assert made.spills <= spills
    assert made.serialized == ""


# Bytes that ptxas keeps in local memory, once in a kernel, before its main loop, or over a whole tile. As SASS has it, none is
# read in a loop over k or keys. But with jax 0.11 the last kernel reads some in loops over keys, 160 in all: it fails there.
OLD_PTXAS = jax.__version_info__ < (0, 12)
KNOWN_SPILLS = {
    ("h100-sxm", MatmulProblem(64, 4096, 14336, residual=True)): 0 if OLD_PTXAS else 16,
    ("h200", MatmulProblem(8, 10240, 8192)): 48 if OLD_PTXAS else 32,
    ("h200", GatedMatmulProblem(8192, 14336, 4096, stored=True)): 0 if OLD_PTXAS else 32,
    ("h200", RaggedContractionProblem(32768, 4096, 7168, 32, spread="random")): 24,
    ("h200", Problem(1, 8192, 8192, 16, 8, 256, causal=True, window_left=4095)): 128 if OLD_PTXAS else 64,  # Gemma 2
}


@needs_compiler
@pytest.mark.parametrize("problem", [problem for _, problem in KNOWN_SPILLS])
def test_a_spill_that_is_known_is_of_a_shipped_kernel(problem):
    assert any(problem == of for _, of, _, _ in KERNELS.values())


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(KERNELS, REPEATED))
def test_shipped_config_compiles_without_spills(name):
    op, problem, config, gpu_key = KERNELS[name]
    spec, device = spec_of(op), gpu.find(gpu_key)
    spills = KNOWN_SPILLS.get((gpu_key, problem), spec.spills_outside_loops(config))
    assert_builds(spec, problem, config, device, spills)


@needs_compiler
@pytest.mark.parametrize("op", sorted(OF_EACH_OP))
def test_a_shipped_kernel_of_each_op_uses_the_tensor_core_or_tma_and_the_shared_memory_there_is(op):
    _, problem, config, gpu_key = KERNELS[OF_EACH_OP[op]]
    assert_compiles(spec_of(op), problem, config, gpu.find(gpu_key))


DEFAULTS = ["square-4096", "llama3-8b-qkv-128", "llama3-8b-down-256", "llama3-70b-gate_up-4096"]


@needs_compiler
@pytest.mark.parametrize("gpu_key", thorough.cases(["h200", "h20"], ["h20"]))
@pytest.mark.parametrize("shape", DEFAULTS)
def test_default_config_compiles_without_spills(shape, gpu_key):
    spec, device = spec_of("matmul"), gpu.find(gpu_key)
    problem = spec.shapes[shape]
    assert_builds(spec, problem, spec.default(problem, device), device)


@needs_compiler
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("out_dtype", thorough.cases(["bfloat16", "float32"], ["bfloat16"]))
def test_default_config_of_ragged_sizes_compiles_without_spills(layout, out_dtype):
    spec, h200 = spec_of("matmul"), gpu.find("h200")
    problem = MatmulProblem(520, 1000, 1048, "bfloat16", out_dtype, layout)
    problem = replace(problem, m=521) if layout[0] == "n" else problem
    assert_builds(spec, problem, spec.default(problem, h200), h200)


@needs_compiler
@pytest.mark.parametrize("seed", thorough.seeds(4, 24))
def test_what_check_lets_pass_compiles_without_spills(seed):
    rng = random.Random(seed)
    spec, h200 = spec_of("matmul"), gpu.find("h200")
    unit = rng.choice([8, 64])
    m, n, k = (unit * rng.randint(1, 2048 // unit) for _ in "mnk")
    dtype = rng.choice(["bfloat16", "float16"])
    layout, batch = rng.choice(["nn", "nt", "tn", "tt"]), rng.choice([1, 1, 3])
    problem = MatmulProblem(m, n, k, dtype, rng.choice([dtype, "float32"]), layout, batch)
    space = spec.space(problem, h200)
    drawn = (spec.Config(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    config = next(c for c in drawn if spec.check(problem, c, h200) is None)
    assert_builds(spec, problem, config, h200)
