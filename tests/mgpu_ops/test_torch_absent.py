"""What holds of `mgpu_ops.torch` whether torch is installed or not."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_ops

ROOT = Path(__file__).parents[2]
MODULE = ast.parse((ROOT / "mgpu_ops" / "torch.py").read_text())
FUNCTIONS = {node.name: node for node in MODULE.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
NOT_THERE = {  # what tensors' functions leave out
    *("config", "backward_config", "return_lse", "preferred_element_type"),
    *("precision", "scale_a", "scale_b", "scale_lhs", "scale_rhs", "group_offset", "row_scale", "row_indices", "page_table"),
    "rms_epsilon",
    "k_scale",
    "v_scale",
}


def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\ntry:\n    import mgpu_ops.torch\nexcept ImportError as e:\n    print(e)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mgpu_ops.torch needs torch: run `pip install torch`")


@pytest.mark.parametrize("name", ["matmul", "grouped_matmul", "flash_attention"])
def test_its_arguments_are_those_of_the_op(name: str) -> None:
    arguments = FUNCTIONS[name].args
    ours = {argument.arg: default for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    ops = inspect.signature(getattr(mgpu_ops, name)).parameters
    positional = [p.name for p in ops.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [argument.arg for argument in arguments.args] == positional
    assert {*positional, *ours} == {*ops} - NOT_THERE
    assert all(ops[key].default == ast.literal_eval(default) for key, default in ours.items() if default is not None)
    assert set(FUNCTIONS) == {"matmul", "grouped_matmul", "flash_attention"}
