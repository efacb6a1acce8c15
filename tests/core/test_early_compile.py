"""A program whose kernels are lowered last, and which compiles meanwhile: what is lowered, when, and that it is the same."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import xla_metadata

import mgpu_ops
from mgpu_ops.core import aot, early_compile, parallel_compile

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
X, W = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(2):
        x = mgpu_ops.rms_norm(x, w, backend="mosaic")
        x = mgpu_ops.matmul(x, x, transpose_b=True, backend="mosaic")
        x = jnp.concatenate([x, x], axis=1)
    x = jnp.dot(x, x.T)  # XLA's, which it autotunes
    return jnp.sum(x.astype(jnp.float32) ** 2)


def lowered(function: Any, *shapes: Any) -> Any:
    """For a GPU that is described, new to JAX."""
    context, place = aot.elsewhere("h100-sxm")
    with context:
        return jax.jit(lambda *x: function(*x)).lower(*place(shapes))


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jaxprs of the kernels that are lowered."""
    found: list[Any] = []
    lower = lowering.lower_unpipelined_jaxpr_to_module

    def counted(mesh: Any, jax_mesh: Any, jaxpr: Any, *args: Any, **options: Any) -> Any:
        found.append(jaxpr)
        return lower(mesh, jax_mesh, jaxpr, *args, **options)

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", counted)
    return found


@needs_compiler
def test_a_program_has_the_same_text_as_if_its_kernels_were_lowered_in_order(monkeypatch):
    def step(x: jax.Array, w: jax.Array) -> Any:
        with xla_metadata.set_xla_metadata(of="a step"):
            return jax.grad(loss)(x, w)

    texts = []
    for has_one in (early_compile._has_one_gpu, lambda ctx: False):
        monkeypatch.setattr(early_compile, "_has_one_gpu", has_one)
        texts.append(lowered(step, X, W).as_text(debug_info=True))
    last, in_order = texts
    assert "mosaic_gpu_v2" in last
    assert 'of = "a step"' in last
    assert last == in_order


@needs_compiler
def test_kernels_that_are_equal_are_lowered_once_and_the_largest_first(lowerings):
    """Arrays that are placed on a device and those that kernels make are traced apart: so is the norm."""
    text = lowered(jax.grad(loss), X, W).as_text()
    hashes = re.findall(r'kernel_hash = "([^"]*)"', text)
    assert len(set(hashes)) == len(lowerings) < len(hashes)
    sizes = [early_compile._size(jaxpr) for jaxpr in lowerings]
    assert sizes == sorted(sizes, reverse=True)


@needs_compiler
@pytest.mark.parametrize("autotuned", [True, False])
def test_a_program_with_products_of_xlas_compiles_while_its_kernels_are_lowered(monkeypatch, lowerings, autotuned):
    compiled: list[tuple[str, int]] = []  # what is compiled, and how many kernels were lowered before
    compile_program, submit = parallel_compile._compile, parallel_compile.Threads.compile

    def note(backend: Any, module: Any, *args: Any) -> Any:
        text = str(module)
        kind = "draft" if "mgpu_ops_draft" in text else "kernel" if "@mgpu_ops_kernel" in text else "program"
        compiled.append((kind, len(lowerings)))
        return compile_program(backend, module, *args)

    def at_once(self: Any, program: bytes) -> Any:
        future = submit(self, program)
        assert isinstance(future.exception(), Exception) == (not compiled[1:])  # of the draft alone
        return future

    def norms(x: jax.Array, w: jax.Array) -> jax.Array:
        norm = mgpu_ops.rms_norm(x, w, backend="mosaic")
        return jnp.einsum("mk,mk->m", norm, x).sum()  # no product of matrices

    monkeypatch.setattr(parallel_compile, "_compile", note)
    monkeypatch.setattr(parallel_compile, "drafts", lambda: True)
    monkeypatch.setattr(early_compile, "_runs_here", lambda device: True)
    if autotuned:
        monkeypatch.setattr(parallel_compile.Threads, "compile", at_once)
    program = lowered(jax.grad(loss if autotuned else norms), X, W)
    count = len(lowerings)
    early = [("draft", 0), *(("kernel", number + 1) for number in range(count))] if autotuned else []
    assert compiled == early
    program.compile()
    late = {kind for kind, _ in compiled[len(early) :]}
    assert late - (set() if autotuned else {"kernel"}) == {"program"}


@needs_compiler
def test_a_kernel_that_cannot_be_lowered_leaves_nothing_behind(monkeypatch):
    context, place = aot.elsewhere("h100-sxm")
    lower = lowering.lower_unpipelined_jaxpr_to_module
    with context:
        traced = jax.jit(functools.partial(loss)).trace(*place((X, W)))
        monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            traced.lower()
        monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", lower)
        text = traced.lower().as_text()
    assert "mosaic_gpu_v2" in text
    assert "mgpu_ops_draft" not in text
