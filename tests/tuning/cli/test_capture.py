"""`mgpu-tune capture` of a user's program, and `mgpu-tune run` of what it wrote and of whole models. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.models import MODELS
from mgpu_ops.registry import database
from mgpu_ops.tuning import problems
from mgpu_ops.tuning.cli.session import Session

ROOT = Path(__file__).parents[3]
Command = Callable[..., Any]

PROGRAM = """
import jax
import jax.numpy as jnp
import mgpu_ops

BF16 = jnp.bfloat16

def layer(x, w):
    return mgpu_ops.matmul(x, w), None

def loss(ws, x):
    return jnp.sum(jnp.sin(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32)))

def step():
    return jax.jit(jax.grad(loss))(jnp.ones((12, 512, 512), BF16), jnp.ones((256, 512), BF16))

def returned():
    return jax.grad(loss), jax.ShapeDtypeStruct((12, 512, 512), BF16), jnp.ones((256, 512), BF16)

def large():  # 2 TB of arrays
    return mgpu_ops.matmul(jnp.ones((2**20, 2**20), BF16), jnp.ones((2**20, 8192), BF16))

def sharded():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    product = lambda a, b: mgpu_ops.matmul(a, b)
    run = jax.shard_map(product, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    return run, jax.ShapeDtypeStruct((1024, 512), BF16), jax.ShapeDtypeStruct((512, 256), BF16)

def looks():
    if float(jnp.ones(3).sum()) > 2:
        return 1

def wrong():
    return mgpu_ops.matmul(jnp.ones((3, 4)), jnp.ones((5, 6)))

def through_xla():
    return mgpu_ops.matmul(jnp.ones((64, 64)), jnp.ones((64, 64)), out_dtype="float16")

def unrelated():
    return jnp.ones(3)

class Model:
    def call(x):
        return mgpu_ops.matmul(x, x)

print("imported")
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's program, in which the command runs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import jax\n\nraise RuntimeError('no licence')\n")
    (tmp_path / "lacking.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("program", "broken", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# --- capture

LAYERS = {
    MatmulProblem(256, 512, 512): 12,
    MatmulProblem(256, 512, 512, layout="nt"): 12,
    MatmulProblem(512, 512, 256, layout="tn"): 12,
}


@pytest.mark.parametrize("function", ["step", "returned"])
def test_capture_lists_what_a_step_runs_and_writes_it(function: str, mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", f"program:{function}", "--output", "problems.json")
    assert (done.code, done.err) == (0, "")
    assert f"program:{function} on NVIDIA H200: 3 problems" in done.out
    assert "    12 x matmul 512x512x256 bfloat16 tn" in done.out
    assert "`mgpu-tune run --from problems.json`" in done.out
    assert {work.problem: work.count for work in problems.read(folder / "problems.json")} == LAYERS


def test_capture_takes_arrays_as_jax_prints_them(mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", "program:Model.call", "--args", "bf16[ 64, 64 ]", "--gpu", "h20")
    assert (done.code, done.err) == (0, "")
    assert "program:Model.call on NVIDIA H20: 1 problem," in done.out
    done = mgpu_tune("capture", "mgpu_ops:grouped_matmul", "--args", "float16[64,32]", "f16[4,32,64]", "i32[4]")
    assert "     1 x grouped_matmul 64x64x32 g=4 float16 nn random" in done.out


def test_capture_for_machines_is_one_line_whatever_the_program_prints(mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", "program:step", "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert "imported" in done.err
    assert [problem["count"] for problem in told["problems"]] == [12, 12, 12]
    assert (told["schema"], told["gpu"], told["function"], told["skipped"]) == (1, "h200", "program:step", [])


def test_capture_of_arrays_that_no_memory_holds(mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", "program:large")
    assert (done.code, done.err) == (0, "")
    assert "1048576x8192x1048576" in done.out


def test_capture_of_a_mesh_with_more_devices_than_there_are(folder: Path) -> None:
    """In a process of its own: this one's devices are set."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "mgpu_ops.tuning.cli", "capture", "program:sharded"]
    run = lambda *words: subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=False)  # noqa: E731
    done = run("--devices", "8")
    assert done.returncode == 0, done.stderr
    assert "     1 x matmul 128x256x512 bfloat16 nn" in done.stdout
    alone = run()
    assert alone.returncode == 2
    assert alone.stderr.startswith("mgpu-tune: program:sharded could not be traced: ValueError: Number of devices 1 must be")
    assert len(alone.stderr.splitlines()) == 1


def test_capture_says_what_is_not_to_tune_and_where_nothing_is(mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", "program:through_xla")
    assert (done.code, done.err) == (1, "")
    assert "1 x matmul 64x64x64 float32->float16 nn algorithm=tf32: nothing to tune, it runs through XLA: out_dtype" in done.out
    done = mgpu_tune("capture", "program:unrelated")
    assert done.code == 1
    assert "no call of an op: is the function built on mgpu_ops" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["program"], "'program' names no function: write MODULE:FUNCTION"),
        (["nowhere:step"], "no module 'nowhere' in "),
        (["./some/train.py:step"], "name it as Python imports it, such as some.train:step"),
        (["program:number"], "'program' has no function 'number': it has layer, loss, step, returned"),
        (["program:Model.nothing"], "'program' has no function 'Model.nothing'"),
        (["broken:step"], "broken:step could not be traced: RuntimeError: no licence (broken.py:3)"),
        (["lacking:step"], "lacking:step could not be traced: ModuleNotFoundError: No module named 'a_package"),
        (["program:wrong"], "program:wrong could not be traced: ValueError: a(3, 4) and b(5, 6) differ in k"),
        (["program:looks"], "capture one step, not the loop that reads its results"),
        (["program:layer"], "program:layer(x, w) does not take 0 arrays: describe each with --args 'bf16[8,4096]' ..., or"),
        (["program:step", "--args", "bf16[2"], "--args 'bf16[2' is no array: write it as JAX prints it"),
        (["program:step", "--args", "what[2]"], "--args 'what[2]' is no array"),
        (["program:step", "--args", "bf16[2]"], "program:step() does not take 1 array: describe"),
        (["program:step", "--gpu", "h300"], "mgpu-tune: gpu='h300' is not a GPU in the table: name one of h100-sxm"),
        (["program:step", "--output", "."], "cannot be written"),
    ],
)
def test_capture_tells_a_users_mistake_on_one_line(words: list[str], message: str, mgpu_tune: Command, folder: Path) -> None:
    done = mgpu_tune("capture", *words)
    assert done.code == 2
    assert message in done.err
    assert done.err.startswith("mgpu-tune: ")
    assert len(done.err.splitlines()) == 1


def test_a_mistake_in_the_program_is_told_with_its_line(mgpu_tune: Command, folder: Path) -> None:
    line = 1 + PROGRAM.splitlines().index("    return mgpu_ops.matmul(jnp.ones((3, 4)), jnp.ones((5, 6)))")
    assert f"(program.py:{line})" in mgpu_tune("capture", "program:wrong").err


# --- run


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(op, name) of what `mgpu-tune run` tunes, in order; nothing is tuned."""
    told: list[tuple[str, str]] = []

    def tune(self: Session, job: problems.TuningJob, device: Any, bar: Any) -> int:
        told.append((job.op, job.name))
        return 0

    monkeypatch.setattr(Session, "tune", tune)
    return told


def test_run_from_a_program_tunes_all_ops_the_longest_first(
    mgpu_tune: Command, folder: Path, tuned: list[tuple[str, str]]
) -> None:
    items = [
        problems.ProblemEntry("matmul", {"m": 512, "n": 512, "k": 512}, 1),
        problems.ProblemEntry("grouped_matmul", {"m": 4096, "n": 4096, "k": 4096, "groups": 8}, 3),
        problems.ProblemEntry("matmul", {"m": 8192, "n": 8192, "k": 8192}, 100),
        problems.ProblemEntry("matmul", {"m": 512, "n": 510, "k": 512}, 100),
    ]
    problems.write(folder / "problems.json", problems.File(1, "h200", "a:b", tuple(items)))
    done = mgpu_tune("run", "--from", "problems.json", "--gpu", "h200")
    assert (done.code, done.err) == (0, "")
    assert tuned == [
        ("matmul", "8192x8192x8192 bfloat16 nn"),
        ("grouped_matmul", "4096x4096x4096 g=8 bfloat16 nn random"),
        ("matmul", "512x512x512 bfloat16 nn"),
    ]
    assert "left out, it runs through XLA: matmul 512x510x512 bfloat16 nn: n=510 needs 16-byte rows" in done.out
    tuned.clear()
    assert mgpu_tune("run", "grouped_matmul", "--from", "problems.json", "--gpu", "h200").code == 0
    assert [op for op, _ in tuned] == ["grouped_matmul"]


def test_run_from_a_program_stores_an_entry_for_each_problem(mgpu_tune: Command, folder: Path) -> None:
    assert mgpu_tune("capture", "program:step", "--output", "problems.json").code == 0
    done = mgpu_tune("run", "--from", "problems.json", "--gpu", "h200", "--trials", 1)
    assert (done.code, done.err) == (0, "")
    entries = database.read(database.user_path("h200", "matmul"), gpu_key="h200", op="matmul").entries
    assert {MatmulProblem(**entry.problem) for entry in entries} == set(LAYERS)


def test_run_of_a_model_tunes_every_op_that_it_concerns(mgpu_tune: Command, tuned: list[tuple[str, str]]) -> None:
    assert mgpu_tune("run", "--suite", "mixtral-8x7b", "--tokens", "1,16,4096", "--gpu", "h200").code == 0
    assert {op for op, _ in tuned} == {"matmul", "grouped_matmul", "flash_attention"}
    assert tuned[0] == ("grouped_matmul", "mixtral-8x7b-experts-gate_up-4096")
    assert len(tuned) == 3 * 5 + 1  # qkv, out, logits, two of the experts; attention for 4096
    tuned.clear()
    assert mgpu_tune("run", "--suite", "mixtral-8x7b", "--tokens", "16", "--grad", "--gpu", "h200").code == 0
    assert {op for op, _ in tuned} == {"matmul", "grouped_matmul", "ragged_contraction"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("op", ["matmul", "flash_attention", "flash_attention_backward"])
def test_every_model_is_a_suite_of_an_op(model: str, op: str, mgpu_tune: Command, tuned: list[tuple[str, str]]) -> None:
    assert mgpu_tune("run", op, "--suite", model, "--gpu", "h200").code == 0
    assert {which for which, _ in tuned} == {op}


def test_a_suite_that_an_op_names_itself_stays_what_it_was(mgpu_tune: Command, tuned: list[tuple[str, str]]) -> None:
    for op in ("matmul", "grouped_matmul", "ragged_contraction"):
        spec = spec_of(op)
        for suite in spec.suites:
            tuned.clear()
            assert mgpu_tune("run", op, "--suite", suite, "--gpu", "h200").code == 0
            assert {spec.shapes[name] for _, name in tuned} == {spec.shapes[name] for name in spec.suites[suite]}


def test_a_suite_without_an_op_is_of_every_op_that_has_it(mgpu_tune: Command, tuned: list[tuple[str, str]]) -> None:
    assert mgpu_tune("run", "--suite", "moe", "--gpu", "h200").code == 0
    assert {op for op, _ in tuned} == {"grouped_matmul", "gated_grouped_matmul", "ragged_contraction"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name an op (matmul, "),
        (["--suite", "nothing"], "suite 'nothing' is not one of llama3-8b"),
        (["matmul", "--suite", "nothing"], "suite 'nothing' is not one of llm"),
        (["--shape", "square-2048"], "name an op (matmul, "),
        (["convolution", "--suite", "llama3-8b"], "op 'convolution' is not one of"),
        (["matmul", "--suite", "llm", "--tokens", "1"], "--tokens is for --suite with a model"),
        (["matmul", "--suite", "llama3-8b", "--tokens", "1,x"], "'x' must be a whole number of at least 1"),
        (["matmul", "--suite", "llm", "--grad"], "--grad is for --suite with a model"),
        (["flash_attention", "--suite", "llama3-8b", "--tokens", "1"], "has no problem of flash_attention with 1 tokens"),
        (["--from", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--from", "nowhere.json", "--suite", "llm"], "leave out --suite"),
        (["--suite", "llama3-8b", "--database", "x.json"], "--database x.json is a file of one op"),
    ],
)
def test_run_tells_a_users_mistake(words: list[str], message: str, mgpu_tune: Command, tuned: list[tuple[str, str]]) -> None:
    done = mgpu_tune("run", *words, "--gpu", "h200")
    assert done.code == 2
    assert message in done.err
    assert tuned == []


def test_run_of_a_program_that_the_gpu_cannot_run(mgpu_tune: Command, folder: Path, tuned: list[tuple[str, str]]) -> None:
    items = tuple(problems.ProblemEntry("matmul", {"m": m, "n": 510, "k": 512}, 1) for m in (8, 16))
    problems.write(folder / "problems.json", problems.File(1, "h200", "a:b", items))
    done = mgpu_tune("run", "--from", "problems.json", "--gpu", "h200")
    assert done.code == 2
    assert "no kernel runs any of these problems on NVIDIA H200: nothing to tune" in done.err
