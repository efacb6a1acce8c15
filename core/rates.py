"""Rates for the ops' models of time that no datasheet gives. Measured on an H200 (docs/kernels/matmul.md)."""

from __future__ import annotations

from mgpu_ops.core.gpu import Gpu

POWER = 0.83  # of the datasheet's dense rate is left under the power cap on random data
HBM = 0.88  # of the datasheet's bandwidth is reached
LOAD_BYTES_PER_CLOCK = 44  # what TMA brings an SM from L2
LOAD_LATENCY = 1.3e-6  # s from a TMA request to its data, under load
LAUNCH = 2.0e-6  # s of a kernel that does nothing


def load_bytes(gpu: Gpu) -> float:
    """Bytes per second that TMA brings an SM from L2."""
    return LOAD_BYTES_PER_CLOCK * gpu.clock_hz
