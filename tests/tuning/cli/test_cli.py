"""The command `mgpu-tune`: what it prints, what it stores and its exit codes. Nothing here needs a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mgpu_ops import SPECS, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem, spec_of
from mgpu_ops.collectives.problem import REDUCTIONS, TRANSPORTS
from mgpu_ops.core import gpu
from mgpu_ops.grouped.grouped_matmul.problem import ACTIVATIONS
from mgpu_ops.grouped.sizes import SPREADS
from mgpu_ops.registry import database
from mgpu_ops.registry.dispatch import BACKENDS
from mgpu_ops.tuning import cli, compile_pool, device, devices, labels, neighbours, suites, terminal, worker
from mgpu_ops.tuning.bench import layers, results, runner
from mgpu_ops.tuning.bench.implementations import COMPETITORS
from mgpu_ops.tuning.cli import arguments, session, shared
from mgpu_ops.tuning.outcome import Outcome

ROOT = Path(__file__).parents[3]
H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
SIDES = ("--m", 512, "--n", 512, "--k", 512)
TRIALS = 10
RUN = ("run", "matmul", *SIDES, "--gpu", "h200", "--trials", TRIALS)
GROUPED = ("run", "grouped_matmul", *SIDES, "--groups", 8, "--gpu", "h200", "--trials", TRIALS)
HEADS = ("--batch", 2, "--q-tokens", 512, "--kv-tokens", 512, "--q-heads", 8, "--kv-heads", 2, "--head-dim", 64)
ATTENTION = ("flash_attention", "flash_attention_backward")
COMMANDS = tuple(cli.COMMANDS)
Command = Callable[..., Any]


def user_file() -> Path:
    return database.user_path("h200", "matmul")


def only_entry(path: Path | None = None) -> database.Entry:
    (entry,) = database.read(path or user_file(), gpu_key="h200", op="matmul").entries
    return entry


def store(path: Path, size: int = 512, *, gpu_key: str = "h200", xla_us: float = 25.0, **changes: Any) -> Path:
    problem = MatmulProblem(size, size, size)
    evidence = database.Evidence(
        kind="measured", gpu=gpu.find(gpu_key).name, driver="1.2", jax="0.11.2", jaxlib="0.11.2", cuda="13000",
        kernel_version=MATMUL.version, median_us=12.5, spread_us=0.5, default_us=15.0, baseline="xla", baseline_us=xla_us,
        error=0.001, trials=48, seed=0, date="2025-11-20",
    )  # fmt: skip
    config = dataclasses.replace(MATMUL.default(problem, gpu.find(gpu_key)), **changes)
    database.update(path, [database.to_entry(problem, config, evidence)], gpu_key=gpu_key, op="matmul")
    return path


def holds(text: str, config: dict[str, Any]) -> bool:
    """Whether a table tells every field of a config, be it in its row or, shared by all rows, in the caption."""
    words = text.split()
    return all(f"{field}={value}" in words for field, value in config.items())


# --- help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_examples(command: str, mgpu_tune: Command) -> None:
    done = mgpu_tune(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert "examples:\n  " in done.out
    assert f"\n  mgpu-tune {command}" in done.out
    assert "--json" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_described_alike_in_its_own_help_and_in_the_list(command: str, mgpu_tune: Command) -> None:
    what = cli.COMMANDS[command]
    described = " ".join(mgpu_tune(command, "--help").out.split())
    assert f"{what[0].upper()}{what[1:]}." in described
    assert what in " ".join(mgpu_tune("--help").out.split())


def test_the_help_lists_the_commands_and_the_exit_codes(mgpu_tune: Command) -> None:
    done = mgpu_tune("--help")
    assert done.code == 0
    assert all(re.search(rf"\n    {command}\s", done.out) for command in COMMANDS)
    assert "130 Ctrl-C" in done.out


HELP = """
import sys
from mgpu_ops.tuning import cli
try:
    cli.main()
except SystemExit as e:
    assert not e.code
found = {"jax", "numpy", "msgspec", "optuna", "matplotlib", "pandas", "rich"} & sys.modules.keys()
assert not found, found
"""


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_answers_at_once(command: str, tmp_path: Path) -> None:
    """Without JAX and the tuner's libraries: in half a second of work, whatever else the machine does."""
    program = tmp_path / "mgpu-tune"
    program.write_text(HELP)
    words = [sys.executable, str(program), *[command] * bool(command), "--help"]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL, timeout=600)


def test_what_the_parsers_know_of_the_ops_without_importing_them_is_true() -> None:
    """The tables of cli/arguments.py: a new op, suite, field of a problem or competitor belongs there too."""
    assert {name: tuple(suites.names(spec)) for name, spec in SPECS.items()} == arguments.SUITES
    assert {layers.SPEC.name: tuple(layers.SPEC.suites)} == arguments.LAYERS
    assert {op: tuple(competitors) for op, competitors in COMPETITORS.items()} == arguments.COMPETITORS
    assert arguments.BACKENDS == BACKENDS
    fields = {field.name: field for spec in SPECS.values() for field in dataclasses.fields(spec.Problem)}
    given = arguments.FIELDS
    assert set(given) == set(fields)
    assert given["activation"]["choices"] == ACTIVATIONS
    assert given["spread"]["choices"] == SPREADS
    assert given["reduction"]["choices"] == REDUCTIONS
    assert given["transport"]["choices"] == TRANSPORTS
    for name in set(fields) - {"bias"}:
        assert ("action" in given[name]) == isinstance(fields[name].default, bool), name
    for shape, op in re.findall(r"([\w-]+) of (\w+)", arguments._SHAPES):
        assert shape in SPECS[op].shapes


def test_the_package_is_whole_under_help_too() -> None:
    code = (
        "import sys; sys.argv = ['mgpu-tune', '--help']; import mgpu_ops; mgpu_ops.matmul; "
        "assert set(mgpu_ops.__all__) <= set(dir(mgpu_ops))"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


# --- for machines: --json


JSON: dict[str, tuple[tuple[Any, ...], str]] = {  # words -> what the document has
    "run": ((*RUN, "--json"), "problems"),
    "show": (("show", "matmul", "--gpu", "h200", "--json"), "files"),
    "which": (("which", "matmul", *SIDES, "--gpu", "h200", "--json"), "config"),
    "which through XLA": (("which", "matmul", "--m", 8, "--n", 8, "--k", 100, "--gpu", "h200", "--json"), "reason"),
    "validate": (("validate", "--json"), "files"),
    "check-in": (("check-in", Path(database.shipped_path("h200", "matmul")).parents[1], "--json"), "files"),
    "merge": (("merge", database.shipped_path("h200", "matmul"), "--into", "new.json", "--json"), "conflicts"),
    "diff": (("diff", *[database.shipped_path("h200", "matmul")] * 2, "--json"), "differences"),
    "export": (("export", "matmul", "--gpu", "h200", "--output", "out", "--json"), "files"),
    "retune": (("retune", "matmul", "--stale", "--gpu", "h20", "--json"), "tuned"),
    "capture": (("capture", "program:step", "--json"), "problems"),
    "run --queue": (("run", "matmul", *SIDES, "--storage", "x.journal", "--queue", "--json"), "queued"),
    "worker": (("worker", "--storage", "x.journal", "--gpu", "h200", "--json"), "ended"),
    "merge --storage": (("merge", "--storage", "empty.journal", "--json"), "files"),
    "plot": (("plot", "ragged_contraction", "--gpu", "h200", "--output", "p", "--json"), "pictures"),
    "report": (("report", "matmul", "--gpu", "h200", "--no-pictures", "--output", "r.html", "--json"), "file"),
}


PROGRAM = """
import jax.numpy as jnp
import mgpu_ops
def step():
    a = jnp.ones((512, 512), jnp.bfloat16)
    return mgpu_ops.matmul(a, a)
"""


@pytest.mark.parametrize("name", JSON)
def test_json_is_one_line_on_stdout_and_the_rest_goes_to_stderr(
    name: str, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    Path("empty.journal").touch()
    words, key = JSON[name]
    done = mgpu_tune(*words)
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    assert key in json.loads(done.out)
    assert done.err


def test_json_of_a_run_tells_every_trial_and_the_stored_entry(mgpu_tune: Command) -> None:
    (told,) = json.loads(mgpu_tune(*RUN, "--json").out)["problems"]
    assert (told["op"], told["gpu"], told["kind"], told["database"]) == ("matmul", "h200", "modelled", str(user_file()))
    assert len(told["trials"]) == TRIALS
    assert told["entry"]["config"] == only_entry().config
    times = [trial["us"] for trial in told["trials"] if trial["kind"] == "ok"]
    assert told["entry"]["evidence"]["median_us"] == pytest.approx(min(times), abs=1e-3)


def test_json_of_validate_has_the_faults_and_the_exit_code_stays(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(tmp_path / "bad.json", tile_m=100)
    done = mgpu_tune("validate", path, "--json")
    assert done.code == 1
    (file,) = json.loads(done.out)["files"]
    assert file["path"] == str(path)
    assert "must be a multiple of 64" in file["faults"][0]


def test_a_wrong_request_prints_no_json(mgpu_tune: Command) -> None:
    done = mgpu_tune("which", "matmul", *SIDES, "--json")
    assert (done.code, done.out) == (2, "")
    assert "no NVIDIA GPU here" in done.err


# --- what was asked wrongly: exit code 2, and the rule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("tune",), "invalid choice: 'tune'"),
        (("run",), "name an op (matmul, "),
        (("run", "softmax", *SIDES, "--gpu", "h200"), "op 'softmax' is not one of matmul"),
        (("run", "matmul", *SIDES, "--gpu", "v100"), "gpu='v100' is not a GPU in the table: name one of h100-sxm"),
        (("run", "matmul", *SIDES), "no Hopper GPU here to measure on: name the GPU to model with --gpu (h100-sxm"),
        (("run", "matmul", "--shape", "gpt9", "--gpu", "h200"), "shape 'gpt9' is not one of "),
        (("run", "matmul", "--suite", "gpt9", "--gpu", "h200"), "suite 'gpt9' is not one of "),
        (("run", "matmul", "--gpu", "h200"), "name the problem in one way: --m, --n and --k, or --shape"),
        (("run", "matmul", *SIDES, "--shape", "square-4096", "--gpu", "h200"), "name the problem in one way"),
        (("run", "matmul", "--suite", "llm", "--shape", "square-4096", "--gpu", "h200"), "name the problem in one way"),
        (
            ("run", "--suite", "llama3-8b", "--devices", "4"),
            "--suite llama3-8b names the problems of a model: leave out --devices",
        ),
        (
            ("run", "--suite", "llama3-8b", "--dtype", "f16"),
            "--suite llama3-8b names the problems of a model: leave out --dtype",
        ),
        (
            ("run", "--from", "p.json", "--grad", "--tokens", "3"),
            "--from p.json names the problems: leave out --grad and --tokens",
        ),
        (("run", "matmul", "--from", "p.json", "--m", "3"), "--from p.json names the problems: leave out --m"),
        (("run", "matmul", "--m", "512", "--k", "512", "--gpu", "h200"), "--n missing: a matmul problem has --m, --n and --k"),
        (("run", "matmul", "--m", "512", "--gpu", "h200"), "--n and --k missing"),
        (("run", "matmul", "--dtype", "bf16", "--gpu", "h200"), "--m, --n and --k missing"),
        ((*RUN, "--groups", "8"), "matmul problems have no groups: the fields are "),
        ((*RUN, "--bias", "bf16"), "--bias of matmul takes no dtype: leave bfloat16 out"),
        (
            ("run", "grouped_matmul", *SIDES, "--gpu", "h200"),
            "--groups missing: a grouped_matmul problem has --m, --n, --k and",
        ),
        ((*GROUPED, "--batch", "2"), "grouped_matmul problems have no batch: the fields are "),
        ((*GROUPED, "--bias", "bf16"), "--bias of grouped_matmul takes no dtype: leave bfloat16 out"),
        ((*GROUPED, "--bias", "int4"), "'int4' is not one of bf16, f16"),
        ((*GROUPED, "--causal"), "grouped_matmul problems have no causal: the fields are "),
        (
            ("run", "flash_attention", *HEADS, "--window-left", "-2", "--gpu", "h200"),
            "'-2' must be a whole number of at least 0",
        ),
        (("run", "flash_attention", *HEADS, "--align", "left", "--gpu", "h200"), "--align: invalid choice: 'left'"),
        (
            ("run", "flash_attention", *HEADS[2:], "--gpu", "h200"),
            "--batch missing: a flash_attention problem has --batch, --q-tokens",
        ),
        (("run", "flash_attention", *HEADS, "--kv-heads", 3, "--gpu", "h200"), "q_heads=8 is no multiple of kv_heads=3"),
        (
            ("run", "flash_attention", *HEADS, "--deterministic", "--gpu", "h200"),
            "flash_attention problems have no deterministic",
        ),
        ((*GROUPED, "--spread", "odd"), "--spread: invalid choice: 'odd'"),
        ((*GROUPED, "--activation", "tanh"), "--activation: invalid choice: 'tanh'"),
        ((*GROUPED, "--groups", "0"), "'0' must be a whole number of at least 1"),
        ((*GROUPED, "--layout", "tn"), "layout 'tn' is neither 'nn' nor 'nt'"),
        (("run", "grouped_matmul", "--suite", "llm", "--gpu", "h200"), "suite 'llm' is not one of moe, training"),
        (
            ("run", "ragged_contraction", *SIDES, "--groups", 8, "--bias", "--gpu", "h200"),
            "ragged_contraction problems have no",
        ),
        ((*RUN, "--m", "0"), "'0' must be a whole number of at least 1"),
        ((*RUN, "--m", "-4"), "'-4' must be a whole number of at least 1"),
        ((*RUN, "--m", "4.5"), "'4.5' must be a whole number of at least 1"),
        ((*RUN, "--batch", "0"), "'0' must be a whole number of at least 1"),
        ((*RUN, "--trials", "0"), "'0' must be a whole number of at least 1"),
        ((*RUN, "--dtype", "int4"), "'int4' is not one of bf16, f16"),
        ((*RUN, "--out-dtype", "double"), "'double' is not one of bf16, f16"),
        ((*RUN, "--layout", "nx"), "invalid choice: 'nx'"),
        ((*RUN, "--seed", "one"), "--seed: "),
        ((*RUN, "--seed", "-1"), "--seed: "),
        ((*RUN, "--k", "100"), "k=100 needs 16-byte rows of a (TMA): pad to 104"),
        ((*RUN, "--out-dtype", "f16"), "out_dtype float16 is neither the inputs' bfloat16 nor float32: cast"),
        (("run", "matmul", *SIDES, "--gpu", "b200"), "NVIDIA B200 is not a Hopper GPU"),
        (("which", "matmul", *SIDES), "no NVIDIA GPU here: name one with --gpu"),
        (("which", "matmul", *SIDES, "--gpu", "v100"), "gpu='v100' is not a GPU in the table"),
        (("which", "softmax", *SIDES, "--gpu", "h200"), "op 'softmax' is not one of matmul"),
        (("which", "matmul", "--suite", "llm", "--gpu", "h200"), "--suite"),
        (("show", "softmax"), "op 'softmax' is not one of matmul"),
        (("show", "--gpu", "v100"), "gpu='v100' is not a GPU in the table"),
        (("bench", "matmul", *SIDES), "bench times kernels: it needs a Hopper GPU here"),
        (("bench", "softmax", *SIDES), "all_gather, moe"),
        (("bench", "moe"), "name the problem in one way: --shape NAME, or --suite NAME"),
        (("bench", "moe", "--groups", "8"), "name the problem in one way: --shape NAME, or --suite NAME"),
        (("bench", "matmul", *SIDES, "--seconds", "0"), "'0' must be a finite time above 0"),
        (("bench", "matmul", *SIDES, "--peer-seconds", "-1"), "--peer-seconds: "),
        (("bench", "grouped_matmul", *SIDES, "--groups", "8"), "bench times kernels: it needs a Hopper GPU here"),
    ],
    ids=lambda value: "_".join(map(str, value)) or "nothing" if isinstance(value, tuple) else "",
)
def test_a_wrong_request_is_refused_with_the_rule(words: Sequence[Any], message: str, mgpu_tune: Command) -> None:
    done = mgpu_tune(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not user_file().exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--suite", "llama3-8b", "--tokens", "-5,3"), "--tokens: '-5' must be a whole number of at least 1"),
        (("run", "--tok", "-5,3"), "--tokens: '-5' must be a whole number of at least 1"),
        (("run", "all_reduce", "--bytes", "-1KiB:1MiB"), "--bytes: '-1KiB' must be a size such as 4096, 64KiB or 1MiB"),
        (("retune", "--budget", "-2m"), "--budget: '-2m' must be a finite time above 0 such as 60s, 2m or 1h"),
        (("bench", "matmul", "--sustained", "-1s"), "--sustained: '-1s' must be a finite time above 0 such as 60s, 2m or 1h"),
        (("run", "matmul", "--target", "-inf"), "--target: '-inf' must be a number above 0, such as 0.98"),
        (("capture", "train:step", "--devices", "-8x"), "--devices: '-8x' must be a whole number of at least 1"),
        (("which", "matmul", "--layout", "-nt"), "--layout: invalid choice: '-nt'"),
        (
            ("show", "--gpu", "-h200"),
            "--gpu: '-h200' begins with a minus, as an option does: write --gpu=-h200 if it is the value",
        ),
        (
            ("plot", "--from", "-x.csv"),
            "--from: '-x.csv' begins with a minus, as an option does: write --from=-x.csv if it is the value",
        ),
        (
            ("bench", "matmul", "--output", "-v"),
            "--output: '-v' begins with a minus, as an option does: write --output=-v if it is the value",
        ),
        (("run", "--tokens", "--grad"), "--tokens: expected one argument"),
        (("run", "--tokens", "-h"), "--tokens: expected one argument"),
    ],
)
def test_a_value_that_begins_with_a_minus_is_told_with_the_rule(words: Sequence[str], told: str, mgpu_tune: Command) -> None:
    done = mgpu_tune(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"mgpu-tune {words[0]}: argument {told}")
    assert done.err.endswith(f"\nsee `mgpu-tune {words[0]} --help`\n")
    assert done.err.count("\n") == 2


def test_values_with_a_minus_that_an_option_may_have_are_taken() -> None:
    parser = shared.Parser()
    parser.add_argument("--window-left", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("rest", nargs="*")

    def parsed(*words: str) -> tuple[Any, ...]:
        found = parser.parse_args(words)
        return found.window_left, found.output, found.again, found.rest

    assert parsed("--window-left", "-1", "--again", "-3") == (-1, None, True, ["-3"])
    assert parsed("--window-left=-1", "--output=-v") == (-1, Path("-v"), False, [])
    assert parsed("--output", "-3", "-1.5") == (None, Path("-3"), False, ["-1.5"])
    assert parsed("--output", "-a b") == (None, Path("-a b"), False, [])
    assert parsed("--again", "--", "--output", "-v") == (None, None, True, ["--output", "-v"])


@pytest.mark.parametrize("budget", ["nan", "inf", "-inf", "-1", "0", "0s", "abc", "", "1e3", "10 days", "9" * 400])
def test_a_budget_must_be_a_finite_time_above_zero(budget: str, mgpu_tune: Command) -> None:
    done = mgpu_tune(*RUN, f"--budget={budget}")
    assert done.code == 2
    assert f"{budget!r} must be a finite time above 0 such as 60s, 2m or 1h" in done.err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("60s", 60), ("2m", 120), ("1h", 3600), ("1.5m", 90), (".5", 0.5), (" 2 s ", 2)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert arguments.seconds(text) == seconds


# --- run


def test_run_stores_an_entry_that_is_called_modelled_everywhere(mgpu_tune: Command) -> None:
    done = mgpu_tune(*RUN)
    assert (done.code, done.err) == (0, "")
    assert "no NVIDIA H200 here: times are MODELLED, not measured; candidates are not compiled" in done.out
    entry = only_entry()
    assert entry.problem == dataclasses.asdict(MatmulProblem(512, 512, 512))
    assert (entry.evidence.kind, entry.evidence.gpu, entry.evidence.trials) == ("modelled", "NVIDIA H200", TRIALS)
    assert entry.evidence.driver is None
    assert holds(done.out, entry.config)
    assert f"best of {TRIALS} in " in done.out
    assert f"{entry.evidence.median_us:.1f} us modelled, default {entry.evidence.default_us:.1f} us" in done.out
    assert f"stored as modelled in {user_file()}" in done.out
    assert mgpu_tune("validate", user_file()).code == 0


def test_run_keeps_the_other_entries_and_a_measured_one_of_the_same_problem(mgpu_tune: Command) -> None:
    store(user_file())
    store(user_file(), 1024)
    assert mgpu_tune(*RUN).code == 0
    entries = database.read(user_file()).entries
    assert [(e.problem["m"], e.evidence.kind) for e in entries] == [
        (512, "measured"),
        (512, "modelled"),
        (1024, "measured"),
    ]


def test_run_takes_the_problem_as_it_is_described(mgpu_tune: Command) -> None:
    words = (*RUN, "--dtype", "fp16", "--out-dtype", "f32", "--layout", "nt", "--batch", 4)
    assert mgpu_tune(*words).code == 0
    assert only_entry().problem == dataclasses.asdict(MatmulProblem(512, 512, 512, "float16", "float32", "nt", 4))


def test_run_takes_a_grouped_problem_as_it_is_described(mgpu_tune: Command) -> None:
    words = ("--dtype", "fp16", "--layout", "nt", "--bias", "--activation", "gelu", "--spread", "skewed")
    done = mgpu_tune(*GROUPED, *words)
    assert (done.code, done.err) == (0, "")
    assert "grouped_matmul 512x512x512 g=8 float16 nt gelu skewed bias" in done.out
    path = database.user_path("h200", "grouped_matmul")
    (entry,) = database.read(path, gpu_key="h200", op="grouped_matmul").entries
    problem = GroupedMatmulProblem(512, 512, 512, 8, "float16", "float16", "nt", True, "gelu", "skewed")
    assert entry.problem == dataclasses.asdict(problem)
    assert mgpu_tune("validate", path).out == f"{path}: ok\n"
    which = mgpu_tune("which", "grouped_matmul", *SIDES, "--groups", 8, *words, "--gpu", "h200")
    assert "from      user: modelled" in which.out
    show = mgpu_tune("show", "grouped_matmul", "--gpu", "h200")
    assert "grouped_matmul on h200, user" in show.out
    assert "spread=skewed" in " ".join(show.out.split())


def test_run_tunes_a_ragged_contraction(mgpu_tune: Command) -> None:
    done = mgpu_tune("run", "ragged_contraction", *SIDES, "--groups", 8, "--gpu", "h200", "--trials", TRIALS)
    assert (done.code, done.err) == (0, "")
    (entry,) = database.read(database.user_path("h200", "ragged_contraction")).entries
    assert entry.problem == dataclasses.asdict(RaggedContractionProblem(512, 512, 512, 8))


@pytest.mark.parametrize("op", ATTENTION)
def test_run_takes_an_attention_problem_as_it_is_described(op: str, mgpu_tune: Command) -> None:
    """With flags for what is masked, and for a bias its dtype."""
    words = (*HEADS, "--causal", "--window-left", 0, "--bias", "f32", "--dtype", "fp16", "--lengths")
    done = mgpu_tune("run", op, *words, "--gpu", "h200", "--trials", 4)
    assert (done.code, done.err) == (0, "")
    assert f"{op} 512x512x8x2x64 float16 window_left=0 bias=float32 causal lengths batch=2" in done.out
    path = database.user_path("h200", op)
    (entry,) = database.read(path, gpu_key="h200", op=op).entries
    masks = {"causal": True, "window_left": 0, "lengths": True, "bias": "float32"}
    problem = spec_of(op).Problem(2, 512, 512, 8, 2, 64, "float16", **masks)
    assert entry.problem == dataclasses.asdict(problem)
    assert mgpu_tune("validate", path).out == f"{path}: ok\n"
    assert "from      user: modelled" in mgpu_tune("which", op, *words, "--gpu", "h200").out
    shown = mgpu_tune("show", op, "--gpu", "h200").out.replace("│", " ").split()
    assert {"window_left=0", "causal=True", "bias=float32"} <= set(shown)
    assert not [word for word in shown if word.startswith(("window_right", "segments"))]


@pytest.mark.parametrize("op", ATTENTION)
def test_a_bias_of_attention_has_the_inputs_dtype_unless_named(op: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("which", op, *HEADS, "--bias", "--dtype", "f16", "--gpu", "h200")
    assert (done.code, done.err) == (0, "")
    assert "bias='float16'" in done.out


@pytest.mark.parametrize("op", ATTENTION)
def test_run_of_a_suite_of_attention_tunes_each_problem_of_it(op: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("run", op, "--suite", "d256", "--trials", 1, "--gpu", "h200")
    assert (done.code, done.err) == (0, "")
    wanted = {spec_of(op).shapes[name] for name in spec_of(op).suites["d256"]}
    stored = {spec_of(op).Problem(**e.problem) for e in database.read(database.user_path("h200", op)).entries}
    assert stored == wanted


@pytest.mark.parametrize("op", ["grouped_matmul", "ragged_contraction"])
def test_run_of_a_suite_of_experts_tunes_each_problem_of_it(op: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("run", op, "--suite", "mixtral-8x7b", "--trials", 1, "--gpu", "h200")
    assert (done.code, done.err) == (0, "")
    wanted = {spec_of(op).shapes[name] for name in spec_of(op).suites["mixtral-8x7b"]}
    stored = {spec_of(op).Problem(**e.problem) for e in database.read(database.user_path("h200", op)).entries}
    assert stored == wanted


@pytest.mark.parametrize("op", list(SPECS))
def test_every_field_of_a_problem_has_an_argument_with_a_help(op: str, mgpu_tune: Command) -> None:
    out = mgpu_tune("run", "--help").out
    for field in dataclasses.fields(spec_of(op).Problem):
        assert f"\n  --{field.name.replace('_', '-')} " in out or f"\n  --{field.name.replace('_', '-')}\n" in out


def test_a_problem_that_cannot_be_tuned_is_refused_before_a_progress_bar(mgpu_tune: Command) -> None:
    done = mgpu_tune(*RUN, "--k", "100")
    assert "k=100 needs 16-byte rows" in done.err
    assert "0/10" not in done.out
    assert "━" not in done.out


def test_the_outputs_dtype_is_that_of_the_inputs_unless_named(mgpu_tune: Command) -> None:
    assert mgpu_tune(*RUN, "--dtype", "f16").code == 0
    assert only_entry().problem["out_dtype"] == "float16"


def test_run_of_a_suite_tunes_each_problem_once_and_stores_where_it_is_told(tmp_path: Path, mgpu_tune: Command) -> None:
    path = tmp_path / "deep" / "tuned.json"
    done = mgpu_tune("run", "matmul", "--suite", "square", "--trials", 2, "--gpu", "h100-sxm", "--database", path)
    assert done.code == 0
    entries = database.read(path, gpu_key="h100-sxm", op="matmul").entries
    assert [e.problem["m"] for e in entries] == [2048, 4096, 8192, 16384]
    assert not user_file().parent.parent.exists()


def test_the_same_seed_finds_the_same_config(tmp_path: Path, mgpu_tune: Command) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        assert mgpu_tune(*RUN, "--seed", 3, "--trials", 24, "--database", path).code == 0
    assert only_entry(paths[0]).config == only_entry(paths[1]).config


def test_failures_are_counted_by_kind_and_reason(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda number, us: Outcome("compile", detail="it spills") if number in (1, 4) else us)
    done = mgpu_tune(*RUN)
    assert done.code == 0
    assert "failed: 2 compile: it spills" in done.out


def test_where_no_candidate_works_nothing_is_stored_and_the_exit_code_is_1(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, lambda number, us: Outcome("crash", detail="always"))
    done = mgpu_tune(*RUN)
    assert done.code == 1
    assert "failed: 10 crash: always" in done.out
    assert "no candidate worked: nothing is stored for 512x512x512" in done.out
    assert not user_file().exists()


def judge_by(monkeypatch: pytest.MonkeyPatch, judgement: Callable[[int, Outcome], Outcome]) -> None:
    """Replaces the outcomes of the modelled device by a function of their number, from 0, and the true one."""
    following = device.Modelled.next
    numbers = itertools.count()

    def judged(self: Any) -> tuple[Any, Outcome]:
        config, outcome = following(self)
        return config, judgement(next(numbers), outcome)

    monkeypatch.setattr(device.Modelled, "next", judged)


def interrupt(number: int, at: int, outcome: Outcome) -> Outcome:
    if number == at:
        raise KeyboardInterrupt
    return outcome


def test_ctrl_c_stores_what_was_found_and_the_exit_code_is_130(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    store(user_file(), 1024)
    with monkeypatch.context() as patch:
        judge_by(patch, lambda number, outcome: interrupt(number, 5, outcome))
        done = mgpu_tune(*RUN)
    assert done.code == 130
    assert "best of 5 in" in done.out
    entries = database.read(user_file()).entries
    assert [(e.problem["m"], e.evidence.trials) for e in entries] == [(512, 5), (1024, 48)]
    assert mgpu_tune("validate", user_file()).code == 0
    assert mgpu_tune(*RUN).code == 0


def test_ctrl_c_in_a_suite_ends_the_suite(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda number, outcome: interrupt(number, 3, outcome))
    done = mgpu_tune("run", "matmul", "--suite", "square", "--trials", 2, "--gpu", "h200")
    assert done.code == 130
    assert [e.problem["m"] for e in database.read(user_file()).entries] == [8192, 16384]  # most time first


def test_ctrl_c_before_the_first_result_stores_nothing(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda number, outcome: interrupt(number, 0, outcome))
    done = mgpu_tune(*RUN)
    assert done.code == 130
    assert "no candidate was tried yet: nothing is stored for 512x512x512" in done.out
    assert not user_file().exists()


def test_ctrl_c_outside_of_the_search_is_130_too(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "read", interrupted)
    store(user_file())
    done = mgpu_tune("validate", user_file())
    assert (done.code, done.err) == (130, "mgpu-tune: stopped\n")


# --- which GPU


class Here:
    """A GPU worker that started, on an H200."""

    kind, gpu = "measured", H200

    def __init__(self, name: str | None = None) -> None:
        self.name, self.versions = name, {"driver": "570.86.15"}
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("name", [None, "h200", "NVIDIA H200"])
def test_the_gpu_here_is_measured(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", Here)
    assert isinstance(devices.device_for(name, say=print), Here)


def test_a_problem_of_several_gpus_gets_so_many_of_those_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(neighbours, "visible", lambda: ["0", "2", "3"])
    monkeypatch.setattr(device, "Measured", Here)
    assert devices.device_for(None, 2, say=print).name == "0,2"
    with pytest.raises(devices.NoDevice, match=r"takes 4 GPUs, and 3 are visible here: name one with --gpu to model it"):
        devices.device_for(None, 4, say=print)


def test_another_gpu_than_the_one_here_is_modelled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here = Here()
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", lambda name: here)
    found = devices.device_for("h20", say=print)
    assert (found.kind, found.gpu.key, here.closed) == ("modelled", "h20", True)
    assert "no NVIDIA H20 here: times are MODELLED" in capsys.readouterr().out


def no_hopper(name: str | None) -> Any:
    raise worker.WorkerError("the GPU worker did not start: NVIDIA A100 is not a Hopper GPU")


def test_a_gpu_that_is_no_hopper_does_not_keep_another_from_being_modelled(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", no_hopper)
    assert mgpu_tune(*RUN).code == 0
    assert only_entry().evidence.kind == "modelled"


def test_a_worker_that_does_not_start_is_told_and_the_exit_code_is_2(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", no_hopper)
    done = mgpu_tune("run", "matmul", *SIDES)
    assert done.code == 2
    assert "the GPU worker did not start: NVIDIA A100 is not a Hopper GPU" in done.err


# --- show, which, validate


def test_show_lists_the_users_and_the_shipped_entries(mgpu_tune: Command) -> None:
    store(user_file())
    done = mgpu_tune("show", "matmul", "--gpu", "h200")
    assert done.code == 0
    assert f"matmul on h200, user: {user_file()}" in done.out
    for word in ("m=512", "measured", "12.5", "2.000", "1.200", "2025-11-20"):
        assert word in done.out
    if database.shipped_path("h200", "matmul").exists():
        assert "matmul on h200, shipped: " in done.out


def test_show_says_where_entries_would_be_where_there_are_none(mgpu_tune: Command) -> None:
    done = mgpu_tune("show", "--gpu", "h20")
    assert done.code == 0
    assert "nothing is tuned for h20" in done.out
    assert str(database.user_path("h20", "matmul")) in done.out


def test_show_of_all_gpus_goes_on_after_a_broken_file(mgpu_tune: Command) -> None:
    broken = database.user_path("h100-sxm", "matmul")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"{")
    store(user_file())
    done = mgpu_tune("show")
    assert done.code == 1
    assert f"{broken}: is corrupt" in done.out
    assert "m=512" in done.out


def test_show_in_a_pipe_has_a_line_for_each_entry_with_named_fields_in_order(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1024, 64, 512):
        store(user_file(), size)
    monkeypatch.setenv("COLUMNS", "80")
    lines = mgpu_tune("show", "matmul", "--gpu", "h200").out.splitlines()
    start = lines.index(f"matmul on h200, user: {user_file()}")
    headings, *entries = lines[start + 1 : start + 5]
    assert headings.split() == ["problem", "us", "x", "baseline", "x", "default", "runs", "evidence", "date", "config"]
    assert [line.split()[0] for line in entries] == ["m=64", "m=512", "m=1024"]
    default = dataclasses.asdict(MATMUL.default(MatmulProblem(64, 64, 64), H200))
    told = " ".join(f"{field}={value}" for field, value in default.items())
    assert entries[0].split(maxsplit=4)[:4] == ["m=64", "n=64", "k=64", "dtype=bfloat16"]
    assert entries[0].endswith(f"  12.5  2.000 xla   1.200      kernel  measured: kernel  2025-11-20  {told}")
    assert "│" not in "".join(lines)


def test_show_lists_collectives_by_gpus_and_size_and_says_what_time_is_told(mgpu_tune: Command) -> None:
    done = mgpu_tune("show", "all_reduce", "--gpu", "h200")
    rows = [line.split() for line in done.out.splitlines() if line.startswith("  size=")]
    asked = [(int(row[1].partition("=")[2]), int(row[0].partition("=")[2])) for row in rows]
    assert asked == sorted(asked)
    assert all("measured: kernel or host" in " ".join(row) for row in rows)
    assert "an entry does not say which" in done.out
    assert "kernel or host" not in mgpu_tune("show", "matmul", "--gpu", "h200").out


def test_show_on_a_terminal_is_a_table_as_wide_as_that(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "console", functools.partial(terminal.console, force_terminal=True, width=80))
    for size in (512, 640):
        store(user_file(), size)
    shown = re.sub(r"\x1b\[[\d;]*m", "", mgpu_tune("show", "matmul", "--gpu", "h200").out)
    table = shown[shown.index("problem ") : shown.index("all: ")]
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"m=640 n=640 k=640 +12\.5 +2\.000 xla +1\.200 ", table)
    assert "dtype=bfloat16" not in table
    assert "all: dtype=bfloat16; measured: kernel; 2025-11-20; tile_m=" in shown


def test_show_counts_the_problems_and_the_docs_say_as_many(mgpu_tune: Command) -> None:
    """Those of the shipped databases, collectives too."""
    done = mgpu_tune("show", "--gpu", "h200", "--json")
    counts = json.loads(done.out)["problems"]
    entries = {op: database.read(database.shipped_path("h200", op)).entries for op in counts}
    assert counts == {op: len({database.key_of_fields(entry.problem) for entry in of_op}) for op, of_op in entries.items()}
    assert f"{sum(counts.values())} tuned problems: {counts['matmul']} of matmul, " in done.err
    (row,) = re.findall(r"\| tuned \| (.*?);", (ROOT / "docs/support.md").read_text())
    assert row.startswith(f"{sum(counts.values())} problems on the H200")
    assert {op: int(number) for number, op in re.findall(r"(\d+) of (\w+)", row)} == counts


def test_which_tells_the_winner_why_and_on_what_evidence(mgpu_tune: Command) -> None:
    store(user_file(), raster_width=16)
    done = mgpu_tune("which", "matmul", *SIDES, "--gpu", "h200")
    assert done.code == 0
    assert "raster_width=16" in done.out
    assert "from      user: measured for this problem, in" in done.out
    assert str(user_file()) in done.out
    assert "evidence  measured 12.5 us, spread 0.5 us, on NVIDIA H200; 1.2x as fast as the default" in done.out
    assert "2x as fast as xla (25 us)" in done.out
    assert "argument: no config= was given" in done.out


def test_every_command_tells_where_xla_is_faster_and_runs(tmp_path: Path, mgpu_tune: Command) -> None:
    before, after = store(tmp_path / "before.json"), store(tmp_path / "after.json", xla_us=10.0)
    store(user_file(), xla_us=10.0)
    times = "kernel 12.5 us, xla 10 us, measured"
    which = mgpu_tune("which", "matmul", *SIDES, "--gpu", "h200", "--json")
    assert f"runs      XLA: {times}" in which.err
    told = json.loads(which.out)
    assert (told["backend"], told["runs"]) == ("xla", "xla")
    assert (told["times"]["kernel_us"], told["times"]["baseline_us"]) == (12.5, 10.0)
    (row,) = (line for line in mgpu_tune("show", "matmul", "--gpu", "h200").out.splitlines() if "m=512 n=512 k=512" in line)
    assert "  12.5  0.800 xla   1.200      xla 10.0 us  measured: kernel  " in row
    assert f"runs kernel -> xla: {times}" in mgpu_tune("diff", before, after).out
    assert mgpu_tune("validate", after).out == f"{after}: ok; 1 of 1 run XLA, which is faster\n"
    mgpu_tune("export", "matmul", "--gpu", "h200", "--own", "--format", "csv", "--output", tmp_path / "all.csv")
    heading, first, *_ = (tmp_path / "all.csv").read_text().splitlines()
    assert dict(zip(heading.split(","), first.split(",")))["runs"] == "xla"
    merged = mgpu_tune("merge", before, after, "--into", tmp_path / "both.json").out
    assert f"XLA is faster, and runs: {times}" in merged


def test_which_tells_that_a_run_changed_the_winner(mgpu_tune: Command) -> None:
    words = ("which", "matmul", *SIDES, "--gpu", "h20")
    assert "from      user" not in mgpu_tune(*words).out
    assert mgpu_tune("run", "matmul", *SIDES, "--gpu", "h20", "--trials", 4).code == 0
    assert "from      user: modelled" in mgpu_tune(*words).out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--m", 512, "--n", 512, "--k", 100, "--gpu", "h200"), "k=100 needs 16-byte rows of a"),
        ((*SIDES, "--out-dtype", "f16", "--gpu", "h200"), "out_dtype float16 is neither"),
        ((*SIDES, "--gpu", "b200"), "NVIDIA B200 is not a Hopper GPU"),
    ],
    ids=["k", "dtype", "gpu"],
)
def test_which_says_why_a_problem_runs_through_xla(words: Sequence[Any], reason: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("which", "matmul", *words)
    assert done.code == 0
    assert "runs through XLA" in done.out
    assert reason in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("matmul", *SIDES, "--dtype", "i32"), "a has dtype int32: matmul takes floats; cast it first"),
        (("grouped_matmul", *SIDES, "--groups", 8, "--dtype", "i32"), "lhs has dtype int32: grouped_matmul takes floats"),
        (("ragged_contraction", *SIDES, "--groups", 8, "--dtype", "u32"), "lhs has dtype uint32: ragged_contraction takes"),
        (("flash_attention", *HEADS, "--dtype", "i32"), "q has dtype int32: flash_attention takes floats; cast it first"),
        (("flash_attention_backward", *HEADS, "--dtype", "i32"), "q has dtype int32: flash_attention takes floats"),
        (("flash_attention", *HEADS, "--head-dim", 0), "'0' must be a whole number of at least 1"),
        (("matmul", *SIDES, "--m", 0), "'0' must be a whole number of at least 1"),
        (("matmul", *SIDES, "--m", -1), "'-1' must be a whole number of at least 1"),
        (("all_reduce", "--size", 0, "--devices", 2), "'0' must be a whole number of at least 1"),
        (("matmul", *SIDES, "--m", 10**30), f"{10**30} is more than an array can have"),
        (("matmul", *SIDES, "--m", 2**62), "bytes: no array has 2**63"),
        (("all_reduce", "--size", 2**62, "--devices", 2), "bytes: no array has 2**63"),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_which_refuses_what_a_call_refuses_in_its_words(words: Sequence[Any], message: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("which", *words, "--gpu", "h200")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err


def test_which_refuses_a_backend_that_there_is_not_as_a_call_does(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "triton")
    done = mgpu_tune("which", "matmul", *SIDES, "--gpu", "h200")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "MGPU_OPS_BACKEND='triton' is not one of mosaic, interpret, xla" in line


def test_which_says_what_the_environments_backend_does(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "xla")
    done = mgpu_tune("which", "matmul", *SIDES, "--gpu", "h200", "--json")
    assert done.code == 0
    assert "MGPU_OPS_BACKEND='xla': every call runs on that backend. Without it:\n" in done.err
    assert json.loads(done.out)["backend"] == "xla"
    monkeypatch.setenv("MGPU_OPS_BACKEND", "mosaic")
    assert json.loads(mgpu_tune("which", "matmul", *SIDES, "--gpu", "h200", "--json").out)["backend"] == "mosaic"
    done = mgpu_tune("which", "matmul", *SIDES, "--out-dtype", "f16", "--gpu", "h200")
    assert (done.code, done.out) == (2, "")
    assert "MGPU_OPS_BACKEND='mosaic' cannot run matmul" in done.err
    assert "out_dtype float16 is neither" in done.err


def test_validate_of_good_files_is_0(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(tmp_path / "tuned.json")
    done = mgpu_tune("validate", path)
    assert (done.code, done.out) == (0, f"{path}: ok\n")


def test_validate_takes_a_folder_of_a_teams_databases(tmp_path: Path, mgpu_tune: Command) -> None:
    paths = [store(tmp_path / "tuned" / key / "matmul.json", gpu_key=key) for key in ("h100-sxm", "h200")]
    done = mgpu_tune("validate", tmp_path / "tuned")
    assert (done.code, done.out) == (0, "".join(f"{path}: ok\n" for path in paths))


# --- check-in


def with_evidence(path: Path, **changes: Any) -> Path:
    """Stores an entry with other evidence."""
    (entry,) = database.read(store(path)).entries
    evidence = msgspec.structs.replace(entry.evidence, **changes)
    path.write_bytes(database.encode(database.File(1, "h200", "matmul", (msgspec.structs.replace(entry, evidence=evidence),))))
    return path


def test_what_is_shipped_can_be_checked_in(mgpu_tune: Command) -> None:
    path = database.shipped_path("h200", "matmul")
    done = mgpu_tune("check-in", path.parents[1])
    assert (done.code, done.err) == (0, "")
    assert f"h200/matmul.json: {len(database.read(path).entries)} entries, all measured on NVIDIA H200" in done.out


FAULTY_EVIDENCE: dict[str, tuple[dict[str, Any], str]] = {
    "modelled": ({"kind": "modelled"}, "modelled, not measured: tune it on the GPU"),
    "no driver": ({"driver": None}, "does not say with which driver: measure again"),
    "no cuda": ({"cuda": None}, "does not say with which CUDA: measure again"),
    "no baseline": ({"baseline_us": None}, "has no time of a baseline from the same run: measure again"),
    "no default": ({"default_us": None}, "has no time of the default config from the same run: measure again"),
    "slower than before": (
        {"default_us": None, "previous_us": 12.0},
        "12.5 us are more than the 12 us of the config stored before",
    ),
    "no error": ({"error": None}, "has no error against the reference: measure again"),
    "wide": ({"spread_us": 4.0}, "spread of 4 us is more than 20 % of 12.5 us: measure again, with nothing else on the GPU"),
    "samples": ({"samples_us": [9.0, 9.1, 9.2]}, "the median of its samples is 9.1 us, not 12.5: measure again"),
    "another GPU": ({"gpu": "NVIDIA H20"}, "evidence of 'NVIDIA H20' in a file of NVIDIA H200"),
    "wrong": ({"error": 0.5, "date": "2026-11-23"}, "error 0.5 is above"),
}


@pytest.mark.parametrize("name", FAULTY_EVIDENCE)
def test_check_in_names_an_entry_whose_evidence_does_not_do(name: str, tmp_path: Path, mgpu_tune: Command) -> None:
    changes, fault = FAULTY_EVIDENCE[name]
    with_evidence(tmp_path / "tuned" / "h200" / "matmul.json", **changes)
    done = mgpu_tune("check-in", tmp_path / "tuned")
    assert done.code == 1
    assert "h200/matmul.json: 1 fault\n" in done.out
    assert "'m': 512" in done.out
    assert fault in done.out


def test_beside_the_config_stored_before_the_default_need_not_be_timed(tmp_path: Path, mgpu_tune: Command) -> None:
    with_evidence(tmp_path / "tuned" / "h200" / "matmul.json", default_us=None, previous_us=14.0)
    assert mgpu_tune("check-in", tmp_path / "tuned").code == 0


def test_check_in_names_files_that_no_call_would_find(tmp_path: Path, mgpu_tune: Command) -> None:
    store(tmp_path / "h200" / "matmul.json")
    store(tmp_path / "NVIDIA H200" / "matmul.json")
    store(tmp_path / "h200" / "grouped_matmul.json")
    store(tmp_path / "matmul.json")
    (tmp_path / "h200" / "mine.json").write_text("{}")
    (tmp_path / "README.md").write_text("ours")
    done = mgpu_tune("check-in", tmp_path)
    assert done.code == 1
    assert "h200/matmul.json: 1 entry, all measured on NVIDIA H200" in done.out
    for place, fault in (
        ("NVIDIA H200/matmul.json", "no call looks here: move it to h200/matmul.json"),
        ("h200/grouped_matmul.json", "no call looks here: move it to h200/matmul.json"),
        ("matmul.json", "no call looks here: move it to h200/matmul.json"),
        ("h200/mine.json", "is corrupt"),
    ):
        assert re.search(rf"^{place}: 1 fault\n  .*{fault}", done.out, re.MULTILINE), done.out
    for place, why in ((tmp_path / "none", "no such folder"), (tmp_path / "README.md", "is a file: name its folder")):
        done = mgpu_tune("check-in", place)
        assert (done.code, why in done.err) == (2, True)


def test_check_in_takes_a_wide_spread_where_xla_is_faster_all_the_same(tmp_path: Path, mgpu_tune: Command) -> None:
    with_evidence(tmp_path / "h200" / "matmul.json", spread_us=4.0, baseline_us=8.0)
    assert mgpu_tune("check-in", tmp_path).code == 0


def test_check_in_marks_entries_of_another_jax_and_takes_them(tmp_path: Path, mgpu_tune: Command) -> None:
    with_evidence(tmp_path / "h200" / "matmul.json", jax="99.0.0")
    done = mgpu_tune("check-in", tmp_path)
    assert done.code == 0
    assert "h200/matmul.json: 1 entry, all measured on NVIDIA H200; 1 tuned with jax 99.0.0, not " in done.out


def test_validate_without_a_file_checks_the_users_and_the_shipped_ones(mgpu_tune: Command) -> None:
    store(user_file())
    done = mgpu_tune("validate")
    assert done.code == 0
    assert f"{user_file()}: ok" in done.out
    shipped = database.shipped_path("h200", "matmul")
    assert not shipped.exists() or f"{shipped}: ok" in done.out


def test_faults_are_counted_in_the_plural_where_there_are_several(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(tmp_path / "bad.json", tile_m=100)
    store(path, 1024, tile_m=100)
    assert f"{path}: 2 faults\n" in mgpu_tune("validate", path).out


def rewrite(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a config that cannot run": (lambda path: store(path, tile_m=100), "must be a multiple of 64"),
    "an unknown field": (lambda path: rewrite(store(path), more=1), "is corrupt"),
    "cut off": (lambda path: store(path).write_bytes(path.read_bytes()[:-20]), "is corrupt"),
    "empty": (lambda path: path.write_bytes(b""), "is corrupt"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is corrupt"),
    "a newer schema": (lambda path: rewrite(store(path), schema=99), "was written by a newer mgpu_ops (schema 99"),
    "evidence of another GPU": (
        lambda path: rewrite(store(path), gpu="h100-sxm"),
        "evidence of 'NVIDIA H200' in a file of NVIDIA H100 80GB HBM3",
    ),
    "an unknown GPU": (lambda path: rewrite(store(path), gpu="v100"), "gpu='v100' is not a GPU in the table"),
    "an unknown op": (lambda path: rewrite(store(path), op="softmax"), "op 'softmax' is not one of matmul"),
    "a directory": (lambda path: path.mkdir(), "is a folder: name a file"),
    "missing": (lambda path: None, "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_validate_names_the_file_and_its_fault_and_goes_on(fault: str, tmp_path: Path, mgpu_tune: Command) -> None:
    bad, good = tmp_path / "bad.json", store(tmp_path / "good.json")
    prepare, reason = FAULTS[fault]
    prepare(bad)
    done = mgpu_tune("validate", bad, good)
    assert done.code == 1
    assert f"{bad}: 1 fault\n" in done.out
    assert reason in done.out
    assert f"{good}: ok" in done.out


# --- bench


SHAPE = "mixtral-8x7b-down-128-random"


def bench_row(impl: str, us: float, error: float | None = 0.001, problem: str = "p 8x8x8 g=2") -> results.Measurement:
    stamp = {"gpu": "NVIDIA H200", "driver": "570.86.15", "jax": "0.11.2", "date": "2025-01-31"}
    warm_us = us * {"mgpu_ops": 0.5, "tokamax": 6 / 11}.get(impl, 0.5)
    return results.Measurement("grouped_matmul", problem, impl, "c", us, 0.1, 1.0, 1.0, error, **stamp, warm_us=warm_us)


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`bench` as on an H200, with rows made up; the options it was run with."""
    asked: list[dict[str, Any]] = []

    def run(spec: Any, problems: dict[str, Any], options: runner.BenchOptions, **more: Any) -> list[results.Measurement]:
        asked.append(vars(options) | more)
        text = labels.label(spec, *next(iter(problems.items())))
        times = {"mgpu_ops": 10.0, "jax-pallas": 12.0, "tokamax": 11.0}
        rows = [bench_row(impl, us, problem=text) for impl, us in times.items()]
        return [*rows, bench_row("dense", 9.0, None, problem=text)]

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(gpu, "current", lambda: H200)
    return asked


def test_bench_tells_the_best_competitor_and_what_part_of_dense_is_reached(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    words = ("bench", "grouped_matmul", "--shape", SHAPE, "--output", tmp_path)
    done = mgpu_tune(*words, "--against", "dense,jax-pallas,tokamax", "--peer-seconds", "5s")
    assert (done.code, done.err) == (0, "")
    assert (
        "grouped_matmul against best competitor: geometric mean 1.100x (1.200x with a warm L2) over 1 problem, worst"
        in done.out
    )
    assert "grouped_matmul: geometric mean 0.900 of dense (0.900 of dense with a warm L2) over 1 problem, worst" in done.out
    assert "1 under 1.0x" in done.out
    assert "WRONG" not in done.out
    assert benched[0]["against"] == ["dense", "jax-pallas", "tokamax"]
    assert (benched[0]["competitor_seconds"], list(benched[0]["earlier"])) == (5.0, [])


def test_bench_without_pause_writes_a_file_and_rows_of_their_own(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    for turn in ((), ("2s",)):
        done = mgpu_tune("bench", "grouped_matmul", "--shape", SHAPE, "--output", tmp_path, "--json", "--sustained", *turn)
        assert Path(json.loads(done.out)["files"][0]).name.endswith("-h200-grouped_matmul-sustained.csv")
    mgpu_tune("bench", "grouped_matmul", "--shape", SHAPE, "--output", tmp_path)
    assert [options["sustained"] for options in benched] == [1.0, 2.0, None]
    done = mgpu_tune("bench", "all_reduce", "--devices", 2, "--size", 1024, "--sustained")
    assert done.code == 2
    assert "leave out --grad, --sustained and --against" in done.err


def test_json_of_bench_has_the_rows_the_summary_and_the_files(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    words = ("bench", "grouped_matmul", "--shape", "mixtral-8x7b-down-128-random", "--output", tmp_path)
    done = mgpu_tune(*words, "--json")
    document = json.loads(done.out)
    assert (done.code, document["faults"]) == (0, [])
    assert [row["impl"] for row in document["rows"]] == ["mgpu_ops", "jax-pallas", "tokamax", "dense"]
    assert "best peer" in [line["peer"] for line in document["summary"]]
    csv, *pictures = map(Path, document["files"])
    assert (csv.parent, csv.suffix) == (tmp_path, ".csv")
    assert [path.suffix for path in pictures if path.exists()] == [".png", ".svg"]


def test_bench_of_attention_compares_with_cudnn_unless_told_and_runs_ours_where_it_is_told(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    for op in ATTENTION:
        mgpu_tune("bench", op, *HEADS, "--backend", "xla", "--output", tmp_path)
        mgpu_tune("bench", op, *HEADS, "--output", tmp_path)
    assert [options["against"] for options in benched] == [["cudnn"]] * 4
    assert [options["backend"] for options in benched] == ["xla", None] * 2


@pytest.mark.parametrize("op", ["grouped_matmul", "ragged_contraction"])
def test_bench_compares_with_the_ops_own_yardstick_unless_told(
    op: str, benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    mgpu_tune("bench", op, *SIDES, "--groups", 8, "--output", tmp_path)
    assert benched[0]["against"] == ["dense"]


def test_bench_takes_the_competitors_settings_from_an_earlier_result(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    earlier = [bench_row("tokamax", 11.0)]
    results.write_csv(earlier, tmp_path / "earlier.csv")
    words = ("bench", "grouped_matmul", *SIDES, "--groups", 8, "--output", tmp_path)
    mgpu_tune(*words, "--peers-from", tmp_path / "earlier.csv")
    assert list(benched[0]["earlier"]) == earlier
    done = mgpu_tune(*words, "--peers-from", tmp_path / "none.csv")
    assert done.code == 2
    assert f"{tmp_path / 'none.csv'}: cannot be read" in done.err


def test_a_second_run_of_a_day_keeps_the_rows_of_other_problems(
    benched: list[dict[str, Any]], tmp_path: Path, mgpu_tune: Command
) -> None:
    """So that what was cut off, or failed on a problem, is run again for what is missing."""
    words = ("bench", "grouped_matmul", "--output", tmp_path, "--json", "--shape")
    [csv] = (Path(f) for f in json.loads(mgpu_tune(*words, SHAPE).out)["files"] if f.endswith(".csv"))
    results.write_csv([bench_row("mgpu_ops", 1.0, problem="another"), bench_row("mgpu_ops", 1.0, problem="third")], csv)
    benched[-1]["save"]([bench_row("mgpu_ops", 2.0, problem="another")])  # the first run goes on
    done = mgpu_tune(*words, SHAPE)
    assert f"{csv} has 1 row: those of other problems stay" in done.err
    benched[-1]["save"]([bench_row("mgpu_ops", 3.0, problem="third")])
    assert [(row.problem, row.median_us) for row in results.read_csv(csv)] == [("another", 2.0), ("third", 3.0)]
    csv.write_text("other,columns\n")
    done = mgpu_tune(*words, SHAPE)
    assert done.code == 2
    assert "has columns ['other', 'columns']" in done.err


@pytest.mark.parametrize(("competitors", "started"), [("dense,lax", 0), ("dense,jax-pallas", 1)])
def test_processes_that_compile_start_only_for_a_competitor_that_is_tuned(
    competitors: str,
    started: int,
    benched: list[dict[str, Any]],
    tmp_path: Path,
    mgpu_tune: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[str] = []

    class Pool:
        def __enter__(self) -> str:
            pools.append("pool")
            return "pool"

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(compile_pool, "Pool", Pool)
    mgpu_tune("bench", "grouped_matmul", *SIDES, "--groups", 8, "--output", tmp_path, "--against", competitors)
    assert pools == ["pool"] * started
    assert benched[0]["pool"] == ("pool" if started else None)


# --- demo


def test_demo_tunes_stores_runs_and_prints_an_error_below_the_limit(own_database: Path) -> None:
    """In a process of its own: the interpreter needs more threads than JAX starts on a machine of few cores."""
    code = (
        "import sys\n"
        "from mgpu_ops.core import aot\n"
        "from mgpu_ops.tuning import cli, devices\n"
        "aot.available = lambda: 'not in this test'\n"  # compiling takes seconds a candidate
        "devices.has_gpu = lambda: False\n"
        "sys.exit(cli.main(['demo', '--json']))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "times are MODELLED, not measured" in done.stderr
    assert f"stored as modelled in {own_database / 'h200' / 'matmul.json'}" in done.stderr
    told = json.loads(done.stdout)  # one line
    assert 0 < told["error"] <= told["limit"]
    assert f"max error {told['error']:.2e} against float32" in done.stderr
    entry = only_entry()
    assert (entry.evidence.kind, entry.problem["m"]) == ("modelled", 512)


def test_demo_is_a_tour_on_a_machine_whose_gpu_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def tune(self: Any, job: Any, device: Any, bar: Any) -> int:
        assert device.kind == "modelled"
        raise Reached

    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", no_hopper)
    monkeypatch.setattr(session.Session, "tune", tune)
    monkeypatch.setenv("NPROC", "64")
    with pytest.raises(Reached):
        cli.main(["demo"])


# --- collectives


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64KiB", [1 << 16]),
        ("1KiB:256MiB", [1 << i for i in range(10, 29, 2)]),
        ("4096:10000", [4096]),
        ("1GiB:1GiB", [1 << 30]),
    ],
)
def test_sizes_of_payloads_go_up_in_steps_of_four(text: str, sizes: list[int]) -> None:
    assert list(arguments.byte_sizes(text)) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1KiB", "1KB", "KiB", "1.5MiB", ":", ":1KiB", "2KiB:1KiB", "1KiB:2KiB:3KiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be a size such as|begins above its end"):
        arguments.byte_sizes(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("all_reduce", "--bytes", "1KiB"), "--devices missing: of how many GPUs is the all_reduce?"),
        (("all_reduce", "--bytes", "1KiB", "--devices", "4", "--size", "8"), "--bytes names the payloads: leave out --size"),
        (("all_reduce", "--bytes", "1KiB", "--suite", "4-gpus"), "--bytes names the payloads: leave out --size"),
        (("matmul", "--bytes", "1KiB"), "--bytes is for collectives, not for matmul"),
        (("all_gather", "--bytes", "6", "--devices", "4"), "no size holds whole elements of 2 bytes for each of 4 GPUs"),
    ],
)
def test_payloads_that_are_none_are_refused(words: tuple[str, ...], message: str, mgpu_tune: Command) -> None:
    done = mgpu_tune("run", *words, "--gpu", "h200")
    assert done.code == 2
    assert message in done.err


def test_payloads_of_a_collective_are_tuned_by_the_model_where_no_gpu_is(mgpu_tune: Command, own_database: Path) -> None:
    mgpu_tune("run", "all_reduce", "--devices", "4", "--bytes", "1KiB:16KiB", "--gpu", "h200", "--trials", "1")
    entries = database.read(own_database / "h200" / "all_reduce.json").entries
    assert sorted(entry.problem["size"] for entry in entries) == [512, 2048, 8192]
    assert {entry.problem["devices"] for entry in entries} == {4}
