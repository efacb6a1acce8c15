"""What makes JAX lower kernels faster gives what JAX's own functions give."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import constraints, dialect_lowering, inference_utils, layout_inference, utils
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir, passmanager

import mgpu_ops
from mgpu_ops.core import engine, fast_lowering
from mgpu_ops.core.gpu import target

assert engine.kernel  # with all patches
X = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
VARIABLES = [constraints.Variable(name) for name in "abcdefgh"]  # type: ignore[arg-type]


def lower() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(mgpu_ops.flash_attention(x, x, x, causal=True, backend="mosaic").astype(jnp.float32))

    with target("h100-sxm"):
        jax.jit(jax.grad(loss)).trace(X).lower(lowering_platforms=("cuda",))


def system_of(rng: Any) -> Any:
    """Variables some of which are equal, and tiles that must divide numbers."""
    found: list[Any] = []
    for _ in range(12):
        one, other = rng.choice(8, 2, replace=False)
        if rng.random() < 0.5:
            found.append(constraints.Equals(VARIABLES[one], VARIABLES[other]))
        else:
            multiple = tuple(int(x) for x in rng.choice([1, 8, 12, 64, 96], rng.integers(1, 4)))
            found.append(constraints.Divides(VARIABLES[one], multiple))
    return constraints.ConstraintSystem(constraints=found)


@pytest.mark.parametrize("seed", range(20))
def test_divisibility_of_equal_variables_is_merged_as_jax_does(seed):
    system = system_of(np.random.default_rng(seed))
    merge: Any = constraints.saturate_divides_constraints_for_equal_vars
    ours, jaxs = merge(system).constraints, merge.__wrapped__(system).constraints
    assert set(ours) == set(jaxs)
    assert len(ours) == len(jaxs)


@pytest.mark.parametrize("seed", range(20))
def test_constraints_are_reduced_as_jax_does(seed, monkeypatch):
    """First without a value, then again with that of one variable more."""
    rng, reduce = np.random.default_rng(seed), constraints.reduce_constraint
    monkeypatch.setattr(constraints, "is_valid_assignment", lambda variable, layout: True)
    ours = jaxs = system_of(rng)
    for variable in rng.permutation(8):
        layout = constraints.SMEMTransforms(None, None)
        one = constraints.ConstraintSystem(assignments={VARIABLES[variable]: layout})
        ours = constraints.reduce(one & ours)
        with monkeypatch.context() as jax_alone:
            jax_alone.setattr(constraints, "reduce_constraint", reduce.__wrapped__)
            jaxs = constraints.reduce(one & jaxs)
        assert ours == jaxs


def test_a_kernel_has_the_kinds_of_values_and_all_the_layouts_that_jax_asks_for(monkeypatch):
    asked = [0]

    def both(ask: Any, op: Any) -> bool:
        answer: bool = ask(op)
        assert answer == ask.__wrapped__(op)
        asked[0] += 1
        return answer

    for name in [name for name in vars(inference_utils) if name.startswith("should_have_")]:
        monkeypatch.setattr(inference_utils, name, functools.partial(both, getattr(inference_utils, name)))
    check: Any = layout_inference._ensure_all_layouts_are_set
    monkeypatch.setattr(layout_inference, "_ensure_all_layouts_are_set", check.__wrapped__)
    lower()
    assert asked[0] > 1000


def test_nothing_of_a_kernel_is_kept_when_it_is_lowered():
    lower()
    assert fast_lowering._seen.op is None
    assert not fast_lowering._layouts


def test_a_variable_has_one_hash_and_a_wanted_one_is_found_by_it():
    unknowns = fast_lowering._Unknowns(VARIABLES[:2])
    assert constraints.Variable("a") in unknowns  # type: ignore[arg-type]
    assert constraints.Variable("c") not in unknowns  # type: ignore[arg-type]
    assert list(unknowns) == VARIABLES[:2]
    register = constraints.RegisterLayout(fa.WGMMA_LAYOUT)
    assert register not in unknowns


def test_integers_and_threads_that_are_generated_once_leave_the_code_as_it_is(monkeypatch):
    """What is left when equal operations are merged, and no less is generated than that."""
    found: list[tuple[int, str]] = []
    patched = ((dialect_lowering.arith, "constant"), (dialect_lowering, "_lowering_context"), (utils, "thread_idx"))
    original = {name: getattr(owner, name).__wrapped__ for owner, name in patched}
    lower_dialect: Any = dialect_lowering.lower_mgpu_dialect

    def kept(module: Any, *args: Any, **options: Any) -> None:
        lower_dialect(module, *args, **options)
        copy = ir.Module.parse(str(module), module.context)
        del copy.operation.attributes["mosaic_gpu.dump_basename"]  # which has a number
        passmanager.PassManager.parse("builtin.module(canonicalize,cse)", module.context).run(copy.operation)
        found.append((str(module).count("\n"), str(copy)))

    monkeypatch.setattr(dialect_lowering, "lower_mgpu_dialect", kept)
    a = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    for _ in range(2):
        with target("h100-sxm"):
            product = jax.jit(functools.partial(mgpu_ops.matmul, backend="mosaic"))
            product.trace(a, jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
        jax.clear_caches()
        for owner, name in patched:
            monkeypatch.setattr(owner, name, original[name])
    (ours, text), (jaxs, jaxs_text) = found
    assert collections.Counter(text.splitlines()) == collections.Counter(jaxs_text.splitlines())  # integers in another order
    assert ours < 0.9 * jaxs


def test_an_index_that_tiles_do_not_allow_is_refused():
    def body(x_ref: Any, out_ref: Any, tile: Any) -> None:
        out_ref[...] = tile[4:68]

    launch = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=1)
    tile = plgpu.SMEM((128, 64), jnp.bfloat16, transforms=engine.operand_transforms(64, jnp.bfloat16))
    out = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    run = engine.kernel(body, launch, out_type=out, scratch_types={"tile": tile})
    with target("h100-sxm"), pytest.raises(ValueError, match=r"slice start \(4\).*divisible by the tile size \(8\)"):
        jax.jit(run).trace(X).lower(lowering_platforms=("cuda",))
