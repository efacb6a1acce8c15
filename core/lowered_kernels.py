"""Keeps what kernels are lowered to on disk, where the next process finds it (`kernel_cache.py` says where).

JAX's persistent compilation cache finds a program by the text that it is lowered to, and kernels take nearly all of the time to
lower. So each kernel is found by a hash of what it is lowered from: its jaxpr with all parameters, the GPU's architecture, what
ptxas knows, and the sources of this library and of JAX's Mosaic GPU. What is found is the custom call that it was lowered to.

A kernel is lowered as ever where a parameter is of a kind that is not known here, for `jax.export`, and where it reaches other
GPUs, prints or records what it does.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax import tree_util
from jax._src import core as jax_core
from jax._src.literals import TypedNdArray
from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
from jax._src.sharding_impls import SPMDAxisContext
from jax._src.state import AbstractRef
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir

from mgpu_ops.core import early_compile, kernel_cache, parallel_compile, ptxas

_log = logging.getLogger("mgpu_ops")
_FORMAT = f"{kernel_cache.PREFIX}2"
_STARTED = time.time()  # when this process began to import what lowers kernels
_OURS = ("mgpu_ops.", "jax.", "jaxlib.")  # modules whose sources are part of a key, by their versions


def keep_lowered(prefix: str) -> None:
    """From here on kernels whose names begin so are looked for on disk before they are lowered."""
    lower = registration.mpmd_map_mgpu_lowering_rule

    @functools.wraps(lower)
    def lower_once(ctx: Any, *args: Any, **params: Any) -> Any:
        if str(params["name"]).startswith(prefix) and isinstance(ctx.module_context.axis_context, SPMDAxisContext):
            return _once_for_devices(lower_kept, ctx, args, params)
        if str(params["name"]).startswith(prefix):
            return early_compile.leave_out(lower_kept, functools.partial(_key, ctx, params), ctx, args, params)
        return lower_kept(ctx, *args, **params)

    def lower_kept(ctx: Any, *args: Any, **params: Any) -> Any:
        cache = kernel_cache.current() if str(params["name"]).startswith(prefix) else None
        key = _key(ctx, params) if cache is not None else None
        if cache is None or key is None:
            early_compile.lowers_anew()
            return lower(ctx, *args, **params)
        if (known := cache.get(key)) is not None:
            parallel_compile.lowered()
            return _call(known, args)
        early_compile.lowers_anew()
        results = lower(ctx, *args, **params)
        if (program := _kept(results, args)) is not None:
            cache.put(key, program)
        return results

    registration.mpmd_map_mgpu_lowering_rule = lower_once


# A program over several devices is lowered in pieces, one for each call of an op (`registry/partition.py`). Of each kernel's
# jaxpr what it was lowered to, as many times as its parameters differ.
_for_devices: weakref.WeakKeyDictionary[Any, list[tuple[Any, bytes]]] = weakref.WeakKeyDictionary()


def _once_for_devices(lower: Callable[..., Any], ctx: Any, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """As `lower`, once for each kernel, if it is one that stays on its GPU."""
    (jaxpr, *others), rest = params["jaxprs"], {name: value for name, value in params.items() if name != "jaxprs"}
    about = (rest, _about(ctx), ctx.avals_in, ctx.avals_out)
    if not others:
        for known, kept in _for_devices.get(jaxpr, ()):
            if known == about:
                return _call(kept, args)
    results = lower(ctx, *args, **params)
    if not others and (program := _kept(results, args)) is not None:
        _for_devices.setdefault(jaxpr, []).append((about, program))
    return results


# --- What is kept


def _kept(results: Any, args: tuple[Any, ...]) -> bytes | None:
    """The call that `results` are of, if these and `args` are all that it has and it does not reach other GPUs."""
    call = results[0].owner if results else None
    if call is None or not early_compile.is_all(call, results, args):
        return None
    return parallel_compile.program_of(call) if parallel_compile.is_kernel(call) else None


def _call(program: bytes, args: tuple[Any, ...]) -> list[Any]:
    """The results of a call as that of `program`, on `args`."""
    module = ir.Module.parse(program)  # has to live as long as what is read of it
    (function,) = module.body.operations
    kept = function.regions[0].blocks[0].operations[0].operation
    types = [result.type for result in kept.results]
    attributes = dict(kept.attributes.items())
    return list(ir.Operation.create(kept.name, results=types, operands=list(args), attributes=attributes).results)


# --- The key


class _UnknownError(Exception):
    """A parameter of a kind that cannot be told from others."""


def _key(ctx: Any, params: Mapping[str, Any]) -> str | None:
    """The name of a kernel in the cache, or None for one that is not kept."""
    compiler = params.get("compiler_params")
    if ctx.is_forward_compat() or params.get("debug") or getattr(compiler, "profile_space", 0) or parallel_compile.dumping():
        return None
    if (versions := _versions()) is None:
        return None
    words = _Words()
    try:
        words.value([*_about(ctx), versions])
        words.value([*ctx.avals_in, *ctx.avals_out])
        words.value({name: value for name, value in params.items() if name not in {"interpret", "debug", "metadata"}})
    except _UnknownError as unknown:
        _log.debug("a kernel is not kept: %s", unknown)
        return None
    text = "\n".join(f"{len(word)} {word}" for word in words.found)
    return f"{_FORMAT}-{hashlib.sha256(text.encode()).hexdigest()}"


# JAX's settings that lowering reads, beside those that tracing has read.
_SETTINGS = (
    "jax_hlo_source_file_canonicalization_regex",
    "jax_include_full_tracebacks_in_locations",
    "jax_traceback_in_locations_limit",
    "jax_pallas_enable_debug_checks",
    "jax_accurate_erf_inv",
)


def _about(ctx: Any) -> list[Any]:
    """What a kernel is lowered by and for, beside its jaxpr."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    devices = () if mesh is None else (mesh.axis_names, mesh.axis_sizes, jax.process_count(), jax.device_count())
    mosaic = sorted((name, value) for name, value in os.environ.items() if name.startswith("MOSAIC_GPU_"))
    settings = [getattr(jax.config, name, None) for name in _SETTINGS]
    # A kernel's text names the files of its source lines: a kept one is of the same files as one that another process lowers.
    folders = () if jax.config.jax_hlo_source_file_canonicalization_regex else tuple(map(str, _roots()))
    # Mosaic converts floats of 8 bits by the instructions that ptxas knows.
    return [_FORMAT, utils._infer_arch(), ptxas.isa(), devices, mosaic, settings, folders]


@functools.cache
def _versions() -> tuple[str, ...] | None:
    """JAX's, and a hash of the sources of Pallas, Mosaic GPU and this library, but for the tuner's.

    None where these may not be what this process runs.
    """
    jaxs, ours = _roots()
    sources = hashlib.sha256()
    for path in _sources(jaxs / "_src" / "pallas", jaxs / "experimental" / "mosaic" / "gpu", ours):
        if path.stat().st_mtime > _STARTED:
            _log.debug("kernels are not kept, as %s has changed since they were imported", path)
            return None
        sources.update(path.read_bytes())
    return jax.__version__, jaxlib.__version__, sources.hexdigest()


def _roots() -> tuple[Path, Path]:
    """The folders of JAX and of this library."""
    jaxs, ours = (Path(sys.modules[name].__path__[0]) for name in ("jax", __package__.partition(".")[0]))
    return jaxs, ours


def _sources(*roots: Path) -> Iterator[Path]:
    for folder, folders, files in (found for root in roots for found in os.walk(root, followlinks=True)):
        folders[:] = sorted({*folders} - {"tuning", "__pycache__"})
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


class _Words:
    """Words that are the same for two values if a kernel that reads either is lowered to the same."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._numbers: dict[int, int] = {}  # of variables and jaxprs, in the order in which they appear
        self._kept: list[Any] = []  # whose ids must stay theirs

    def value(self, x: Any) -> None:
        kind: Any = type(x)
        _reader(kind)(self, x)

    def _plain(self, x: Any) -> None:
        self._add(f"{type(x).__name__} {x!r}")

    def _literal(self, x: Any) -> None:
        self._add("literal")
        self.value(x.val)
        self.value(x.aval)

    def _name(self, x: Any) -> None:
        kind = x if isinstance(x, type) else type(x)
        self._add(f"{kind.__module__}.{kind.__qualname__} {'' if kind is x else x.name}")

    def _array(self, x: Any) -> None:
        array = np.asarray(x)
        self._add(f"array {array.dtype} {array.shape} {array.tobytes().hex()}")

    def _shaped(self, x: Any) -> None:
        """Wherever it is sharded, a kernel has all of it."""
        self._add(f"{type(x).__name__} {x.shape} {_named(x.dtype)} {x.weak_type} {x.memory_space}")

    def _sharding(self, x: Any) -> None:
        self._add("sharding")

    def _add(self, word: str) -> None:
        if " at 0x" in word:
            raise _UnknownError(word)
        self.found.append(word)

    def _many(self, values: Any) -> None:
        self._add(f"{type(values).__name__} {len(values)}")
        if isinstance(values, set | frozenset):
            values = sorted(values, key=repr)
        for x in values.items() if isinstance(values, Mapping) else values:
            self.value(x)

    def _number(self, x: Any) -> tuple[int, bool]:
        """Its number, and whether it has had one before."""
        known = id(x) in self._numbers
        if not known:
            self._numbers[id(x)] = len(self._numbers)
            self._kept.append(x)
        return self._numbers[id(x)], known

    def _variable(self, x: Any) -> None:
        number, known = self._number(x)
        self._add(f"variable {number}")
        if not known:
            self.value(x.aval)

    def _jaxpr(self, x: Any) -> None:
        number, known = self._number(x)
        self._add(f"jaxpr {number}")
        if known:
            return
        self.value([*x.constvars, *x.invars])
        self.value(list(x.consts))
        for eqn in x.eqns:
            self.value([eqn.primitive.name, eqn.invars, eqn.params, eqn.outvars])
        self.value(x.outvars)

    def _object(self, x: Any) -> None:
        """Functions with all that they close over, and records of this library and of JAX."""
        kind = type(x)
        if isinstance(x, functools.partial):
            self.value(["partial", x.func, x.args, x.keywords])
        elif isinstance(x, types.MethodType):
            self.value(["method", x.__self__, x.__func__])
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):  # `repr` leaves out elements
            raise _UnknownError("an array on a device")
        elif not f"{kind.__module__}.".startswith(_OURS):
            raise _UnknownError(f"{kind.__module__}.{kind.__qualname__}")
        elif dataclasses.is_dataclass(x):
            self.value([kind, *((field.name, getattr(x, field.name)) for field in dataclasses.fields(x))])
        elif isinstance(x, AbstractRef):
            self.value([kind, x.inner_aval, x.memory_space, x.kind, getattr(x, "__dict__", {})])
        elif "__repr__" in {name for base in kind.__mro__[:-1] for name in vars(base)}:
            self._add(f"{kind.__module__}.{kind.__qualname__} {x!r}")
        else:
            raise _UnknownError(f"{kind.__module__}.{kind.__qualname__}")

    def _function(self, x: types.FunctionType) -> None:
        if not f"{x.__module__}.".startswith(_OURS):
            raise _UnknownError(f"function {x.__module__}.{x.__qualname__}")
        number, known = self._number(x)
        self._add(f"function {number} {x.__module__} {x.__qualname__} {x.__code__.co_firstlineno} {x.__code__.co_code.hex()}")
        if not known:
            try:
                self.value([x.__defaults__, x.__kwdefaults__, [cell.cell_contents for cell in x.__closure__ or ()]])
            except ValueError:  # an empty cell
                raise _UnknownError(f"function {x.__module__}.{x.__qualname__}") from None


# Of the first ones, `repr` says all that there is. JAX's numbers of a dtype are among them.
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, np.generic, np.dtype, tree_util.PyTreeDef)
_READERS: tuple[tuple[Any, Callable[[_Words, Any], None]], ...] = (
    (enum.Enum | type, _Words._name),
    (_PLAIN, _Words._plain),
    (jax_core.Var, _Words._variable),
    (jax_core.Literal, _Words._literal),
    (jax_core.Jaxpr, _Words._jaxpr),
    (list | tuple | set | frozenset | Mapping, _Words._many),
    (np.ndarray | TypedNdArray, _Words._array),
    (jax_core.ShapedArray, _Words._shaped),
    (jax.sharding.Sharding, _Words._sharding),
    (object, _Words._object),
)


@functools.cache
def _reader(kind: Any) -> Callable[[_Words, Any], None]:
    return next(reader for kinds, reader in _READERS if issubclass(kind, kinds))


@functools.cache
def _named(dtype: Any) -> str:
    return repr(dtype)
