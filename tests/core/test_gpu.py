from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from mgpu_ops.core import gpu
from mgpu_ops.core.gpu import GPUS, Gpu

names = st.sampled_from([name for g in GPUS for name in (g.key, *g.kinds)])
gpus = st.sampled_from(GPUS)


def device(kind: str, sms: int | None = 132, capability: str = "9.0") -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, core_count=sms, compute_capability=capability)


def abstract(kind: str, sms: int | None = 132, platform: str = "gpu") -> AbstractDevice:
    return AbstractDevice(device_kind=kind, num_cores=sms, platform=platform)


@given(names, st.data())
def test_a_gpu_is_found_by_key_or_kind_in_any_case(name, data):
    found = gpu.find("".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name))
    assert name in (found.key, *found.kinds)


def test_no_key_or_kind_names_two_gpus():
    every = [name for g in GPUS for name in (g.key, *g.kinds)]
    assert len({name.casefold() for name in every}) == len(every)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"gpu='a100'.*h200 \(NVIDIA H200\)"):
        gpu.find("a100")


@given(gpus)
def test_every_entry_is_a_possible_gpu(g):
    assert g.name == g.kinds[0]
    assert g.smem_per_block == 232448
    # One SM issues 4096 (Hopper) or 8192 (Blackwell) dense bf16 FLOPs a clock at the most.
    per_clock = {"hopper": 4096, "blackwell": 8192}[g.architecture]
    assert g.bf16_flops <= g.sms * per_clock * g.clock_hz
    assert 2e12 <= g.memory_bytes_per_s <= 8e12
    assert 80e9 <= g.memory_bytes <= 192e9
    assert g.source


def test_h100_sxm_and_h200_are_one_family_which_h20_is_not():
    assert "h200" in [g.key for g in gpu.family(gpu.find("h100-sxm"))]
    assert "h100-sxm" in [g.key for g in gpu.family(gpu.find("h200"))]
    assert gpu.family(gpu.find("h20")) == ()


@given(gpus)
def test_a_family_is_mutual_and_nearest_bandwidth_first(g):
    others = gpu.family(g)
    assert g not in others
    assert all(g in gpu.family(other) for other in others)
    gaps = [abs(other.memory_bytes_per_s - g.memory_bytes_per_s) for other in others]
    assert gaps == sorted(gaps)


@given(gpus, st.booleans())
def test_every_listed_kind_is_recognised_on_concrete_and_abstract_devices(g, concrete):
    make = device if concrete else abstract
    assert all(gpu.from_device(make(kind, g.sms)) == g for kind in g.kinds)


@pytest.mark.parametrize("make", [device, abstract])
def test_a_known_gpu_with_a_share_of_its_sms_has_no_more_blocks_than_that(make):
    found, whole = gpu.from_device(make("NVIDIA H200", 66)), gpu.find("h200")
    assert (found.key, found.sms, found.bf16_flops) == ("h200", 66, whole.bf16_flops / 2)


@pytest.mark.parametrize(
    ("kind", "sms", "like"),
    [
        ("NVIDIA H800", 132, "h100-sxm"),
        ("NVIDIA H20-3e", 78, "h20"),
        ("NVIDIA H200 MIG 1g.18gb", 16, "h200"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, "h100-sxm"),
    ],
)
@pytest.mark.parametrize("make", [device, abstract])
def test_an_unlisted_hopper_borrows_from_the_nearest_entry(make, kind, sms, like):
    found, near = gpu.from_device(make(kind, sms)), gpu.find(like)
    assert (found.name, found.sms, found.architecture) == (kind, sms, "hopper")
    assert found.memory_bytes_per_s == near.memory_bytes_per_s
    assert found.bf16_flops == pytest.approx(near.bf16_flops * sms / near.sms)
    assert near.name in found.source


def test_an_unlisted_gpu_has_a_key_that_is_a_folder_name():
    assert gpu.from_device(device("NVIDIA H800 SXM5/96GB")).key == "h800-sxm5-96gb"


@pytest.mark.parametrize(
    "other",
    [
        device("NVIDIA A100-SXM4-80GB", 108, "8.0"),
        device("AMD Instinct MI300X", 304, "gfx942"),
        abstract("NVIDIA A100-SXM4-80GB", 108),
        abstract("cpu", None, "cpu"),
    ],
    ids=lambda d: d.device_kind,
)
def test_what_is_no_known_gpu_is_none(other):
    assert gpu.from_device(other) is None


def test_a_cpu_is_no_gpu():
    with jax.default_device("cpu"):
        assert gpu.current() is None
    with jax.default_device(jax.devices("cpu")[0]):
        assert gpu.current() is None


def test_current_is_the_default_device(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device("NVIDIA H200")])
    assert gpu.current() == gpu.find("h200")


def test_current_is_the_device_of_the_mesh_in_use():
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract("NVIDIA H100 NVL"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert gpu.current() == gpu.find("h100-nvl")


def test_a_target_overrides_until_it_ends():
    with gpu.target("h20"):
        assert gpu.current() == gpu.find("h20")
        with gpu.target(gpu.find("h200")):
            assert gpu.current() == gpu.find("h200")
        with gpu.target(None), jax.default_device("cpu"):
            assert gpu.current() is None
        assert gpu.current() == gpu.find("h20")
    with pytest.raises(ValueError, match="a100"):
        gpu.target("a100")


@pytest.mark.parametrize("wrong", [3, ["h200"], jnp.float32])
def test_a_target_that_is_no_gpu_is_told_where_it_is_named(wrong):
    with pytest.raises(ValueError, match=r"^gpu=.* is not a GPU in the table: name one of h100-sxm"), gpu.target(wrong):
        pass


def test_a_jitted_function_is_traced_again_for_another_target():
    seen: list[Gpu | None] = []

    @jax.jit
    def f(x):
        seen.append(gpu.current())
        return x

    for key in ("h200", "h20", "h200"):
        with gpu.target(key):
            f(jnp.zeros(()))
    assert [g.key for g in seen] == ["h200", "h20"]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    path = tmp_path / "version"
    monkeypatch.setattr(gpu, "_DRIVER", path)
    gpu.driver_version.cache_clear()
    yield path
    gpu.driver_version.cache_clear()


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.161.08  Release Build",
    ],
)
def test_the_driver_version_is_read_from_the_kernel_module(driver, line):
    driver.write_text(line + "\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)\n")
    assert gpu.driver_version() == "535.161.08"


@pytest.mark.parametrize(("printed", "version"), [("580.82.07\n580.82.07\n", "580.82.07"), ("", None)])
def test_without_the_file_the_driver_version_is_asked_of_nvidia_smi(driver, monkeypatch, printed, version):
    monkeypatch.setattr(gpu, "_nvidia_smi", lambda: printed)
    assert gpu.driver_version() == version


def test_a_machine_without_nvidia_smi_has_no_driver(driver, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpu.driver_version() is None
