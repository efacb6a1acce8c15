"""What the docstrings of public ops show: their parts are in one order, and their examples run."""

from __future__ import annotations

import doctest
import re

import jax
import jax.numpy as jnp
import pytest

import mgpu_ops

EXAMPLES = [name for name in mgpu_ops.__all__ if ">>>" in (getattr(mgpu_ops, name).__doc__ or "")]
PARTS = ["Args", "Returns", "Raises", "Example", "Source"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_says(name: str) -> None:
    names = {"jax": jax, "jnp": jnp, "mgpu_ops": mgpu_ops}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(mgpu_ops, name), name, globs=names)
    assert doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(example).failed == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_parts_of_a_docstring_are_in_one_order(name: str) -> None:
    found = re.findall(rf"^ *({'|'.join(PARTS)}):", getattr(mgpu_ops, name).__doc__, re.MULTILINE)
    assert found == [part for part in PARTS if part in found]
    assert {"Args", "Returns", "Raises", "Example"} <= {*found}


def test_products_attention_layers_of_experts_and_rotations_have_examples() -> None:
    assert {"matmul", "grouped_matmul", "flash_attention"} <= {*EXAMPLES}
    assert {name for name in mgpu_ops.__all__ if re.match(r"(fp8_|rotary_|moe|quantized_moe)", name)} <= {*EXAMPLES}
