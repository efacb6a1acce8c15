"""docs/kernels/flash_attention_support.md says where calls run, and is what the code says now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/kernels/flash_attention_support.md"


def test_the_page_is_what_the_code_does():
    """In a process of its own, as the script takes the place of the kernels."""
    script, env = ROOT / "scripts/flash_attention_support.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, script, "--check"], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run {script.relative_to(ROOT)}:\n{result.stdout}{result.stderr}"


ROWS = {  # written by hand, so that the script is not its own witness
    "NVIDIA H200": "kernel | kernel |",
    "NVIDIA H800": "kernel | kernel |",
    "NVIDIA B200": "XLA | XLA | NVIDIA B200 is not a Hopper GPU.*",
    "NVIDIA A100-SXM4-80GB": "XLA | XLA | .*",
    "cpu": "XLA | XLA | .*",
    "head_dim 112": "kernel | kernel |",
    "head_dim 512": "XLA | XLA | head_dim=512 is more than 256.*",
    "`soft_cap`, `bias`": "kernel | XLA | the gradient of a bias beside soft_cap is not in the kernel.*",
    "`jax.vmap`": "kernel | kernel |",
    "`return_residual`": "`flash_attention` | kernel | kernel |",
    "`implementation='cudnn'`": "JAX's own |  |  | implementation='cudnn' asks for JAX's own",
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_holds_what_users_ask(row):
    wanted = ROWS[row].replace("|", r"\|")
    assert re.search(rf"^\| {re.escape(row)} \| {wanted}", PAGE.read_text(), re.MULTILINE)
