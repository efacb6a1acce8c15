"""`import mgpu_ops`: what it offers, what it costs, and that the names come when they are first used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import api
from mgpu_ops.core import version

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_offers_what_its_api_does() -> None:
    assert mgpu_ops.__all__ == api.__all__
    assert all(getattr(mgpu_ops, name) is getattr(api, name) for name in api.__all__)
    assert set(api.__all__) <= set(dir(mgpu_ops))


def test_an_op_is_imported_without_the_others() -> None:
    assert python("import sys, mgpu_ops; mgpu_ops.flash_attention; print('mgpu_ops.grouped' in sys.modules)") == "False\n"


def test_the_version_is_asked_for_when_it_is_used() -> None:
    assert mgpu_ops.__version__ == version.version_of(Path(mgpu_ops.__path__[0]).parent)


def checkout(folder: Path, name: str = "mgpu-ops") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[project]\nname = {name!r}\n")
    return folder


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def test_a_checkout_has_the_version_of_its_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout(tmp_path / "here")
    git(root, "init")
    commit = ("commit", "--allow-empty", "-m", "x")
    git(root, *commit)
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
        assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]{9}", version.version_of(root))
    git(root, "tag", "v0.1.0")
    git(root, "tag", "2026-01-01")
    assert version.version_of(root) == "0.1.0"
    git(root, *commit)
    git(root, *commit)
    assert re.fullmatch(r"0\.1\.1\.dev2\+g[0-9a-f]{9}", version.version_of(root))


def test_an_unpacked_sdist_has_the_version_that_it_was_built_with(tmp_path: Path) -> None:
    (checkout(tmp_path) / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: mgpu-ops\nVersion: 1.2.3\n\n# mgpu_ops\n")
    assert version.version_of(tmp_path) == "1.2.3"


@pytest.mark.parametrize(
    "beside", [None, "", "not toml", "[project]\nname = 'other'\nversion = '9'"], ids=["none", "empty", "garbage", "another's"]
)
def test_the_version_of_an_installed_package_is_its_metadatas(
    beside: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init")  # a virtual environment may lie in somebody's repository
    if beside is not None:
        (tmp_path / "pyproject.toml").write_text(beside)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"mgpu-ops": "1.2.3"}[name])
    assert version.version_of(tmp_path) == "1.2.3"


def test_what_does_not_need_jax_does_not_import_it() -> None:
    code = """
import sys
import mgpu_ops
mgpu_ops.__version__, dir(mgpu_ops), mgpu_ops.__all__, hasattr(mgpu_ops, "nothing"), hasattr(mgpu_ops, "__wrapped__")
from mgpu_ops import models
assert not {"jax", "numpy"} & sys.modules.keys()
"""
    python(code)


MODULES = {
    "matmul": "matmul",
    "gated_matmul": "matmul.gated",
    "gated_mlp": "matmul.gated.layer",
    "quantized_matmul": "matmul.quantized",
    "quantized_grouped_matmul": "quantized_grouped",
    "quantized_moe": "quantized_moe",
    "grouped_matmul": "grouped.grouped_matmul",
    "gated_grouped_matmul": "grouped.gated",
    "ragged_contraction": "grouped.ragged_contraction",
    "flash_attention": "attention.flash_attention",
    "cross_entropy": "cross_entropy",
    "rms_norm": "rms_norm",
    "dot_product_attention": "attention.dot_product_attention",
    "rotary_into_cache": "rotary.into_cache",
    "gated_activation": "matmul.gated.activation",
}


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_an_op_is_the_function_whatever_of_its_module_was_imported_first(name: str, module: str) -> None:
    """Its module has its name: importing that binds the module in the package."""
    python(f"""
import mgpu_ops.{module}, mgpu_ops.grouped.sizes, sys
assert mgpu_ops.{name} is sys.modules["mgpu_ops.{module}"].{name}
assert callable(mgpu_ops.matmul)
""")


def test_names_come_by_star_by_help_by_pickle_and_by_submodule() -> None:
    code = """
import pickle, pydoc
import mgpu_ops
text = pydoc.render_doc(mgpu_ops)
from mgpu_ops import *
assert callable(matmul) and callable(explain) and pickle.loads(pickle.dumps(matmul)) is matmul
assert pickle.loads(pickle.dumps(MatmulProblem(64, 64, 64))) == MatmulProblem(64, 64, 64)
assert "autotune(" in text and "mgpu_ops" in text
import mgpu_ops.core.engine
assert mgpu_ops.core.engine.wgmma
"""
    python(code)


def test_a_name_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="module 'mgpu_ops' has no attribute 'matmull'"):
        mgpu_ops.matmull  # noqa: B018


# --- explain


SIDES = {"m": 4096, "n": 4096, "k": 4096}


@pytest.mark.parametrize(
    ("op", "problem", "message"),
    [
        *(
            ("matmul", SIDES | {"m": value}, re.escape(f"m={value!r} of Problem must be of type int"))
            for value in ("4096", 4096.0, None, True, [4096])
        ),
        ("matmul", SIDES | {"m": -4}, "m=-4 of Problem must be at least 0"),
        ("matmul", SIDES | {"dtype": 5}, "dtype=5 of Problem must be of type str"),
        ("matmul", None, "None is no matmul problem: give its fields as a mapping, or a Problem"),
        ("matmul", SIDES | {5: 1}, "matmul problems have no 5: the fields are activation, algorithm, b_dtype, "),
        (
            "grouped_matmul",
            mgpu_ops.MatmulProblem(64, 64, 64),
            r"Problem\(m=64, .* is no grouped_matmul problem: give its fields",
        ),
        ("grouped_matmul", SIDES | {"groups": 8, "bias": "yes"}, "bias='yes' of Problem must be of type bool"),
        (
            "flash_attention",
            {"window_left": -2},
            r"\{'window_left': -2\} is no flash_attention problem: it needs batch, q_tokens, .*head_dim too",
        ),
        ([], SIDES, r"op \[\] is not one of matmul, "),
        ("moe", SIDES, "op 'moe' is not one of matmul, .*; `mgpu-tune capture` lists those that a function runs"),
    ],
)
def test_explain_says_in_one_sentence_what_is_no_problem(op: Any, problem: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        mgpu_ops.explain(op, problem, gpu="h200")


def test_explain_says_why_no_kernel_runs_a_problem() -> None:
    text = mgpu_ops.explain("matmul", {"m": 3, "n": 5, "k": 7}, gpu="h200")
    assert "runs      XLA: k=7 needs 16-byte rows" in text


def test_explain_takes_the_whole_numbers_of_numpy() -> None:
    wanted = mgpu_ops.explain("matmul", SIDES, gpu="h200")
    assert mgpu_ops.explain("matmul", {side: np.int64(4096) for side in SIDES}, gpu="h200") == wanted
    assert mgpu_ops.explain("matmul", mgpu_ops.MatmulProblem(4096, 4096, 4096), gpu="h200") == wanted


def test_explain_of_a_gpu_that_is_no_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match="gpu=200 is not a GPU in the table: name one of h100-sxm"):
        mgpu_ops.explain("matmul", SIDES, gpu=200)
