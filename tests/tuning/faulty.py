"""An op whose configs go wrong in every way that the tuner must survive: kernels for a real GPU, for tests alone.

out = x + 1 in float32, a row of 128 a block. A config names its fault.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.registry.spec import OpSpec

FAR = 2**31 - 128  # a row 1 TiB behind the array
COLUMNS = 128  # one element a thread


@dataclasses.dataclass(frozen=True)
class Problem:
    rows: int


@dataclasses.dataclass(frozen=True)
class Config:
    fault: str


FAULTS = ("none", "again", "wrong", "nan", "varies", "overwrites", "memory", "illegal", "hang", "slow compile")
_ROW = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)


def _kernel(fault: str, x: Any, rows: Any, out: Any, *huge: Any, never: Any) -> None:
    row = lax.axis_index("block")
    y = plgpu.load(x, (row,), layout=_ROW) + 1.0
    if fault == "wrong":
        y = y + 1.0
    elif fault == "nan":
        y = y * jnp.nan
    elif fault == "varies":  # by less than the tolerance
        y = y + _clock().astype(jnp.float32) * 1e-9
    elif fault == "overwrites":
        x[row] = y
    elif fault == "illegal":
        out[rows[1]] = y
    elif fault == "hang":
        plgpu.barrier_wait(never)  # nobody arrives
    elif fault == "slow compile":
        for _ in range(2000):
            y = jnp.sqrt(y * y + 1.0) - y / (y + 2.0)
    elif fault == "memory":
        huge[0][row] = y
    out[row] = y


@plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((COLUMNS,), jnp.int32, layout=_ROW))
def _clock(ctx: Any) -> Any:
    """Nanoseconds, modulo 4096, in every element."""
    i32 = ir.IntegerType.get_signless(32)
    asm = "{ .reg .u32 t; mov.u32 t, %globaltimer_lo; and.b32 $0, t, 4095; }"
    time = llvm.inline_asm(i32, [], asm, "=r", has_side_effects=True)
    layout = mgpu.WGStridedFragLayout(shape=(COLUMNS,), vec_size=1)
    return mgpu.FragmentedArray.splat(time, (COLUMNS,), layout, is_signed=True)


def run(problem: Problem, config: Config, gpu: Any, x: Any, rows: Any, interpret: bool = False) -> Any:
    out_type: Any = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if config.fault == "memory":
        out_type.append(jax.ShapeDtypeStruct((2**30, COLUMNS), x.dtype))  # 512 GiB
    return engine.kernel(
        functools.partial(_kernel, config.fault),
        engine.Launch("faulty_" + config.fault.replace(" ", "_"), {"block": problem.rows}, warpgroups=1, interpret=interpret),
        out_type=out_type,
        scratch_types={"never": plgpu.Barrier(num_arrivals=1)},
    )(x, rows)[0]


def reference(problem: Problem, x: Any, rows: Any) -> Any:
    return x + 1.0


def inputs(problem: Problem, key: Any) -> tuple[Any, Any]:
    return jax.random.normal(key, (problem.rows, COLUMNS)), jnp.array([0, FAR], jnp.int32)


SPEC = OpSpec(
    name="faulty",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes={"faulty-4096": Problem(4096)},
    suites={},
    space=lambda problem, gpu: {"fault": FAULTS},
    supports=lambda problem, gpu: None,
    check=lambda problem, config, gpu: None,
    candidates=lambda problem, gpu: [Config("none")],
    default=lambda problem, gpu: Config("none"),
    cost=lambda problem, config, gpu: 1e-6,
    distance=lambda a, b: abs(math.log2(a.rows / b.rows)),
    flops=lambda problem: problem.rows * COLUMNS,
    bytes=lambda problem: 8 * problem.rows * COLUMNS,
    inputs=inputs,
    run=run,
    reference=reference,
    tolerance=lambda problem: 1e-3,
)


def spec_of(op: str) -> OpSpec:
    """In place of `mgpu_ops.spec_of`, for the processes of the tuner."""
    assert op == SPEC.name
    return SPEC
