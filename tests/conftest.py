"""What every test runs under: a CPU as eight devices, a database of its own, no kept kernels, repeatable examples.

`MGPU_OPS_TEST_GPU=1`, set by `make test-gpu`, leaves JAX its GPUs and runs the `gpu` tests; `MGPU_OPS_TEST_ALL=1`, set by
`make test-all`, is read by tests/thorough.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

ON_GPU = os.environ.get("MGPU_OPS_TEST_GPU") == "1"

if not ON_GPU:  # JAX and NumPy read these when they are first imported, which is after this file
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most of the tests' time is XLA's, compiling small programs that run once.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {quick}"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # interpreted kernels multiply small tiles in threads of their own

# What the caller's shell says of mgpu_ops would change which config a test sees.
for name in [name for name in os.environ if name.startswith("MGPU_OPS_")]:
    if name not in ("MGPU_OPS_TEST_GPU", "MGPU_OPS_TEST_ALL"):
        del os.environ[name]
os.environ["MGPU_OPS_KERNEL_CACHE"] = "off"  # a test lowers what it lowers, and leaves nothing in the user's folder

# Which examples are tried, and whether they suffice, must not depend on how fast the machine is.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=250 if os.environ.get("MGPU_OPS_TEST_ALL") == "1" else 25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the user's config database: no test reads or writes the real one."""
    folder = tmp_path / "mgpu_ops_configs"
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(folder))
    monkeypatch.setenv("MGPU_OPS_STATE_DIR", str(tmp_path / "mgpu_ops_state"))
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    if not ON_GPU:
        pytest.skip("needs a Hopper GPU: run `make test-gpu` on a machine that has one")
    wanted = mark.kwargs.get("devices", mark.args[0] if mark.args else 1)
    found = hopper_gpus()
    if found < wanted:
        pytest.skip(f"needs {wanted} Hopper GPU(s); jax sees {found} on this machine")


def hopper_gpus() -> int:
    import jax

    return sum(getattr(d, "compute_capability", None) == "9.0" for d in jax.local_devices())
