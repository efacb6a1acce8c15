"""Runs JAX's own tests of `jax.lax.ragged_dot`, gradients included, with `mgpu_ops.ragged_dot` in its place.

    python tests/run_jax_tests.py PATH [--kernel] [--limit N] [-k REGEX]

PATH is a checkout of https://github.com/jax-ml/jax of about the version that is installed, or one of its test files; nothing
is downloaded. Every test whose name holds "ragged_dot" runs, except those of `NOT_OURS`. Needs absl-py.

`--kernel`, on a Hopper GPU, gives products of 16-bit floats to the kernel: k and n are padded with zeros, which change no sum,
as JAX's tests use shapes below the kernel's 16-byte rows. Without it a call takes the backend that it takes for any user.
`--limit N` runs at most N cases of a parameterised test, evenly spread; JAX's test of its own Hopper kernel, whose reference is
`lax.ragged_dot`, has 288.

Prints a line for each test with how often it called ours, and how often a kernel of ours, or its reference through XLA, was
traced for it. A call without a trace is one that ours leaves to JAX's own function, as for integers or an explicit precision.
The exit status is 0 only if no test failed and at least one was computed by ours, with `--kernel` by a kernel.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import re
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

FILES = (  # the tests of a checkout that call lax.ragged_dot
    "tests/lax_test.py",
    "tests/export_test.py",
    "tests/pallas/lax_lowerings/gpu/ragged_dot_test.py",
    "tests/pallas/mgpu_ragged_dot_test.py",
)
NOT_OURS = {  # test -> why it says nothing of ours
    "RaggedDotGpuPallasTest.test_ragged_dot_use_gpu_pallas_triton_lowering0": "looks for JAX's Triton kernel in lowered text",
    "RaggedDotGpuPallasTest.test_ragged_dot_explicit_out_sharding_errors": "out_sharding is left to JAX's own function",
}
WAYS = ("calls", "kernel", "xla")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose name it finds")
    args = parser.parse_args(arguments)
    files = [args.path] if args.path.is_file() else [file for name in FILES if (file := args.path / name).is_file()]
    if not files:
        parser.error(f"{args.path} is neither a test file nor a checkout of JAX, which has {', '.join(FILES)}")
    with in_its_place(args.kernel) as counts:
        return report(run(chosen(tests_of(files), args.k, args.limit), counts), counts, args.kernel)


@contextlib.contextmanager
def in_its_place(kernel: bool) -> Iterator[collections.Counter[str]]:
    """`jax.lax.ragged_dot` is ours inside; counts the calls, and the traces of the kernels and of their references."""
    import jax

    import mgpu_ops

    counts: collections.Counter[str] = collections.Counter()

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return function(*args, **kwargs)

        return call

    ours = counted("calls", through_the_kernel if kernel else mgpu_ops.ragged_dot)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(jax.lax, "ragged_dot", ours))
        for name in ("grouped_matmul", "ragged_contraction"):
            module = importlib.import_module(f"mgpu_ops.{name}")
            spec = module.SPEC
            ways = {"run": counted("kernel", spec.run), "reference": counted("xla", spec.reference)}
            stack.enter_context(mock.patch.object(module, "SPEC", dataclasses.replace(spec, **ways)))
        yield counts


def through_the_kernel(lhs: Any, rhs: Any, group_sizes: Any, *rest: Any, **named: Any) -> Any:
    """`mgpu_ops.ragged_dot` by the kernel, k and n padded, where it can take the operands' dtype and nothing else is asked."""
    import jax.numpy as jnp

    import mgpu_ops

    if rest or named or not (lhs.dtype == rhs.dtype and lhs.dtype in (jnp.bfloat16, jnp.float16)):
        return mgpu_ops.ragged_dot(lhs, rhs, group_sizes, *rest, **named)
    (_, k, n), unit = rhs.shape, 8  # elements of 16 bytes
    lhs = jnp.pad(lhs, ((0, 0), (0, -k % unit)))
    rhs = jnp.pad(rhs, ((0, 0), (0, -k % unit), (0, -n % unit)))
    return mgpu_ops.ragged_dot(lhs, rhs, group_sizes, backend="mosaic")[:, :n]


def tests_of(files: Iterable[Path]) -> list[unittest.TestCase]:
    """All tests of the files. They are imported first, as some of them set up JAX's devices."""
    found: list[unittest.TestCase] = []
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        suites = list(unittest.defaultTestLoader.loadTestsFromModule(module))
        while suites:
            suite = suites.pop(0)
            suites[:0] = suite if isinstance(suite, unittest.TestSuite) else ()
            found += [suite] if isinstance(suite, unittest.TestCase) else ()
    return found


def name_of(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


def chosen(tests: Iterable[unittest.TestCase], pattern: str, limit: int | None) -> list[unittest.TestCase]:
    """The tests of ragged_dot that `pattern` finds, of the cases of each at most `limit`."""
    cases: dict[str, list[unittest.TestCase]] = collections.defaultdict(list)
    for test in tests:
        name = name_of(test)
        if name in NOT_OURS:
            print(f"left out {name}: {NOT_OURS[name]}")
        elif re.search("ragged_?dot", name, re.IGNORECASE) and re.search(pattern, name):
            cases[re.sub(r"\d+$", "", name)].append(test)
    step = {name: -(-len(group) // limit) if limit else 1 for name, group in cases.items()}
    return [test for name, group in cases.items() for test in group[:: step[name]]]


def run(tests: Iterable[unittest.TestCase], counts: collections.Counter[str]) -> collections.Counter[str]:
    """Runs each test by itself and prints how it ended; returns how many ended in which way."""
    import jax

    ended: collections.Counter[str] = collections.Counter()
    for test in tests:
        jax.clear_caches()  # a call that was traced before would not be counted again
        before, result = counts.copy(), unittest.TestResult()
        unittest.TestSuite([test]).run(result)  # with its class's fixtures
        failures = [text for _, text in result.failures + result.errors]
        used = {way: counts[way] - before[way] for way in WAYS if counts[way] > before[way]}
        if failures:
            how, note = "FAILED", ""
        elif result.skipped:
            how, note = "skipped", result.skipped[0][1]
        else:
            how, note = "passed", ", ".join(f"{count} {way}" for way, count in used.items())
        ended[how if how != "passed" or len(used) > 1 else "passed by JAX's own function" if used else "passed without it"] += 1
        print("\n".join([f"{how:8} {name_of(test)}: {note}", *failures]), flush=True)
    return ended


def report(ended: collections.Counter[str], counts: collections.Counter[str], kernel: bool) -> int:
    """Prints the sums; 0 if nothing failed and ours computed something."""
    print(", ".join(f"{count} {how}" for how, count in sorted(ended.items())) or "no test of ragged_dot was found")
    print(f"mgpu_ops.ragged_dot: {counts['calls']} calls, traced {counts['kernel']} x kernel, {counts['xla']} x XLA")
    wanted = ["kernel"] if kernel else ["kernel", "xla"]
    if not any(counts[way] for way in wanted):
        print(f"this shows nothing: no call was computed by ours ({' or '.join(wanted)})")
        return 1
    return 1 if ended["FAILED"] else 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of tests/, whose folder mgpu_ops is not the package
    sys.exit(main())
