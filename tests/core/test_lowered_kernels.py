"""A kernel is lowered once, and the same one is found again, in JAX's persistent compilation cache as in our own: no other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src import compilation_cache, config
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import mgpu_ops
from mgpu_ops.core import engine, lowered_kernels
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import target

H100 = gpus.find("h100-sxm")

A = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
B = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our own cache, in a folder that does not exist yet."""
    folder = tmp_path / "own"
    monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", str(folder))
    return folder


@pytest.fixture
def jaxs(own: Path, tmp_path: Path) -> Iterator[Path]:
    """JAX's persistent cache, in a folder of its own beside ours."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jaxs"))
    yield tmp_path / "jaxs"
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(params=["own", "jaxs"])
def cache(request: pytest.FixtureRequest) -> Path:
    """Either."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that have been lowered."""
    found: list[str] = []
    lower = lowering.lower_unpipelined_jaxpr_to_module

    def counted(mesh: Any, jax_mesh: Any, jaxpr: Any, *args: Any, **options: Any) -> Any:
        found.append(jaxpr.debug_info.func_name)
        return lower(mesh, jax_mesh, jaxpr, *args, **options)

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", counted)
    return found


def text(function: Any, *shapes: Any) -> str:
    """A program with the kernels of a function, which is new to JAX."""
    with target("h100-sxm"):
        return str(jax.jit(lambda *x: function(*x)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())


product = functools.partial(mgpu_ops.matmul, backend="mosaic")


def forget() -> None:
    """Kernels are traced again, as in another process."""
    jax.clear_caches()


def test_a_kernel_that_the_cache_has_is_not_lowered_again(cache, lowerings):
    first = text(product, A, B)
    forget()
    assert text(product, A, B) == first
    assert lowerings == ["mgpu_ops_matmul"]


def test_a_kernel_of_another_folder_is_lowered_again_unless_its_text_names_none(cache, lowerings, monkeypatch, tmp_path):
    text(product, A, B)
    roots = lowered_kernels._roots()
    monkeypatch.setattr(lowered_kernels, "_roots", lambda: (roots[0], tmp_path))
    forget()
    text(product, A, B)
    assert len(lowerings) == 2
    with _canonical():
        forget()
        text(product, A, B)
        monkeypatch.setattr(lowered_kernels, "_roots", lambda: roots)
        forget()
        text(product, A, B)
    assert len(lowerings) == 3


@contextlib.contextmanager
def _canonical():
    before = jax.config.jax_hlo_source_file_canonicalization_regex
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")
    try:
        yield
    finally:
        jax.config.update("jax_hlo_source_file_canonicalization_regex", before)


@pytest.mark.gpu
def test_a_kernel_that_was_not_lowered_computes_the_same(cache, lowerings):
    def step(a: jax.Array, b: jax.Array, q: jax.Array) -> Any:
        loss = lambda q: mgpu_ops.flash_attention(q, q, q, deterministic=True, backend="mosaic").astype(jnp.float32).sum()  # noqa: E731
        return product(a, b), jax.grad(loss)(q)

    shapes = A, B, jax.ShapeDtypeStruct((2, 300, 2, 128), jnp.bfloat16)
    arrays = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(shapes)]
    first = jax.jit(step)(*arrays)
    lowered = len(lowerings)
    for file in cache.iterdir():
        if not file.name.startswith(lowered_kernels._FORMAT):  # a program that XLA has compiled
            file.unlink()
    forget()
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(*arrays), first)
    assert len(lowerings) == lowered > 0


@pytest.mark.parametrize("setting", ["off", "0", "jax"])
def test_with_the_caches_off_kernels_are_lowered_as_ever(jaxs, own, lowerings, monkeypatch, setting):
    """With ours off JAX's has no kernels of ours either, and with JAX's off ours has none."""
    if setting != "jax":
        monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", setting)
    with config.enable_compilation_cache(setting != "jax"):
        lowered_twice(lowerings)
    assert not [*own.parent.glob("*/*"), *own.parent.glob("own")]


def lowered_twice(lowerings: list[str]) -> None:
    first = text(product, A, B)
    forget()
    assert text(product, A, B) == first
    assert lowerings == ["mgpu_ops_matmul"] * 2


def test_jaxs_cache_has_precedence(jaxs, own):
    text(product, A, B)
    assert len(list(jaxs.iterdir())) == 1
    assert not own.exists()


def test_another_ptxas_or_setting_of_jax_is_another_kernel(own, lowerings, monkeypatch):
    text(product, A, B)
    with pl.enable_debug_checks():
        text(product, A, B)
    monkeypatch.setattr(lowered_kernels.ptxas, "isa", lambda: 90)
    text(product, A, B)
    assert len(lowerings) == len(list(own.iterdir())) == 3


def test_another_config_shape_or_version_is_another_kernel(cache, lowerings, monkeypatch):
    text(product, A, B)
    with target("h100-sxm"):
        other = mgpu_ops.spec_of("matmul").candidates(mgpu_ops.spec_of("matmul").Problem(m=128, n=512, k=256), H100)[1]
    text(functools.partial(product, config=other), A, B)
    text(product, jax.ShapeDtypeStruct((192, 256), jnp.bfloat16), B)
    monkeypatch.setattr(lowered_kernels, "_versions", lambda: ("0",))
    forget()
    text(product, A, B)
    assert len(lowerings) == len(list(cache.iterdir())) == 4


def columns(x: Any, whole: int, some: int) -> Any:
    """A kernel whose jaxpr differs in nothing but what a function in it closes over."""

    def body(x_ref: Any, out_ref: Any) -> None:
        engine.narrow_wgmma(whole, some)
        out_ref[...] = x_ref[...]

    launch = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=1)
    return engine.kernel(body, launch, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types={})(x)


def test_what_a_function_in_a_kernel_closes_over_is_part_of_its_key(cache, lowerings):
    for some in (8, 16, 8):
        text(functools.partial(columns, whole=64, some=some), jax.ShapeDtypeStruct((128,), jnp.float32))
    assert len(lowerings) == len(list(cache.iterdir())) == 2


def foreign(x: Any) -> Any:
    """A kernel with a function that this library does not have: what it reads is not known."""

    def body(x_ref: Any, out_ref: Any) -> None:
        plgpu.inline_mgpu()(lambda _: None)()
        out_ref[...] = x_ref[...]

    launch = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=1)
    return engine.kernel(body, launch, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types={})(x)


def test_a_kernel_with_what_is_not_known_is_not_kept(cache, lowerings):
    for _ in range(2):
        text(foreign, jax.ShapeDtypeStruct((128,), jnp.float32))
    assert len(lowerings) == 2
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("damage", [lambda kept: kept[: len(kept) // 2], lambda kept: b"", lambda kept: b"x" + kept[1:]])
def test_a_damaged_entry_is_as_good_as_missing(cache, lowerings, damage):
    first = text(product, A, B)
    (file,) = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):  # it is kept again
        forget()
        assert text(product, A, B) == first
    assert len(lowerings) == 2


def test_with_sources_that_changed_while_the_process_ran_nothing_is_kept(cache, lowerings, monkeypatch):
    """They are not what lowers its kernels."""
    monkeypatch.setattr(lowered_kernels, "_STARTED", 0)
    lowered_kernels._versions.cache_clear()
    try:
        text(product, A, B)
    finally:
        lowered_kernels._versions.cache_clear()
    assert not list(cache.glob("*"))


def test_a_kernel_with_an_array_on_a_device_is_not_kept():
    """`repr` would show no difference between these."""
    for array in (jnp.arange(5000), jnp.arange(5000).at[2500].set(0)):
        with pytest.raises(lowered_kernels._UnknownError):
            lowered_kernels._Words().value(array)


def test_jaxs_cache_that_cannot_be_written_or_read_stops_nothing(jaxs, lowerings, monkeypatch, caplog):
    def fail(*_: Any) -> Any:
        raise PermissionError("no")

    first = text(product, A, B)
    for name in ("get", "put"):
        monkeypatch.setattr(compilation_cache.LRUCache, name, fail)
    forget()
    assert text(product, A, B) == first
    assert len(lowerings) == 2
    assert "cannot be read: no" in caplog.text
    assert "cannot be written: no" in caplog.text


def test_an_exported_program_is_lowered_for_older_versions_of_jax(cache, lowerings):
    text(product, A, B)
    forget()
    with target("h100-sxm"):
        export.export(jax.jit(product), platforms=["cuda"])(A, B)
    assert len(lowerings) == 2
