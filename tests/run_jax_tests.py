"""Runs JAX's own tests of functions that ours take the place of, with ours in that place.

    python tests/run_jax_tests.py PATH [--kernel] [--limit N] [-k REGEX]

PATH is a checkout of https://github.com/jax-ml/jax of about the version that is installed, or one of its test files; nothing
is downloaded. `FUNCTIONS` says which functions, in which files, and which tests say nothing of ours. Needs absl-py.

`jax.lax.ragged_dot` is `mgpu_ops.ragged_dot` wherever a test calls it. Tests of `jax.nn.dot_product_attention` compare one
`implementation` with another. The one that a file takes as its reference (`Function.references`) stays JAX's own; any other,
also cuDNN's, is `mgpu_ops.dot_product_attention` without that argument, which would only have ours call JAX. So what passes is
ours held against JAX's. Where these tests would skip, as cuDNN's does not run with CUDA 13, they run; and where they look for
cuDNN's call in lowered text, they look for our kernel with `--kernel`, else for nothing.

`--kernel`, on a Hopper GPU, gives 16-bit floats to the kernel or fails; for ragged_dot, k and n are padded with zeros, which
change no sum, as JAX's tests use shapes below the kernel's 16-byte rows. Without it a call takes the backend that it takes for
any user. `--limit N` runs at most N cases of a parameterised test, evenly spread; JAX's test of its own Hopper kernel, whose
reference is `lax.ragged_dot`, has 288.

Prints a line for each test with how often it called ours, how often a kernel of ours, or its reference through XLA, was traced
for it, and how often ours left a call to JAX's own function, as for integers or an explicit precision. The exit status is 0
only if no test failed and each function with tests was computed by ours in at least one, with `--kernel` by a kernel.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import re
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

WAYS = ("calls", "kernel", "xla", "jax")  # calls of ours, traces of a kernel or a reference, calls that ours left to JAX


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of JAX's whose tests run with ours in its place."""

    jaxs: str  # the module that holds it, e.g. "jax.lax"
    ours: str  # the module that holds ours and, as _jax_NAME, the function that it leaves calls to
    specs: tuple[tuple[str, str], ...]  # the OpSpecs that compute it: module, attribute
    files: tuple[str, ...]  # the tests of a checkout that call it
    pattern: str  # found in the names of its tests
    through_the_kernel: Callable[..., Any]
    not_ours: Mapping[str, str]  # a pattern in such names, less the number of the case -> why these say nothing of ours
    references: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # file -> implementation that stays JAX's


def ragged_dot_kernel(lhs: Any, rhs: Any, group_sizes: Any, *rest: Any, **named: Any) -> Any:
    """`mgpu_ops.ragged_dot` by the kernel, k and n padded, where it can take the operands' dtype and nothing else is asked."""
    import jax.numpy as jnp

    import mgpu_ops

    if rest or named or not (lhs.dtype == rhs.dtype and lhs.dtype in (jnp.bfloat16, jnp.float16)):
        return mgpu_ops.ragged_dot(lhs, rhs, group_sizes, *rest, **named)
    (_, k, n), unit = rhs.shape, 8  # elements of 16 bytes
    lhs = jnp.pad(lhs, ((0, 0), (0, -k % unit)))
    rhs = jnp.pad(rhs, ((0, 0), (0, -k % unit), (0, -n % unit)))
    return mgpu_ops.ragged_dot(lhs, rhs, group_sizes, backend="mosaic")[:, :n]


def dot_product_attention_kernel(query: Any, *rest: Any, **named: Any) -> Any:
    """`mgpu_ops.dot_product_attention` by the kernel where it can take the dtype."""
    import mgpu_ops

    backend = "mosaic" if query.dtype.name in ("bfloat16", "float16") else None
    return mgpu_ops.dot_product_attention(query, *rest, **named, backend=backend)


FUNCTIONS = {
    "ragged_dot": Function(
        jaxs="jax.lax",
        ours="mgpu_ops.grouped.grouped_matmul",
        specs=(("mgpu_ops.grouped.grouped_matmul", "SPEC"), ("mgpu_ops.grouped.ragged_contraction", "SPEC")),
        files=(
            "tests/lax_test.py",
            "tests/export_test.py",
            "tests/pallas/lax_lowerings/gpu/ragged_dot_test.py",
            "tests/pallas/mgpu_ragged_dot_test.py",
        ),
        pattern="(?i)ragged_?dot",
        through_the_kernel=ragged_dot_kernel,
        not_ours={
            r"\.test_ragged_dot_use_gpu_pallas_triton_lowering$": "looks for JAX's Triton kernel in lowered text",
            r"\.test_ragged_dot_explicit_out_sharding_errors$": "out_sharding is left to JAX's own function",
        },
    ),
    "dot_product_attention": Function(
        jaxs="jax.nn",
        ours="mgpu_ops.attention.dot_product_attention",
        specs=(("mgpu_ops.attention.flash_attention", "FORWARD"), ("mgpu_ops.attention.flash_attention", "BACKWARD")),
        files=("tests/nn_test.py", "tests/fused_attention_stablehlo_test.py"),
        pattern="DotProductAttention",
        through_the_kernel=dot_product_attention_kernel,
        not_ours={
            r"^DotProductAttention(F8\w*)?Test\.": "calls cuDNN's function itself, not jax.nn's",
            r"^DotProductAttentionDbiasTest\.": "looks for cuDNN's primitive in the jaxpr",
        },
        references={"nn_test": None, "fused_attention_stablehlo_test": "xla"},
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose name it finds")
    args = parser.parse_args(arguments)
    names = [name for function in FUNCTIONS.values() for name in function.files]
    files = [args.path] if args.path.is_file() else [file for name in names if (file := args.path / name).is_file()]
    if not files:
        parser.error(f"{args.path} is neither a test file nor a checkout of JAX, which has {', '.join(names)}")
    with contextlib.ExitStack() as stack:
        places = {name: stack.enter_context(in_its_place(name, args.kernel)) for name in FUNCTIONS}
        tests = tests_of(files, args.kernel)
        results = []
        for name, place in places.items():
            some = chosen(FUNCTIONS[name], tests, args.k, args.limit)
            results.append(report(name, run(some, place), place.counts, args.kernel) if some else None)
    if not any(result is not None for result in results):
        print("no test was found")
        return 1
    return max(result or 0 for result in results)


@dataclasses.dataclass
class Place:
    """What is known where one of ours stands in for JAX's function."""

    function: Function
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    test_file: str = ""  # of the test that runs

    def counted(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        capture = importlib.import_module("mgpu_ops.registry.capture")

        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[what] += not capture.capturing()  # not where shapes alone are asked for
            return function(*args, **kwargs)

        return call

    def stand_in(self, ours: Callable[..., Any], jaxs: Callable[..., Any]) -> Callable[..., Any]:
        """JAX's function for the implementation that tests compare with, ours for any other and where none is named."""
        if not self.function.references:
            return ours

        def call(*args: Any, **kwargs: Any) -> Any:
            named = "implementation" in kwargs
            implementation = kwargs.pop("implementation", None)
            if named and implementation == self.function.references.get(self.test_file):
                return jaxs(*args, **kwargs)
            return ours(*args, **kwargs)

        return call


@contextlib.contextmanager
def in_its_place(name: str, kernel: bool) -> Iterator[Place]:
    """JAX's function is ours inside; counts the calls, the traces of kernels and references, and what ours leaves to JAX."""
    function = FUNCTIONS[name]
    jaxs, ours = importlib.import_module(function.jaxs), importlib.import_module(function.ours)
    place = Place(function)
    counted = place.counted("calls", function.through_the_kernel if kernel else getattr(ours, name))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(jaxs, name, place.stand_in(counted, getattr(jaxs, name))))
        own = getattr(ours, f"_jax_{name}")
        stack.enter_context(mock.patch.object(ours, f"_jax_{name}", place.counted("jax", own)))
        for module_name, attribute in function.specs:
            module = importlib.import_module(module_name)
            spec = getattr(module, attribute)
            ways = {"run": place.counted("kernel", spec.run), "reference": place.counted("xla", spec.reference)}
            stack.enter_context(mock.patch.object(module, attribute, dataclasses.replace(spec, **ways)))
        if function.references:  # they skip what they would ask of cuDNN with CUDA 13
            stack.enter_context(mock.patch("jax._src.test_util.is_cuda_version_at_least", return_value=False))
        yield place


def tests_of(files: Iterable[Path], kernel: bool) -> list[unittest.TestCase]:
    """All tests of the files. They are imported first, as some of them set up JAX's devices."""
    found: list[unittest.TestCase] = []
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        if hasattr(module, "_check_cudnn_backend"):  # whether cuDNN's call is in a function's lowered text
            module._check_cudnn_backend = lowers_to_a_kernel if kernel else lambda *args, **kwargs: True
        suites = list(unittest.defaultTestLoader.loadTestsFromModule(module))
        while suites:
            suite = suites.pop(0)
            suites[:0] = suite if isinstance(suite, unittest.TestSuite) else ()
            found += [suite] if isinstance(suite, unittest.TestCase) else ()
    return found


def lowers_to_a_kernel(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a kernel of ours is in the lowered text."""
    import jax

    return "mosaic_gpu" in jax.jit(function).lower(*args, **kwargs).as_text()


def name_of(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


def chosen(function: Function, tests: Iterable[unittest.TestCase], pattern: str, limit: int | None) -> list[unittest.TestCase]:
    """The tests of a function that `pattern` finds, of the cases of each at most `limit`."""
    cases: dict[str, list[unittest.TestCase]] = collections.defaultdict(list)
    for test in tests:
        if re.search(function.pattern, name_of(test)) and re.search(pattern, name_of(test)):
            cases[re.sub(r"_?\d+$", "", name_of(test))].append(test)
    found = []
    for name, group in cases.items():
        reason = next((why for what, why in function.not_ours.items() if re.search(what, name)), None)
        if reason is None:
            found += group[:: -(-len(group) // limit) if limit else 1]
        else:
            print(f"left out {name}, {len(group)} {'case' if len(group) == 1 else 'cases'}: {reason}")
    return found


def run(tests: Sequence[unittest.TestCase], place: Place) -> collections.Counter[str]:
    """Runs each test by itself and prints how it ended; returns how many ended in which way."""
    import jax

    counts, ended = place.counts, collections.Counter[str]()
    for test in tests:
        jax.clear_caches()  # a call that was traced before would not be counted again
        before, result = counts.copy(), unittest.TestResult()
        place.test_file = type(test).__module__
        unittest.TestSuite([test]).run(result)  # with its class's fixtures
        failures = [text for _, text in result.failures + result.errors]
        used = {way: counts[way] - before[way] for way in WAYS if counts[way] > before[way]}
        if failures:
            how, note = "FAILED", ""
        elif result.skipped:
            how, note = "skipped", result.skipped[0][1]
        else:
            how, note = "passed", ", ".join(f"{count} {way}" for way, count in used.items())
        computed = "kernel" in used or "xla" in used
        ended[how if how != "passed" or computed else "passed by JAX's own function" if used else "passed without it"] += 1
        print("\n".join([f"{how:8} {name_of(test)}: {note}", *failures]), flush=True)
    return ended


def report(name: str, ended: collections.Counter[str], counts: collections.Counter[str], kernel: bool) -> int:
    """Prints the sums; 0 if nothing failed and ours computed something."""
    print(", ".join(f"{count} {how}" for how, count in sorted(ended.items())))
    left = f"left {counts['jax']} to JAX's own" if counts["jax"] else "left none to JAX's own"
    print(f"mgpu_ops.{name}: {counts['calls']} calls, traced {counts['kernel']} x kernel, {counts['xla']} x XLA, {left}")
    wanted = ["kernel"] if kernel else ["kernel", "xla"]
    if not any(counts[way] for way in wanted):
        print(f"this shows nothing: no call was computed by ours ({' or '.join(wanted)})")
        return 1
    return 1 if ended["FAILED"] else 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of tests/, whose folder mgpu_ops is not the package
    sys.exit(main())
