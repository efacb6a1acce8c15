"""The house: the links, what a wheel and an sdist hold, what an import loads, who imports whom."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mgpu_ops

ROOT = Path(__file__).parents[1]


def run_python(code: str, *args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in `cwd`, from which it imports before anything that is installed."""
    env = {**os.environ, "PYTHONPATH": "", "COLUMNS": "200"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def files_of_the_package(parent: Path) -> set[str]:
    """Every file under `parent`/mgpu_ops, also behind the links, relative to `parent`."""
    return {
        str(Path(folder, name).relative_to(parent))
        for folder, _, names in os.walk(parent / "mgpu_ops", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys; from build.__main__ import main; main(sys.argv[1:])"
    result = run_python(code, "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked_wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "wheel")
    return built / "wheel"


def version_in(name: str) -> str:
    return name.removesuffix(".tar.gz").split("-")[1].partition(".d20")[0]  # without the day of uncommitted changes


def test_sdist_and_wheel_have_the_version_that_the_checkout_says(built):
    """The wheel is built from the sdist, where there is no git."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    found = [version_in(path.name) for path in (*built.glob("*.tar.gz"), *built.glob("*.whl"))]
    assert found == [mgpu_ops.__version__] * 2


@pytest.mark.parametrize("name", ["core", "tuning"])
def test_core_and_tuning_are_relative_links_to_the_top_level_folders(name):
    assert os.readlink(ROOT / "mgpu_ops" / name) == f"../{name}"
    assert not (ROOT / name).is_symlink()


def test_wheel_holds_the_whole_package_and_no_other_top_level_name(unpacked_wheel):
    top_level = {path.name for path in unpacked_wheel.iterdir()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"mgpu_ops"}
    files = files_of_the_package(unpacked_wheel)
    assert files == files_of_the_package(ROOT)
    assert files >= {"mgpu_ops/py.typed", "mgpu_ops/registry/spec.py", "mgpu_ops/tuning/__init__.py"}


def test_sdist_holds_the_code_once_behind_no_links(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert names >= {"pyproject.toml", "README.md", "LICENSE"} | files_of_the_package(ROOT)
    assert not {name for name in names if name.startswith(("core/", "tuning/"))}


def test_wheel_installs_the_command(unpacked_wheel):
    (points,) = unpacked_wheel.glob("*.dist-info/entry_points.txt")
    assert "mgpu-tune = mgpu_ops.tuning.cli:main" in points.read_text()


def test_import_from_a_wheel_loads_no_tuner_and_touches_no_device(unpacked_wheel):
    code = """
import json, sys
import mgpu_ops, mgpu_ops.registry.dispatch
mgpu_ops.matmul
from jax._src.xla_bridge import backends_are_initialized
print(json.dumps([mgpu_ops.__file__, sorted(sys.modules), backends_are_initialized()]))
"""
    result = run_python(code, cwd=unpacked_wheel)
    assert result.returncode == 0, result.stderr
    where, modules, initialized = json.loads(result.stdout)
    assert Path(where).is_relative_to(unpacked_wheel)
    heavy = {"optuna", "pandas", "matplotlib", "rich", "jax._src.pallas", "mgpu_ops.tuning", "core", "tuning"}
    assert not heavy & set(modules)
    assert not initialized


@pytest.mark.parametrize("target", ["--wheel", "--sdist"])
@pytest.mark.parametrize("link", ["core", "tuning"])
def test_a_checkout_whose_links_are_text_files_is_refused_in_a_sentence(tmp_path, link, target):
    """git writes links so with core.symlinks=false; what is built from them would lack the folder."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("mgpu_ops", "core", "tuning"):
        (tmp_path / name).mkdir()
    for name in ("core", "tuning"):
        (tmp_path / "mgpu_ops" / name).symlink_to(f"../{name}")
    (tmp_path / "mgpu_ops" / link).unlink()
    (tmp_path / "mgpu_ops" / link).write_text(f"../{link}")
    code = "import sys; from build.__main__ import main; main(sys.argv[1:])"
    result = run_python(code, "--no-isolation", target, "--outdir", tmp_path / "dist", tmp_path, cwd=tmp_path)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert f"mgpu_ops/{link} is not the link to ../{link}" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("dist/*"))


DIRECTION = "core <- registry <- ops <- tuning, and ops know nothing of each other"
CIRCLES = "no circles, among rooms and among the modules of a room"


@pytest.fixture
def copy_of_the_sources(tmp_path: Path) -> Path:
    for name in ("mgpu_ops", "core", "tuning"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"
    return run_python(code, cwd=root)


def test_imports_keep_the_contracts(copy_of_the_sources):
    result = lint_imports(copy_of_the_sources)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "statement", "contract"),
    [
        ("core/gpu.py", "import mgpu_ops.matmul", DIRECTION),
        ("core/gpu.py", "from mgpu_ops.registry import spec", DIRECTION),
        ("mgpu_ops/registry/spec.py", "import mgpu_ops", "only the tuner imports the top of the package"),
        ("mgpu_ops/registry/spec.py", "import mgpu_ops.matmul", DIRECTION),
        ("mgpu_ops/matmul/model.py", "import mgpu_ops.tuning", DIRECTION),
        ("mgpu_ops/matmul/model.py", "from mgpu_ops.grouped import sizes", DIRECTION),
        ("mgpu_ops/matmul/problem.py", "from mgpu_ops.matmul import model", CIRCLES),
        ("tuning/measure.py", "from mgpu_ops.tuning import worker", CIRCLES),
        ("tuning/storage.py", "from mgpu_ops.tuning import search", "the rooms of the tuner"),
        (
            "mgpu_ops/__init__.py",
            "from mgpu_ops.tuning import worker",
            "importing mgpu_ops does not load the tuner",
        ),
        (
            "core/gpu.py",
            "def f():\n    import pandas.api",
            "only the tuner imports optuna, pandas, matplotlib and rich",
        ),
        (
            "mgpu_ops/matmul/planted.py",
            "import optuna",
            "only the tuner imports optuna, pandas, matplotlib and rich",
        ),
    ],
)
def test_an_import_against_the_direction_breaks_its_contract(copy_of_the_sources, file, statement, contract):
    for planted in ("mgpu_ops/matmul/planted.py", "tuning/cli/planted.py"):
        (copy_of_the_sources / planted).touch()
    with open(copy_of_the_sources / file, "a") as source:
        source.write(f"\n{statement}\n")
    result = lint_imports(copy_of_the_sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {f"{node.module}.{name.name}" for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}


def test_only_core_kernels_and_competitors_import_what_jax_calls_experimental():
    """Where JAX moves such names, core/jax_names.py follows for the ops. Modules that write kernels import Pallas."""
    for path in [*(ROOT / "mgpu_ops").rglob("*.py"), *(ROOT / "tuning").rglob("*.py")]:
        experimental = {name for name in imports_of(path) if name.startswith("jax.experimental")}
        kernel = any(name.startswith("jax.experimental.pallas") for name in experimental)
        assert not experimental or kernel or ROOT / "core" in path.resolve().parents, path


def test_the_tuner_may_import_its_libraries(copy_of_the_sources):
    (copy_of_the_sources / "tuning/cli/planted.py").write_text(
        "import matplotlib.pyplot\nimport optuna\nimport pandas\nimport rich.table\n"
    )
    result = lint_imports(copy_of_the_sources)
    assert result.returncode == 0, result.stdout


def test_extras_hold_the_cuda_plugin_to_the_version_of_jax():
    """A plugin of another version than jaxlib does not load: only jax's own extras may name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (name for name in project["dependencies"] if name.startswith("jax>"))
    bounds = pin.removeprefix("jax")
    assert f"jax[cuda13]{bounds}" in project["optional-dependencies"]["cuda13"]
    assert f"jax[cuda13-local]{bounds}" in project["optional-dependencies"]["aot"]
    everything = str(project["dependencies"]) + str(project["optional-dependencies"])
    assert "jax-cuda" not in everything


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/*.py")), ids=lambda path: path.stem)
def test_a_script_says_how_it_finds_what_it_imports_of_the_others(path: Path) -> None:
    """As a file it finds none of them: with `python -m` it does, from the checkout's folder."""
    tree = ast.parse(path.read_text())
    of_others = any(isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scripts") for node in ast.walk(tree))
    said = ast.get_docstring(tree) or ""
    assert f"python {'scripts/' + path.name if of_others else '-m scripts.' + path.stem}" not in said
