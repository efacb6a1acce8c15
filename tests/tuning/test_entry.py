"""`mgpu-tune` as a program: without its extras, under Ctrl-C, its versions. Nothing here needs a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

import mgpu_ops
from mgpu_ops.core import extras
from mgpu_ops.registry import database
from mgpu_ops.tuning import child, cli, neighbours
from mgpu_ops.tuning.cli import versions
from mgpu_ops.tuning.replay import replay, sweep
from tests import thorough
from tests.tuning.conftest import Command
from tests.tuning.replay.test_replay import made

ROOT = Path(__file__).parents[2]
SIDES = ("--m", "512", "--n", "512", "--k", "512")
SHIPPED = str(database.shipped_path("h200", "matmul"))
WORDS: dict[str, tuple[str, ...]] = {  # a request of every command that it takes, here
    "run": ("matmul", *SIDES, "--gpu", "h200", "--trials", "2"),
    "worker": ("--storage", "x.journal", "--gpu", "h200"),
    "proxy": ("--storage", "postgresql://h/d"),
    "dashboard": ("--storage", "x.journal"),
    "capture": ("program:step",),
    "compile": ("program:step", "--gpu", "h200"),
    "profile": ("matmul", *SIDES, "--output", "profiles"),
    "show": ("matmul", "--gpu", "h200"),
    "which": ("matmul", *SIDES, "--gpu", "h200"),
    "validate": (SHIPPED,),
    "check-in": (str(Path(SHIPPED).parents[1]),),
    "merge": (SHIPPED, "--into", "merged.json"),
    "diff": (SHIPPED, SHIPPED),
    "export": ("matmul", "--gpu", "h200", "--output", "exported"),
    "retune": ("matmul", "--stale", "--gpu", "h20"),
    "plot": ("matmul", "--gpu", "h200", "--output", "pictures"),
    "report": ("matmul", "--gpu", "h200", "--output", "report.html"),
    "bench": ("matmul", *SIDES),
    "sweep": ("--suite", "replay"),
    "replay": ("--from", "sweeps"),
    "demo": (),
}
PROGRAM = """
import jax.numpy as jnp
import mgpu_ops
def step():
    a = jnp.ones((512, 512), jnp.bfloat16)
    return mgpu_ops.matmul(a, a)
"""


def python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_every_command_is_among_those_tried_here() -> None:
    assert set(WORDS) == set(cli.COMMANDS)


LIGHT = """
import json, sys
from mgpu_ops.tuning import cli
for words in json.loads(sys.argv[1]):
    assert cli.main(words) == 0, words
import mgpu_ops
mgpu_ops.explain("matmul", {"m": 512, "n": 512, "k": 512}, gpu="h200")
heavy = ("matplotlib", "optuna", "pandas", "jax._src.pallas", "mgpu_ops.core.engine", *(
    f"mgpu_ops.tuning.{name}" for name in ("bench", "device", "search", "tuner", "worker")
))
print("loaded:", *(name for name in heavy if name in sys.modules))
"""


def test_commands_that_read_databases_load_no_tuner_no_benchmarks_no_pictures_and_no_kernel(tmp_path: Path) -> None:
    reading = ("show", "which", "validate", "merge", "diff", "export")
    words = [[command, *WORDS[command]] for command in reading]
    words.append(["which", "matmul", *SIDES, "--dtype", "f32", "--gpu", "h200"])  # no kernel runs it
    done = python(LIGHT, json.dumps(words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


# --- without the extras


WITHOUT = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"rich", "optuna", "matplotlib", "optuna_dashboard", "grpc"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from mgpu_ops.tuning import cli, devices
devices.has_gpu = lambda: False
for command, words in json.loads(sys.argv[1]).items():
    print("#", command, cli.main([command, *words]), flush=True)
    print("#", command, file=sys.stderr, flush=True)
import mgpu_ops
try:
    mgpu_ops.autotune(lambda: None, gpu="h200")
except ImportError as e:
    print(e)
"""


def test_without_an_extra_every_command_works_or_names_it_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python(WITHOUT, json.dumps(WORDS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = dict(re.findall(r"^# ([\w-]+) (\d)$", done.stdout, re.MULTILINE))
    said = dict(zip(codes, re.split(r"^# [\w-]+\n", done.stderr, flags=re.MULTILINE), strict=False))
    works = {"capture", "compile", "which", "validate", "check-in", "merge", "diff", "export"}
    assert {command for command, code in codes.items() if code == "0"} == works
    for command in codes.keys() - works:
        (line,) = said[command].splitlines()
        assert re.fullmatch(rf"mgpu-tune: mgpu-tune {command} needs .*: run `pip install '\.\[.*\]'` in a checkout of .*", line)
        assert codes[command] == "2"
    written = {path.name for path in tmp_path.iterdir()} - {"program.py", "__pycache__"}
    assert written == {"merged.json", ".merged.json.lock", "exported"}
    assert "mgpu_ops.autotune needs optuna: run `pip install '.[tune]'` in a checkout of mgpu_ops" in done.stdout


def test_an_extra_that_a_command_meets_on_its_way_is_named(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`merge` needs optuna where it is asked for a storage."""
    for name in [name for name in sys.modules if name == "mgpu_ops.tuning.storage" or name.partition(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mgpu_ops.tuning.storage")
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = mgpu_tune("merge", "--storage", "x.journal")
    assert (done.code, done.out) == (2, "")
    assert done.err == "mgpu-tune: mgpu-tune merge needs optuna: run `pip install '.[tune]'` in a checkout of mgpu_ops\n"


def test_every_extra_that_is_named_is_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.BRINGS) <= set(project)
    assert extras.way_to(["optuna", "optuna_dashboard"]) == "run `pip install '.[tune,dashboard]'` in a checkout of mgpu_ops"


def test_no_hint_tells_to_install_the_package_by_name() -> None:
    """It is on no index: an extra is installed from a checkout."""
    places = [path for folder in ("mgpu_ops", "core", "tuning", "docs") for path in (ROOT / folder).rglob("*.[mp][dy]")]
    told = [path for path in [*places, ROOT / "README.md"] if re.search(r"install '?mgpu.ops", path.read_text())]
    assert told == []


# --- --version


def test_the_version_names_what_a_report_should(mgpu_tune: Command) -> None:
    done = mgpu_tune("--version")
    assert (done.code, done.err) == (0, "")
    assert f"mgpu_ops {mgpu_ops.__version__} (" in done.out
    assert f"jax {jax.__version__}, jaxlib " in done.out
    assert f"Python {sys.version.split()[0]}\n" in done.out
    assert re.search(r"^ptxas (\d|not found)", done.out, re.MULTILINE)
    assert "\nno NVIDIA GPU\n" in done.out


def test_the_version_of_a_machine_with_gpus_names_them_and_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "asked", lambda *words: ["NVIDIA H200, 580.159.04"] * 2)
    assert versions.text(True).endswith("\n2 x NVIDIA H200, driver 580.159.04")
    monkeypatch.setattr(neighbours, "asked", lambda *words: None)
    assert versions.text(True).endswith("\nan NVIDIA GPU of which nvidia-smi says nothing")


def test_the_version_imports_no_jax(tmp_path: Path) -> None:
    code = """
import sys
import tomllib
from mgpu_ops.tuning import cli
try:
    cli.main(["--version"])
finally:
    assert not {"jax", "numpy", "optuna"} & sys.modules.keys()
"""
    done = python(code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# --- Ctrl-C


PRESS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
at = sys.argv.pop(1)
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from mgpu_ops.tuning import cli, devices
devices.has_gpu = lambda: False
sys.exit(cli.main())
"""


@pytest.mark.parametrize("command", thorough.cases(WORDS, WORDS.keys() - {"run", "capture", "show", "bench", "replay"}))
def test_ctrl_c_while_jax_is_imported_is_130_and_one_line(command: str, tmp_path: Path) -> None:
    done = python(PRESS, "jax", command, *WORDS[command], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "mgpu-tune: stopped\n")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("run", "mgpu_ops.tuning.cli.run"),
        ("show", "rich.console"),
        ("replay", "optuna"),
        ("export", "mgpu_ops.tuning.fleet.merge"),
    ],
)
def test_ctrl_c_while_a_command_imports_is_130_and_one_line(command: str, module: str, tmp_path: Path) -> None:
    done = python(PRESS, module, command, *WORDS[command], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "mgpu-tune: stopped\n")


def test_ctrl_c_that_a_library_takes_for_its_own_is_130_too(tmp_path: Path) -> None:
    """As the web server of the dashboard does."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mgpu_ops.tuning import cli
from mgpu_ops.tuning.cli import diff
def run(arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True: pass
    except KeyboardInterrupt:
        return 0
diff.run = run
sys.exit(cli.main())
"""
    done = python(code, "diff", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "mgpu-tune: stopped\n")


def test_ctrl_c_ends_a_replay_and_counts_no_search_that_was_cut_off(
    mgpu_tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made("matmul", "llama3-8b-qkv-128")
    sweep.write(found, sweep.paths(tmp_path, found.op, "h200", found.name)[0])
    following, asked = replay.Recorded.next, []

    def interrupted(self: Any) -> Any:
        asked.append(1)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return following(self)

    monkeypatch.setattr(replay.Recorded, "next", interrupted)
    done = mgpu_tune("replay", "--from", tmp_path, "--sampler", "ours", "--seeds", 3, "--json")
    assert (done.code, done.out, len(asked)) == (130, "", 5)
    assert done.err.endswith("mgpu-tune: stopped\n")


def _blocked(pipe: Any) -> None:
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_a_process_of_the_tuner_hears_of_no_ctrl_c_while_it_starts() -> None:
    """Its imports take seconds; only then can it say that Ctrl-C is its parent's."""
    process = child.Child(_blocked)
    try:
        assert process.receive(600) is True
    finally:
        process.kill()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# --- odd surroundings


def program(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`mgpu-tune` as a process of its own, without a GPU."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | options.pop("env", {})
    command = [sys.executable, "-m", "mgpu_ops.tuning.cli", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, cwd=cwd, env=environment, text=True, check=False, timeout=120, **pipes)


@pytest.mark.parametrize("words", [("validate", SHIPPED), ("which", *WORDS["which"])], ids=["validate", "which"])
def test_a_full_disk_behind_standard_output_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = program(*words, cwd=tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (2, "mgpu-tune: [Errno 28] No space left on device\n")


def test_a_reader_who_has_gone_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = program("show", "matmul", "--gpu", "h200", cwd=tmp_path, stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_home_what_is_shipped_is_used_and_nothing_is_stored(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", "~nobody-of-that-name/configs")
    assert mgpu_tune("which", *WORDS["which"]).code == 0
    done = mgpu_tune("run", *WORDS["run"])
    assert done.code == 2
    assert "cannot be written (there is no such home directory): permit it, or set MGPU_OPS_CONFIG_DIR" in done.err


def test_a_name_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    done = program("validate", "é", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("\\xe9: 1 fault\n")


@pytest.mark.parametrize(
    "words", [("validate",), ("merge", "--into", "o"), ("diff", SHIPPED), ("plot", "--from"), ("replay", "--from")]
)
def test_a_name_that_is_too_long_is_told(words: tuple[str, ...], mgpu_tune: Command) -> None:
    done = mgpu_tune(*words, "x" * 300)
    assert done.code in (1, 2)
    assert "File name too long" in done.out + done.err or "no complete sweep" in done.err


@pytest.mark.parametrize("words", [("--",), ("--", "show"), ("--unknown", "show"), ("show", "a", "b"), ("",)])
def test_words_in_no_order_that_is_known_are_refused(words: tuple[str, ...], mgpu_tune: Command) -> None:
    done = mgpu_tune(*words)
    assert (done.code, done.out) == (2, "")
    assert "mgpu-tune" in done.err


@pytest.mark.parametrize("where", ["ends:step", "program:ends"])
def test_a_program_that_ends_itself_is_told(
    where: str, mgpu_tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "program.py").write_text("def ends():\n    raise SystemExit(0)\n")
    monkeypatch.delitem(sys.modules, "program", raising=False)
    done = mgpu_tune("capture", where)
    assert done.code == 2
    assert f"{where} could not be traced: SystemExit: 0" in done.err


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_which_of_more_groups_than_jax_can_count_is_a_sentence(mgpu_tune: Command) -> None:
    done = mgpu_tune("which", "grouped_matmul", *SIDES, "--groups", 10**17, "--gpu", "h200")
    assert done.code in (0, 2)
    assert "grouped_matmul" in done.out + done.err
