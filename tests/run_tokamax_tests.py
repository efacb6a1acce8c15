"""Runs tokamax's own tests of attention on ours: `mgpu_ops.flash_attention` takes the place of tokamax's implementation.

    python tests/run_tokamax_tests.py [--wheel PATH] [--kernel] [--limit N] [-k REGEX]

The tests are those that every implementation of tokamax must pass, `AttentionTestBase` in tokamax's wheel. PATH is such a wheel
or the folder that it was unpacked to; without it, tokamax must be installed. Nothing is downloaded. They also need chex, flax,
qwix and what tokamax itself imports; its profiler (xprof) and its log of tuning (tensorboardX), which they do not use, may be
absent.

`attention` translates a call: a mask that is causal, a window or lengths becomes those arguments, any other an array. Tests of
what flash_attention does not offer are left out, with the reason (`NOT_OURS`). `--kernel`, on a Hopper GPU, rounds float32
arrays to bfloat16 and asks for the kernel, with tokamax's own tolerances of 16-bit implementations. `--limit N` runs at most N
cases of a parameterised test, evenly spread.

Prints a line for each test. The exit status is 0 only if no test failed and a kernel of ours, or its reference through XLA, was
traced.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import tempfile
import types
import unittest
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

BASE = "tokamax._src.ops.attention.base"
TESTS = "tokamax._src.ops.attention.test_base"
UNUSED = ("xprof", "tensorboardX")  # packages that tokamax imports and these tests do not use
NEEDED = ("chex", "flax", "jaxtyping", "qwix")  # of those that they use
WAYS = ("calls", "kernel", "xla")  # calls of ours, traces of a kernel or a reference
NOT_OURS = {
    r"test_dropout$": "flash_attention has no dropout",
    r"test_normalize_output$": "flash_attention returns no row max, which outputs that are not normalised refer to",
    r"test_bench_": "tokamax skips it",
    r"test_vmap\d*$": "tokamax skips it",
    r"test_invalid_shapes\d*$": "tokamax skips it",
}


def missing(wheel: Path | None = None) -> str | None:
    """Why tokamax's tests cannot run here, or None."""
    needed = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if needed:
        return f"tokamax's tests need {', '.join(needed)}"
    with _on_path(wheel):
        if importlib.util.find_spec("tokamax") is None:
            return "tokamax is not installed: pip install tokamax, or name its wheel"
        try:
            with _without(UNUSED):
                importlib.import_module(TESTS)
        except ImportError as error:
            return f"tokamax's tests cannot be imported: {error}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, metavar="PATH")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose name it finds")
    args = parser.parse_args(arguments)
    if reason := missing(args.wheel):
        print(reason)
        return 1
    with _on_path(args.wheel), _without(UNUSED), counted() as counts:
        ended: collections.Counter[str] = collections.Counter()
        for test in chosen(_tests(args.kernel, counts), args.k, args.limit):
            ended[run(test, counts)] += 1
    print(", ".join(f"{count} {how}" for how, count in sorted(ended.items())) or "no test was found")
    print(f"mgpu_ops.flash_attention: {counts['calls']} calls, traced {counts['kernel']} x kernel, {counts['xla']} x XLA")
    if not counts["kernel"] and (args.kernel or not counts["xla"]):
        print("this shows nothing: no call was computed by ours")
        return 1
    return 1 if ended["FAILED"] else 0


# --- The call, translated ---------------------------------------------------------------------------------------------


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    q_indices: Any = None,
    k_indices: Any = None,
    logits_scale: Any = None,
    logits_soft_cap: float | None = None,
    logits_dtype: Any = None,
    normalize_output: bool = True,
    return_residuals: bool = False,
    backend: Any = None,
    **others: Any,
) -> Any:
    """A call of tokamax's attention through `mgpu_ops.flash_attention`. NotImplementedError for what that does not offer.

    Logits are always float32. The residuals, what a row's logits were shifted by and the sum of their exponentials, are lse and
    1 here, so that the output is the same whether it is divided by the sum or not.
    """
    import jax
    import jax.numpy as jnp

    import mgpu_ops

    del logits_dtype
    if any(x is not None and x is not False for x in others.values()) or not (normalize_output or return_residuals):
        raise NotImplementedError(f"flash_attention has no {', '.join(others) or 'normalize_output'}")
    base = importlib.import_module(BASE)
    q, k, v = (importlib.import_module("tokamax._src.quantization").as_array(x) for x in (q, k, v))
    lead, count = q.shape[:-3], -1 if len(q.shape) > 3 else 1
    options = _mask_arguments(base, mask, is_causal, (q, k), (q_indices, k_indices))
    for name, x in {"bias": bias, "mask": options.get("mask")}.items():
        if x is not None:
            if x.ndim > 4:
                x = jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:])
            options[name] = x
    dtype = q.dtype
    if backend == "mosaic":
        q, k, v = (x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in (q, k, v))
    out, lse = mgpu_ops.flash_attention(
        *(x.reshape(count, *x.shape[-3:]) for x in (q, k, v)),
        scale=None if logits_scale in (None, base.AUTO) else logits_scale,
        soft_cap=logits_soft_cap,
        return_lse=True,
        backend=backend,
        deterministic=True,  # the tests ask that two runs give the same bits
        **options,
        **({"soft_cap_after_bias": True} if logits_soft_cap is not None and bias is not None else {}),
    )
    out, lse = out.reshape(*lead, *out.shape[1:]).astype(dtype), lse.reshape(*lead, *lse.shape[1:])
    return (out, (jax.lax.stop_gradient(lse), jnp.ones_like(lse))) if return_residuals else out


def _mask_arguments(base: Any, mask: Any, is_causal: bool, arrays: tuple[Any, Any], indices: tuple[Any, Any]) -> dict[str, Any]:
    """The arguments of flash_attention for a mask of tokamax's: causal, window and lengths where they say it, else an array."""
    import jax.numpy as jnp

    q, k = arrays
    tokens = q.shape[-3], k.shape[-3]
    if mask is None:
        mask = base.Mask()
    elif not isinstance(mask, base.Mask):
        mask = base.Mask(causal_mask=mask) if isinstance(mask, base.CausalMask) else base.Mask(mask)
    if is_causal:
        mask &= base.CausalMask()
    if not mask:
        return {}
    asked = [
        name for name in ("bool_mask", "causal_mask", "q_start", "q_end", "k_start", "k_end") if getattr(mask, name) is not None
    ]
    plain = indices == (None, None) and q.ndim == 4
    if plain and asked == ["causal_mask"] and tokens[0] == tokens[1]:
        offset, size = mask.causal_mask.offset, mask.causal_mask.window_size
        if isinstance(offset, int) and offset >= 0 and (size is None or size > offset):
            return {"window": (None if size is None else size - 1 - offset, offset)}
    ends = [mask.q_end, mask.k_end]
    if plain and asked == ["q_end", "k_end"] and all(x.shape == (q.shape[0], 1, 1) for x in ends):
        return {"q_lengths": ends[0][:, 0, 0], "kv_lengths": ends[1][:, 0, 0]}
    have = [n if x is None else x for n, x in zip(tokens, indices, strict=True)]
    return {"mask": jnp.asarray(mask.as_array(*have))}


# --- The tests --------------------------------------------------------------------------------------------------------


def _tests(kernel: bool, counts: collections.Counter[str]) -> list[unittest.TestCase]:
    """tokamax's tests, of ours."""
    base = importlib.import_module(TESTS)
    ours = _counting(counts, "calls", functools.partial(attention, backend="mosaic" if kernel else None))

    class FlashAttentionTest(base.AttentionTestBase):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any) -> None:
            supports = {"supports_precisions": False, "supports_dropout": False}
            super().__init__(*args, attention_fn=ours, **supports)

        def _run_test_with_inputs(self, *args: Any, **kwargs: Any) -> None:
            if kernel:  # as tokamax's tests of cuDNN, which takes 16-bit floats alone
                kwargs["atol"] = 0.025 if kwargs.get("bias") is not None else 0.015
                kwargs["atol_grads"] = max(kwargs.get("atol_grads", 0.0), 0.06)
            super()._run_test_with_inputs(*args, **kwargs)

    return list(unittest.defaultTestLoader.loadTestsFromTestCase(FlashAttentionTest))  # type: ignore[arg-type]


def chosen(tests: list[unittest.TestCase], pattern: str, limit: int | None) -> list[unittest.TestCase]:
    """Those that `pattern` finds and flash_attention offers, of the cases of each at most `limit`."""
    cases: dict[str, list[unittest.TestCase]] = collections.defaultdict(list)
    for test in tests:
        name = str(test._testMethodName)
        if not re.search(pattern, name):
            continue
        if reason := next((why for what, why in NOT_OURS.items() if re.search(what, name)), None):
            print(f"left out {name}: {reason}")
        else:
            cases[re.sub(r"\d+$", "", name)].append(test)
    return [test for group in cases.values() for test in group[:: -(-len(group) // limit) if limit else 1]]


def run(test: unittest.TestCase, counts: collections.Counter[str]) -> str:
    """Runs a test and prints how it ended."""
    before, result = counts.copy(), unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    failures = [text for _, text in result.failures + result.errors]
    how = "FAILED" if failures else "skipped" if result.skipped else "passed"
    used = ", ".join(f"{counts[way] - before[way]} {way}" for way in WAYS if counts[way] > before[way])
    note = result.skipped[0][1] if result.skipped else used
    print("\n".join([f"{how:8} {test._testMethodName}: {note}", *failures]), flush=True)
    return how


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Counts the traces of kernels and of references of attention."""
    module = importlib.import_module("mgpu_ops.attention.flash_attention")
    counts: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        for name in ("FORWARD", "BACKWARD"):
            spec = getattr(module, name)
            ways = {"run": _counting(counts, "kernel", spec.run), "reference": _counting(counts, "xla", spec.reference)}
            stack.enter_context(mock.patch.object(module, name, dataclasses.replace(spec, **ways)))
        yield counts


def _counting(counts: collections.Counter[str], way: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[way] += 1
        return function(*args, **kwargs)

    return call


# --- Where tokamax is -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _on_path(wheel: Path | None) -> Iterator[None]:
    """A wheel, or the folder that one was unpacked to, comes first among the places of modules."""
    with contextlib.ExitStack() as stack:
        if wheel is not None:
            place = wheel
            if wheel.is_file():  # typing checks of tokamax read source files: it does not run from within an archive
                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(place)
            stack.enter_context(mock.patch.object(sys, "path", [str(place), *sys.path]))
        yield


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of absent packages, and makes each an empty one whose names are mocks."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Those of some packages that are not installed can be imported, and hold nothing."""
    absent = {name for name in packages if importlib.util.find_spec(name) is None}
    with mock.patch.object(sys, "meta_path", [*sys.meta_path, _Absent(absent)]):
        yield


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of tests/, whose folder mgpu_ops is not the package
    sys.exit(main())
