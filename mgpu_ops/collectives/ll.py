"""The LL protocol (the name is NCCL's): data that carry their own flags between GPUs.

Four bytes of data and four of flag are stored and loaded as one word of 64 bits. A reader polls the words themselves: it needs
no signal, no fence and no wait for complete stores. So data take one trip over the link, for twice the bytes. The protocol
rests on 64-bit stores and loads being single (PTX ISA, "Memory consistency model": a vector is several accesses, each of 64
bits here) and on memory that is zero before.

An LL buffer is int32, twice as wide as the rows of data in it. Values have a layout `Layout.WG_STRIDED`, in which each of 128
threads has 4 or 8 bytes in a row. A place in an LL buffer is a ref or an `Address`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

_THREADS = 128
_SCALAR = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Address:
    """A place in the memory of this or another GPU, which XLA need not know: address in two int32, offset in bytes."""

    low: Any
    high: Any
    offset: Any


@dataclasses.dataclass(frozen=True)
class Deadline:
    """How long a wait for data lasts, and where it reports those that did not come.

    late: int32 [devices + 1] in global memory, zeros at first. After `seconds`, the wait writes 1 to late[sender] for each
      place whose data are not there, then to the last word, on which all other waits end, too. The missing data are undefined.
    senders: an int32 for each place.
    """

    late: Any
    senders: Sequence[Any]
    seconds: float


def store(value: Any, where: Any, layout: Any, flag: Any) -> None:
    """Stores `value` to a place in an LL buffer, on the own or another GPU, each word with `flag`, an int32."""

    @plgpu.inline_mgpu(arg_types=(layout, _SCALAR, *_types(where)))
    def store_ll(_: Any, value: Any, flag: Any, *where: Any) -> None:
        words = _words(value.layout.vec_size, value.mlir_dtype)
        start = _start(where, words)
        for i, register in enumerate(value.registers.flat):
            data = [_word(register, word) for word in range(words)]
            pairs = "".join(f"mov.b64 a{w}, {{$1, ${w + 2}}}; " for w in range(words))
            store = f"st.relaxed.sys.global{_vector(words)}.b64 [$0+{_offset(i, words)}], {_list('a', words)};"
            utils.inline_ptx(
                f"{{ .reg .b64 a<{words}>; {pairs}{store} }}",
                start,
                _scalar(flag),
                *data,
                has_side_effects=True,
            )

    store_ll(value, flag, *_operands(where))


def load(
    places: Sequence[Any], shape: tuple[int, ...], dtype: Any, layout: Any, flag: Any, deadline: Deadline | None = None
) -> list[Any]:
    """Waits until all words at each of `places` have `flag`, and returns their data, arrays of `shape`."""
    out = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    types = [_types(where) for where in places]
    waiting = [] if deadline is None else [deadline.late, *deadline.senders]
    waiting_types = [] if deadline is None else [plgpu.RefType(), *[_SCALAR] * len(places)]

    @plgpu.inline_mgpu(arg_types=[_SCALAR, *itertools.chain(*types), *waiting_types], return_type=[out] * len(places))
    def load_ll(_: Any, flag: Any, *operands: Any) -> list[Any]:
        element = utils.dtype_to_ir_type(jnp.dtype(dtype))
        mosaic_layout = layout.to_mgpu()
        words = _words(mosaic_layout.vec_size, element)
        (registers,) = mosaic_layout.registers_shape(shape)
        left = iter(operands)
        starts = [_start(tuple(itertools.islice(left, len(of_one))), words) for of_one in types]
        late = None if deadline is None else _Late(*left, seconds=deadline.seconds)
        loaded = iter(_wait_for(starts, registers, words, _scalar(flag), late))
        signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
        return [
            mgpu.FragmentedArray(
                _registers=np.array([_joined([next(loaded) for _ in range(words)], element) for _ in range(registers)], object),
                _layout=mosaic_layout,
                _is_signed=signed,
            )
            for _ in places
        ]

    return load_ll(flag, *itertools.chain(*map(_operands, places)), *waiting)


class _Late:
    """A `Deadline` within a kernel that is lowered."""

    def __init__(self, late: Any, *senders: Any, seconds: float) -> None:
        (words,) = late.type.shape
        self.pointer, self.last = utils.memref_ptr(late), 4 * (words - 1)
        self.senders = [_scalar(sender) for sender in senders]
        self.nanoseconds = max(1, round(seconds * 1e9))


def read_word(where: Address) -> Any:
    """The int32 at an address, as kernels before this one stored it."""

    @plgpu.inline_mgpu(arg_types=_types(where), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR))
    def read(_: Any, *where: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        (word,) = utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];", _address(where), result_types=[i32], has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(word, (), is_signed=True)

    return read(*_operands(where))


def write_word(value: Any, where: Address) -> None:
    """Stores an int32 at an address."""

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *_types(where)))
    def write(_: Any, value: Any, *where: Any) -> None:
        utils.inline_ptx("st.relaxed.gpu.global.b32 [$0], $1;", _address(where), _scalar(value), has_side_effects=True)

    write(value, *_operands(where))


def _wait_for(starts: Sequence[Any], registers: int, words: int, flag: Any, late: _Late | None = None) -> Sequence[Any]:
    """The words of data at all places. One loop loads them again until all have the flag, or the deadline is over."""
    i32 = ir.IntegerType.get_signless(32)
    vectors = [(start, i) for start in range(len(starts)) for i in range(registers)]
    count = len(vectors) * words
    loads = "".join(
        f"ld.relaxed.sys.global{_vector(words)}.b64 {_list('a', words, number * words)}, "
        f"[${count + 1 + start}+{_offset(i, words)}]; "
        for number, (start, i) in enumerate(vectors)
    )
    if late is None:
        parts = "".join(
            f"mov.b64 {{f, ${word}}}, a{word}; xor.b32 f, f, ${count}; or.b32 all, all, f; " for word in range(count)
        )
        code = (
            f"{{ .reg .b64 a<{count}>; .reg .b32 f, all; .reg .pred late;\nAGAIN: {loads}mov.b32 all, 0; {parts}"
            "setp.ne.b32 late, all, 0; @late bra AGAIN; }"
        )
        operands = [flag, *starts]
    else:
        code = _until_late(loads, count, len(starts), late)
        operands = [flag, *starts, late.pointer, *late.senders]
    return utils.inline_ptx(code, *operands, result_types=[i32] * count, has_side_effects=True)


def _until_late(loads: str, count: int, starts: int, late: _Late) -> str:
    """The loop of `_wait_for` with a deadline. The first thread that reaches it ends the waits of all."""
    pointer, each = count + 1 + starts, count // starts
    missing = "".join(
        f"mov.b64 {{f, ${word}}}, a{word}; xor.b32 f, f, ${count}; or.b32 m{word // each}, m{word // each}, f; "
        for word in range(count)
    )
    zeros = "".join(f"mov.b32 m{start}, 0; " for start in range(starts))
    all_ = "mov.b32 f, 0; " + "".join(f"or.b32 f, f, m{start}; " for start in range(starts))
    names = "".join(
        f"setp.ne.b32 p, m{start}, 0; mad.wide.s32 there, ${pointer + 1 + start}, 4, ${pointer}; "
        "@p st.relaxed.gpu.global.b32 [there], 1; "
        for start in range(starts)
    )
    return (
        f"{{ .reg .b64 a<{count}>, began, now, there; .reg .b32 f, m<{starts}>; .reg .pred p;\n"
        f"mov.u64 began, %globaltimer;\nAGAIN: {loads}{zeros}{missing}{all_}setp.eq.b32 p, f, 0; @p bra DONE; "
        f"ld.relaxed.gpu.global.b32 f, [${pointer}+{late.last}]; setp.ne.b32 p, f, 0; @p bra DONE; "
        f"mov.u64 now, %globaltimer; sub.u64 now, now, began; setp.lt.u64 p, now, {late.nanoseconds}; @p bra AGAIN; "
        f"{names}st.relaxed.gpu.global.b32 [${pointer}+{late.last}], 1;\nDONE: }}"
    )


def _types(where: Any) -> list[Any]:
    return [_SCALAR] * 3 if isinstance(where, Address) else [plgpu.RefType()]


def _operands(where: Any) -> list[Any]:
    return [where.low, where.high, where.offset] if isinstance(where, Address) else [where]


def _scalar(x: Any) -> Any:
    return x.registers.item() if isinstance(x, mgpu.FragmentedArray) else x


def _words(vector: int, element: Any) -> int:
    words, rest = divmod(vector * utils.bitwidth(element), 32)
    if rest or words not in (1, 2):
        raise ValueError(f"{vector} elements of {element} a thread: LL takes 4 or 8 bytes of data in a row")
    return words


def _start(where: Sequence[Any], words: int) -> Any:
    """The address of this thread's first LL word, from the operands that stand for a ref or an `Address`."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    thread = arith.remui(utils.thread_idx(), utils.c(_THREADS, i32))
    word = arith.muli(thread, utils.c(words, i32))
    if len(where) == 1:
        return utils.getelementptr(utils.memref_ptr(where[0]), [word], i64)
    return arith.addi(_address(where), arith.muli(arith.extui(i64, word), utils.c(8, i64)))


def _address(where: Sequence[Any]) -> Any:
    """The operands of an `Address` as one number."""
    i64 = ir.IntegerType.get_signless(64)
    low, high, offset = (arith.extui(i64, _scalar(x)) for x in where)
    return arith.addi(arith.ori(low, arith.shli(high, utils.c(32, i64))), offset)


def _offset(register: int, words: int) -> int:
    return register * _THREADS * words * 8


def _vector(words: int) -> str:
    return ".v2" if words == 2 else ""


def _list(name: str, count: int, first: int = 0) -> str:
    names = ", ".join(f"{name}{first + i}" for i in range(count))
    return f"{{{names}}}" if count > 1 else names


def _word(register: Any, word: int) -> Any:
    """The word-th 32 bits of a vector."""
    i32 = ir.IntegerType.get_signless(32)
    per_word = ir.VectorType(register.type).shape[0] * 32 // utils.bitwidth(register.type)
    return utils.bitcast(utils.vector_slice(register, slice(word * per_word, (word + 1) * per_word)), i32)


def _joined(words: Sequence[Any], element: Any) -> Any:
    """The inverse of `_word`, of all words."""
    i32 = ir.IntegerType.get_signless(32)
    one = ir.VectorType.get((1,), i32)
    vector = utils.vector_concat([utils.bitcast(word, one) for word in words])
    return utils.bitcast(vector, ir.VectorType.get((len(words) * 32 // utils.bitwidth(element),), element))
