"""Versions of ptxas that miscompile are named, once, to those whose kernels they may hit."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import aot, engine, ptxas


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What was logged, in a process that has a ptxas of CUDA 13.0 and has traced no kernel yet."""
    monkeypatch.setattr(ptxas, "isa", lambda: 90)
    ptxas.warn_of_register_operands.cache_clear()
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        yield lambda: [record.getMessage() for record in caplog.records]
    ptxas.warn_of_register_operands.cache_clear()


@pytest.mark.parametrize(("isa", "name"), [(80, "8.0"), (88, "8.8"), (90, "9.0"), (92, "9.2")])
def test_a_ptxas_before_cuda_13_3_is_named_with_the_way_out(isa, name):
    reason = ptxas.register_operand_bug(isa)
    assert f"PTX ISA {name}," in reason
    assert "nvidia-cuda-nvcc" in reason


@pytest.mark.parametrize("isa", [93, 95, 100])
def test_a_ptxas_from_cuda_13_3_on_is_fine(isa):
    assert ptxas.register_operand_bug(isa) is None


def trace(*, registers: bool) -> None:
    """A kernel with one wgmma, whose first operand comes from registers or from shared memory."""

    def body(out_ref: Any, *, a: Any, acc: Any) -> None:
        def multiply(acc: Any) -> None:
            engine.wgmma(acc, jnp.zeros((64, 64), jnp.bfloat16) if registers else a, a)
            out_ref[...] = acc[...]

        acc.scope(multiply)

    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=engine.operand_transforms(64, jnp.bfloat16))
    launch = engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=1),
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types={"a": tile, "acc": engine.Accumulators(((64, 64),), 1)},
    )
    jax.eval_shape(launch)


def test_kernels_with_operands_in_registers_warn_once(said):
    for _ in range(2):
        trace(registers=True)
    assert said() == [ptxas.register_operand_bug(90)]


def test_kernels_with_operands_in_shared_memory_do_not_warn(said):
    trace(registers=False)
    assert said() == []


@pytest.mark.parametrize("isa", [93, None])
def test_a_fixed_ptxas_and_none_at_all_do_not_warn(said, monkeypatch, isa):
    monkeypatch.setattr(ptxas, "isa", lambda: isa)
    trace(registers=True)
    assert said() == []


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_mosaics_ptxas_is_asked():
    assert ptxas.isa() >= 80


# --- which one Mosaic compiles with


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., dict[str, Path]]]:
    """Makes a machine with a ptxas of these versions in folders of PATH, in the wheel and in CUDA_ROOT; returns where they are.

    The process has not compiled with Mosaic yet.
    """
    monkeypatch.delenv("CUDA_ROOT", raising=False)

    def make(path: tuple[str, ...] = (), wheel: str = "", root: str = "") -> dict[str, Path]:
        at: dict[str, Path] = {}
        for name, version in [*((f"path{i}", v) for i, v in enumerate(path)), ("wheel", wheel), ("root", root)]:
            if version:
                at[name] = tmp_path / name / "bin" / "ptxas"
                at[name].parent.mkdir(parents=True)
                words = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}" if version != "?" else "?"
                at[name].write_text(f'#!/bin/sh\necho "{words}"\n')
                at[name].chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join(str(at[f"path{i}"].parent) for i in range(len(path))))
        monkeypatch.setattr(ptxas, "_in_wheel", lambda: iter([at["wheel"]] if wheel else []))
        if root:
            monkeypatch.setenv("CUDA_ROOT", str(at["root"].parent.parent))
        return at

    ptxas.prefer_newest.cache_clear()
    yield make
    ptxas.prefer_newest.cache_clear()


@pytest.mark.parametrize(
    ("versions", "best"),
    [
        ({"path": ("13.0.88",), "wheel": "13.5.37"}, "wheel"),
        ({"path": ("13.5.37",), "wheel": "13.0.88"}, "path0"),
        ({"path": ("13.0.88", "13.10.2"), "wheel": "13.9.1"}, "path1"),  # numbers, not letters
        ({"path": ("13.5.37", "13.5.37"), "wheel": "13.5.37"}, "path0"),
        ({"path": ("?",), "wheel": "12.9.1"}, "wheel"),  # one that does not say
        ({"wheel": "13.5.37"}, "wheel"),
        ({"path": ("13.5.37",), "wheel": "13.5.37", "root": "12.9.1"}, "root"),
    ],
)
def test_mosaic_gets_the_newest_there_is_unless_cuda_root_names_one(machine, versions, best):
    at = machine(**versions)
    found = ptxas.prefer_newest()
    assert found is not None
    assert found.path == at[best]
    assert Path(str(shutil.which("ptxas"))).resolve() == at[best]


def test_what_is_first_in_path_and_newest_is_left_there(machine):
    machine(path=("13.5.37", "13.0.88"))
    before = os.environ["PATH"]
    ptxas.prefer_newest()
    assert os.environ["PATH"] == before


def test_the_user_may_name_one_or_keep_the_order_of_path(machine, monkeypatch):
    at = machine(path=("13.0.88", "13.2.1"), wheel="13.5.37", root="12.9.1")
    monkeypatch.setenv("MGPU_OPS_PTXAS", str(at["path1"]))
    assert ptxas.chosen().path == at["path1"]
    monkeypatch.setenv("MGPU_OPS_PTXAS", "path")
    assert ptxas.chosen().path == at["path0"]


def test_a_named_one_that_cannot_run_is_refused_with_the_way_out(machine, monkeypatch, tmp_path):
    machine(wheel="13.5.37")
    monkeypatch.setenv("MGPU_OPS_PTXAS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r'MGPU_OPS_PTXAS=.*none\' is no executable file: name a ptxas, or "path"'):
        ptxas.chosen()


def test_a_machine_without_one_is_left_alone(machine):
    machine()
    assert ptxas.prefer_newest() is None
    assert os.environ["PATH"] == ""


def test_which_one_is_used_is_said_once(machine, caplog):
    at = machine(path=("13.0.88",), wheel="13.5.37")
    with caplog.at_level(logging.INFO, "mgpu_ops"):
        for _ in range(2):
            trace(registers=False)
    said = [record.getMessage() for record in caplog.records if "compiles with" in record.getMessage()]
    assert said == [f"Mosaic GPU compiles with ptxas 13.5.37 ({at['wheel']}, in the nvidia-cuda-nvcc wheel)"]


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_mosaic_compiles_with_the_one_that_is_preferred(machine, tmp_path):
    """In a process of its own, as Mosaic keeps to the first it finds. Its own ptxas notes who asked it to compile."""
    real, log = ptxas.chosen().path, tmp_path / "log"
    at = machine(path=("13.0.88",))
    newest = tmp_path / "newest" / "bin" / "ptxas"
    newest.parent.mkdir(parents=True)
    for path, version in ((at["path0"], "13.0.88"), (newest, "99.1.1")):
        says = f'[ "$1" = --version ] && {{ echo "release {version[:4]}, V{version}"; exit; }}'
        path.write_text(f'#!/bin/sh\n{says}\necho {version} >> {log}\nexec {real} "$@"\n')
        path.chmod(0o755)
    search = os.pathsep.join([str(at["path0"].parent), str(newest.parent), "/usr/bin", "/bin"])
    code = "from mgpu_ops.core import aot; aot.build('h200', aot._nothing)"
    environment = os.environ | {"PATH": search, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert set(log.read_text().split()) == {"99.1.1"}
