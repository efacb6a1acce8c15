"""Runs what JAX's GPU interpreter makes of a warpgroup op by op, on NumPy's arrays.

It is thousands of ops on scalars and small tiles that run once: XLA takes several times as long to compile them as they take to
run. An op that NumPy has not, or computes otherwise, goes to JAX as it is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax.extend import core as jex

Op = Callable[..., Sequence[Any]]  # of the values of an equation's inputs: those of its outputs

# Of other types, NumPy's ops saturate, wrap or round as JAX's need not.
_PLAIN = frozenset(map(jnp.dtype, ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_PLAIN |= frozenset(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def run(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The outputs of `jaxpr`, as NumPy's arrays."""
    with np.errstate(all="ignore"):
        return _program(jaxpr)(consts, args)


def _array(x: Any) -> Any:
    """x as NumPy's array, unless it is what only JAX has, as keys of random numbers."""
    return np.asarray(x) if isinstance(getattr(x, "dtype", None), np.dtype) else x


class _Program:
    """A jaxpr whose variables have places in a list."""

    def __init__(self, jaxpr: Any):
        self._places: dict[Any, int] = {}
        self._known: list[Any] = []
        self._consts, self._inputs = self._of(jaxpr.constvars), self._of(jaxpr.invars)
        self._steps = [(_op(e), self._of(e.invars), self._of(e.outvars)) for e in jaxpr.eqns]
        self._outputs = self._of(jaxpr.outvars)

    def _of(self, variables: Sequence[Any]) -> list[int]:
        return [self._place(x) for x in variables]

    def _place(self, x: Any) -> int:
        if isinstance(x, jex.Literal):
            aval: Any = x.aval
            self._known.append(np.asarray(x.val, aval.dtype))
            return len(self._known) - 1
        if x not in self._places:
            self._places[x] = len(self._known)
            self._known.append(None)
        return self._places[x]

    def __call__(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = list(self._known)
        for place, x in zip((*self._consts, *self._inputs), (*consts, *args), strict=True):
            values[place] = _array(x)
        for op, inputs, outputs in self._steps:
            for place, x in zip(outputs, op(*[values[i] for i in inputs]), strict=True):
                values[place] = x
        return [values[i] for i in self._outputs]


_programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()


def _program(jaxpr: Any) -> _Program:
    found = _programs.get(jaxpr)
    if found is None:
        found = _programs[jaxpr] = _Program(jaxpr)
    return found


def _closed(closed: Any) -> Callable[..., list[Any]]:
    program = _program(closed.jaxpr)
    return lambda *args: program(closed.consts, args)


def _op(equation: Any) -> Op:
    """What computes an equation."""
    name = equation.primitive.name
    plain = all(getattr(x.aval, "dtype", None) in _PLAIN for x in (*equation.invars, *equation.outvars))
    make = _PROGRAMS.get(name) or (_OPS.get(name) if plain else None)
    return (make(equation) if make else None) or _by_jax(equation)


def _by_jax(equation: Any) -> Op:
    primitive, several = equation.primitive, equation.primitive.multiple_results
    found = primitive.get_bind_params(equation.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # up to jax 0.11, or from 0.12

    def op(*args: Any) -> list[Any]:
        out = primitive.bind(*functions, *args, **params)
        return [_array(x) for x in (out if several else [out])]

    return op


# --- Programs in programs


def _callback(equation: Any) -> Op:
    types = [x.aval.dtype for x in equation.outvars]

    def op(*args: Any) -> list[Any]:  # copies: what the simulator returns may be its memory
        return [np.array(x, t) for x, t in zip(callbacks.io_callback_impl(*args, **equation.params), types, strict=True)]

    return op


def _call(name: str) -> Callable[[Any], Op]:
    return lambda equation: _closed(equation.params[name])


def _cond(equation: Any) -> Op:
    branches = [_closed(x) for x in equation.params["branches"]]
    last = len(branches) - 1
    return lambda which, *args: branches[min(max(int(which), 0), last)](*args)


def _while(equation: Any) -> Op:
    params = equation.params
    test, step = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    of_test, of_both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def op(*args: Any) -> Sequence[Any]:
        carry: Sequence[Any] = args[of_both:]
        while test(*args[:of_test], *carry)[0]:
            carry = step(*args[of_test:of_both], *carry)
        return carry

    return op


def _scan(equation: Any) -> Op:
    params = equation.params
    step = _closed(params["jaxpr"])
    if "num_consts" in params:  # up to jax 0.11
        consts, carried = params["num_consts"], params["num_carry"]
    else:
        consts, carried, _ = (len(list(x)) for x in params["ft_in"].update(equation.invars).unpack())
    order = range(params["length"])
    stacked = [x.aval for x in equation.outvars[carried:]]

    def op(*args: Any) -> list[Any]:
        carry, rows = list(args[consts : consts + carried]), args[consts + carried :]
        found = [np.empty(aval.shape, aval.dtype) for aval in stacked]
        for i in reversed(order) if params["reverse"] else order:
            out = step(*args[:consts], *carry, *(x[i] for x in rows))
            carry = out[:carried]
            for whole, x in zip(found, out[carried:], strict=True):
                whole[i] = x
        return carry + found

    return op


# --- Arrays


def _elementwise(function: Callable[..., Any]) -> Callable[[Any], Op]:
    def make(equation: Any) -> Op:
        dtype = equation.outvars[0].aval.dtype
        return lambda *args: (np.asarray(function(*args), dtype),)

    return make


def _floats_only(function: Callable[..., Any]) -> Callable[[Any], Op | None]:
    """For float32: of fewer bits NumPy's functions are slow."""

    def make(equation: Any) -> Op | None:
        return _elementwise(function)(equation) if equation.outvars[0].aval.dtype == np.float32 else None

    return make


def _integer_division(floats: Callable[..., Any], integers: Callable[..., Any]) -> Callable[[Any], Op]:
    def make(equation: Any) -> Op:
        aval = equation.outvars[0].aval
        if not np.issubdtype(aval.dtype, np.integer):
            return _elementwise(floats)(equation) if aval.dtype == np.float32 else _by_jax(equation)
        by_jax, by_numpy = _by_jax(equation), _elementwise(integers)(equation)
        return lambda x, y: by_numpy(x, y) if np.all(y) else by_jax(x, y)

    return make


def _towards_zero(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


def _convert(equation: Any) -> Op | None:
    old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    if jnp.issubdtype(old, jnp.floating) and not jnp.issubdtype(new, jnp.floating):
        return None  # NumPy leaves open what becomes of a number that does not fit
    return lambda x: (x.astype(new),)


def _select(equation: Any) -> Op | None:
    if equation.invars[0].aval.dtype != np.bool_ or len(equation.invars) != 3:
        return None
    return lambda which, x, y: (np.where(which, y, x),)


def _broadcast(equation: Any) -> Op | None:
    if len(equation.invars) > 1:
        return None
    shape, where = equation.params["shape"], equation.params["broadcast_dimensions"]

    def op(x: Any) -> Sequence[Any]:
        sizes = [1] * len(shape)
        for i, size in zip(where, x.shape, strict=True):
            sizes[i] = size
        return (np.broadcast_to(x.reshape(sizes), shape),)

    return op


def _reshape(equation: Any) -> Op:
    shape = equation.outvars[0].aval.shape
    return lambda x, *_: (x.reshape(shape),)


def _transpose(equation: Any) -> Op:
    order = equation.params["permutation"]
    return lambda x: (x.transpose(order),)


def _slice(equation: Any) -> Op:
    params = equation.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    window = tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
    return lambda x: (x[window],)


def _dynamic_slice(equation: Any) -> Op:
    sizes = equation.params["slice_sizes"]

    def op(x: Any, *starts: Any) -> Sequence[Any]:
        starts = tuple(min(max(int(i), 0), whole - size) for i, whole, size in zip(starts, x.shape, sizes, strict=True))
        return (x[tuple(slice(i, i + size) for i, size in zip(starts, sizes, strict=True))],)

    return op


def _pad(equation: Any) -> Op | None:
    config = equation.params["padding_config"]
    if any(low < 0 or high < 0 or between for low, high, between in config):
        return None
    inside = tuple(slice(low, low + size) for (low, _, _), size in zip(config, equation.invars[0].aval.shape, strict=True))
    aval = equation.outvars[0].aval

    def op(x: Any, value: Any) -> Sequence[Any]:
        out = np.full(aval.shape, value, aval.dtype)
        out[inside] = x
        return (out,)

    return op


def _concatenate(equation: Any) -> Op:
    axis = equation.params["dimension"]
    return lambda *args: (np.concatenate(args, axis),)


def _iota(equation: Any) -> Op | None:
    if equation.invars:
        return None
    shape, axis, aval = equation.params["shape"], equation.params["dimension"], equation.outvars[0].aval
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    known = np.broadcast_to(np.arange(shape[axis]).astype(aval.dtype).reshape(sizes), shape)
    return lambda: (known,)


def _reduction(function: Callable[..., Any]) -> Callable[[Any], Op | None]:
    def make(equation: Any) -> Op | None:
        old, aval, axes = equation.invars[0].aval, equation.outvars[0].aval, tuple(equation.params["axes"])
        if aval.dtype not in (np.float32, np.int32, np.bool_) or math.prod(old.shape) == 0:
            return None
        return lambda x: (np.asarray(function(x, axis=axes), aval.dtype),)

    return make


def _product(equation: Any) -> Op | None:
    (over, batch), dtype = equation.params["dimension_numbers"], equation.outvars[0].aval.dtype
    if dtype != np.float32 or any(batch) or any(len(x.aval.shape) != 2 for x in equation.invars):
        return None
    (of_a,), (of_b,) = over

    def op(a: Any, b: Any) -> Sequence[Any]:
        a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
        return ((a.T if of_a == 0 else a) @ (b.T if of_b == 1 else b),)

    return op


_PROGRAMS: dict[str, Callable[[Any], Op]] = {
    "io_callback": _callback,
    "jit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "optimization_barrier": lambda _: lambda *args: args,
}

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_FLOAT32: dict[str, Callable[..., Any]] = {
    "exp2": np.exp2,
    "exp": np.exp,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
}
_OPS: dict[str, Callable[[Any], Op | None]] = {
    **{name: _elementwise(function) for name, function in _ELEMENTWISE.items()},
    **{name: _floats_only(function) for name, function in _FLOAT32.items()},
    "div": _integer_division(np.divide, _towards_zero),
    "rem": _integer_division(np.fmod, np.fmod),
    "convert_element_type": _convert,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "dot_general": _product,
}
