"""Windows of rows: the tensor maps and coordinates that TMA gets, and the copies that come of them."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from mgpu_ops.core import aot, engine, tma
from mgpu_ops.core.rows import load_rows, rows_view, store_rows
from tests.thorough import examples

BF16 = jnp.bfloat16
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


# --- the tensor map and the coordinates, as TMA would take them


class Addressed:
    """What TMA does with a transform of a bfloat16 array [1, 1, rows, columns] and the block of `shape` at (row, column)."""

    def __init__(self, transform: Any, array: tuple[int, int], shape: tuple[int, int], row: int, column: int, end: int = 0):
        with mlir.make_ir_context(), ir.Location.unknown():
            module = ir.Module.create()
            with ir.InsertionPoint(module.body):
                constant = lambda x: utils.c(x, ir.IndexType.get())  # noqa: E731
                self.transform = transform(constant(end))
                index = self.transform.transform_index((constant(0), constant(0), constant(row), constant(column)))
                self.origin = [_evaluated(i) for i in index]
                ref_type = ir.MemRefType.get((1, 1, *array), ir.BF16Type.get())
                function = func.FuncOp("f", ([ref_type], []))
                with ir.InsertionPoint(function.add_entry_block()):
                    view = self.transform.apply(function.arguments[0])
                    func.ReturnOp([])
            assert module.operation.verify()
            self.sizes = list(view.type.shape)
            self.strides = view.type.get_strides_and_offset()[0]
        self.box = self.transform.transform_shape((1, 1, *shape))
        self.gmem_shape = list(self.transform.transform_gmem_shape((1, 1, *array)))

    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        """For each element of the box: which of the array's it is, in 64-bit byte addresses, and whether it is inside."""
        at, inside = np.zeros(self.box, np.uint64), np.ones(self.box, bool)
        for axis, (origin, size, stride) in enumerate(zip(self.origin, self.sizes, self.strides, strict=True)):
            coordinate = (origin + np.arange(self.box[axis])).reshape(-1, *[1] * (len(self.box) - axis - 1))
            inside &= (coordinate >= 0) & (coordinate < size)
            at = at + coordinate.astype(np.uint64) * np.uint64(2 * stride)  # modulo 2^64
        return at // np.uint64(2), inside


def _evaluated(x: Any) -> int:
    """The value of a tree of integer arithmetic on constants."""
    if isinstance(x, int):
        return x
    op = x.owner
    if op.name == "arith.constant":
        return ir.IntegerAttr(op.attributes["value"]).value
    a, b = map(_evaluated, op.operands)
    functions = {"arith.addi": a + b, "arith.subi": a - b, "arith.divui": a // max(b, 1), "arith.remui": a % max(b, 1)}
    return functions[op.name]


def block(array: tuple[int, int], shape: tuple[int, int], row: int, column: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns, and element numbers of a block of an array."""
    rows, columns = np.meshgrid(row + np.arange(shape[0]), column + np.arange(shape[1]), indexing="ij")
    return rows, columns, rows * array[1] + columns


def in_panels(x: np.ndarray, panel: int) -> np.ndarray:
    """[rows, columns] -> [panels, rows, panel]."""
    return x.reshape(x.shape[0], -1, panel).swapaxes(0, 1)


@st.composite
def windows(draw: Any, panel: int | None) -> tuple[tuple[int, int], tuple[int, int], int, int, int]:
    """(array, shape of the block, first row, first column, end)."""
    unit = panel or 8
    array = draw(st.integers(1, 400)), unit * draw(st.integers(1, 6))
    shape = 8 * draw(st.integers(1, 4)), unit * draw(st.integers(1, 2))
    column = unit * draw(st.integers(0, array[1] // unit))
    return array, shape, draw(st.integers(0, array[0] + 70)), column, draw(st.integers(0, array[0]))


@given(windows(None))
def test_window_addresses_the_rows_before_its_end_and_the_columns_of_the_array(window):
    array, shape, row, column, end = window
    tensor = Addressed(lambda end: tma._WindowOfRows(None, end), array, shape, row, column, end)
    at, inside = (x.reshape(shape) for x in tensor.elements())
    rows, columns, wanted = block(array, shape, row, column)
    np.testing.assert_array_equal(inside, (rows < end) & (columns < array[1]))
    np.testing.assert_array_equal(at[inside], wanted[inside])


@given(windows(64))
def test_window_in_panels_addresses_the_same_rows_panel_after_panel(window):
    array, shape, row, column, end = window
    tensor = Addressed(lambda end: tma._WindowOfRows(64, end), array, shape, row, column, end)
    at, inside = (x[0, 0] for x in tensor.elements())
    rows, columns, wanted = (in_panels(x, 64) for x in block(array, shape, row, column))
    np.testing.assert_array_equal(inside, (rows < end) & (columns < array[1]))
    np.testing.assert_array_equal(at[inside], wanted[inside])


@given(windows(64), st.data())
def test_rows_anywhere_address_a_block_inside_the_array_tile_after_tile(window, data):
    array, shape, *_ = window
    array = max(array[0], shape[0]), max(array[1], shape[1])
    row = data.draw(st.integers(0, array[0] - shape[0]))
    column = 64 * data.draw(st.integers(0, (array[1] - shape[1]) // 64))
    tensor = Addressed(lambda _: tma._RowsAnywhere(8, 64), array, shape, row, column)
    at, inside = (x[0, 0] for x in tensor.elements())  # [rows / 8, panels, 8, 64]
    *_, wanted = block(array, shape, row, column)
    assert inside.all()
    np.testing.assert_array_equal(at, wanted.reshape(-1, 8, shape[1] // 64, 64).swapaxes(1, 2))


TRANSFORMS = {
    "rows": lambda end: tma._WindowOfRows(None, end),
    "panels": lambda end: tma._WindowOfRows(64, end),
    "anywhere": lambda _: tma._RowsAnywhere(8, 64),
}


@pytest.mark.parametrize("columns", [64, 4096, 2**20])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensor_map_is_one_that_cuda_accepts(name, columns):
    """Source: CUDA driver API, cuTensorMapEncodeTiled."""
    rows = 2**27 // columns * 8
    tensor = Addressed(TRANSFORMS[name], (rows, columns), (64, 64), rows - 1, columns - 64, rows)
    assert tensor.sizes == tensor.gmem_shape
    sizes, strides, box, origin = ([*x] for x in (tensor.sizes, tensor.strides, tensor.box, tensor.origin))
    while len(sizes) > 5:  # Mosaic leaves out leading dimensions of one
        assert sizes.pop(0) == box.pop(0) == 1
        strides.pop(0)
        origin.pop(0)
    assert all(0 < size <= 2**32 for size in sizes)
    assert strides[-1] == 1
    assert all(2 * stride % 16 == 0 and 0 < 2 * stride < 2**40 for stride in strides[:-1])
    assert all(0 < length <= 256 for length in box)
    assert np.prod(box) == 64 * 64
    assert all(-(2**31) <= o < 2**31 for o in origin)


def test_one_tensor_map_serves_windows_of_every_end():
    first, second, other = tma._WindowOfRows(64, "one"), tma._WindowOfRows(64, "another"), tma._WindowOfRows(None, "one")
    assert first == second
    assert hash(first) == hash(second)
    assert first != other


# --- kernels of others

PLAIN = """
import sys
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

def lowered(array, block, where, semantics, transforms):
    def body(x_ref, out_ref, smem, full):
        at = where(lax.axis_index("block"))
        plgpu.copy_gmem_to_smem(x_ref.at[at], smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(smem, out_ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct(array, jnp.bfloat16)
    scratch = [plgpu.SMEM(block, jnp.bfloat16, transforms=transforms), plgpu.Barrier()]
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    names = dict(grid=(4,), grid_names=("block",), num_threads=1, thread_name="wg")
    run = plgpu.kernel(body, out_type=x, scratch_types=scratch, compiler_params=params, **names)
    try:
        return jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    except ValueError as error:
        return str(error)

def kernels():
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    rows = lambda i: (pl.ds(i * 64, 64), pl.ds(0, 64))
    for semantics in plgpu.LoweringSemantics.Warpgroup, plgpu.LoweringSemantics.Lane:
        for transforms in (), tiles:
            yield lowered((1, 1, 256, 128), (64, 64), lambda i: (0, 0, *rows(i)), semantics, transforms)
            yield lowered((1, 1, 256, 128), (64, 64), lambda i: (i * 0, i * 0, *rows(i)), semantics, transforms)
            yield lowered((250, 72), (64, 64), rows, semantics, transforms)
        yield lowered((1, 1, 256, 128), (1, 1, 64, 64), lambda i: (slice(None), slice(None), *rows(i)), semantics, ())

if "with" in sys.argv:
    import mgpu_ops.core.engine
for text in kernels():
    print(repr(text))
"""


def test_kernels_of_others_lower_to_the_same_with_and_without_mgpu_ops():
    """Arrays that begin [1, 1], and arrays that swizzle tiles do not divide, which Mosaic refuses.

    In a process each: jax 0.11 numbers the kernels of a process.
    """
    commands = [[sys.executable, "-c", PLAIN, word] for word in ("with", "without")]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(c, stdout=subprocess.PIPE, text=True)) for c in commands]
        ours, plain = (process.communicate()[0].splitlines() for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert sum("mosaic_gpu" in text for text in plain) == 12
    assert ours == plain


# --- copies


@pytest.fixture
def clean_interpreter() -> Iterator[None]:
    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    engine.reset_interpreter()


def copied(array: tuple[int, int], width: int, apart: bool, *, interpret: bool) -> Any:
    """A kernel of where[5] and x: 64 rows of x, from `row` and before `end`, to those from `to` and before `stop`.

    Of the columns, the `across`-th `width` ones. apart: panels of 64 of them lie one after the other.
    """
    panels = width // 64 if apart else 1
    block = (panels, 64, width // panels) if apart else (64, width)

    def body(where_ref: Any, x_ref: Any, out_ref: Any, *, smem: Any, full: Any) -> None:
        row, end, across, to, stop = (where_ref[i] for i in range(5))
        column = across * width
        load_rows(x_ref, row, end, column, smem, full)
        plgpu.barrier_wait(full)
        for panel in range(panels):
            store_rows(smem.at[panel] if apart else smem, out_ref, to, stop, column + panel * 64)
        plgpu.wait_smem_to_gmem(0)

    run = engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=1, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((1, 1, *array), BF16),
        scratch_types={
            "smem": plgpu.SMEM(block, BF16, transforms=engine.operand_transforms(block[-1], BF16, 128)),
            "full": plgpu.Barrier(),
        },
    )
    return jax.jit(lambda where, x: run(where, rows_view(x)).reshape(array))


def wanted_copy(where: Sequence[int], x: np.ndarray, width: int) -> np.ndarray:
    """NaN where nothing is written, which is what the interpreter's memory holds."""
    row, end, across, to, stop = where
    column = across * width
    out = np.full(x.shape, np.nan, np.float32)
    for i in range(64):
        if to + i < stop:
            source = x[row + i, column : column + width] if row + i < end else 0
            out[to + i, column : column + width] = source
    return out


@pytest.mark.parametrize(
    ("columns", "width", "apart"), [(72, 64, False), (128, 64, False), (192, 128, False), (256, 128, True)]
)
def test_only_the_rows_before_the_end_are_copied(columns, width, apart, clean_interpreter):
    rows = 150
    run = copied((rows, columns), width, apart, interpret=True)
    x = np.arange(rows * columns).reshape(rows, columns) % 251 - 125.0  # bfloat16s

    @examples(15)
    @given(
        st.lists(st.integers(0, rows), min_size=2, max_size=2),
        st.lists(st.integers(0, rows), min_size=2, max_size=2),
        st.integers(0, (columns - 1) // width),
    )
    def check(source: list[int], target: list[int], across: int) -> None:
        where = [source[0], source[1], across, target[0], target[1]]
        out = run(np.array(where, np.int32), x.astype(BF16))
        np.testing.assert_array_equal(np.asarray(out, np.float32), wanted_copy(where, x, width))
        assert not engine.races_found()

    check()


@needs_compiler
@pytest.mark.parametrize(
    ("columns", "width", "apart", "loads", "stores"), [(72, 64, False, 1, 1), (192, 128, False, 9, 9), (256, 128, True, 1, 2)]
)
def test_windows_compile_to_tma_copies_without_spills(columns, width, apart, loads, stores):
    """Several panels take one copy where all rows are before the end, and else one for each eight rows; or always one."""
    where, x = jax.ShapeDtypeStruct((5,), jnp.int32), jax.ShapeDtypeStruct((150, columns), BF16)
    report = aot.compile_for("h200", copied((150, columns), width, apart, interpret=False), where, x)
    assert report.spills == 0
    assert report.sass.count("UTMALDG") == loads
    assert report.sass.count("UTMASTG") == stores
    assert report.ptx.count("cp.async.bulk.tensor") == loads + stores


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "width", "apart"),
    [(72, 64, False), (128, 64, False), (192, 128, False), (384, 192, False), (256, 128, True), (384, 192, True)],
)
def test_only_the_rows_before_the_end_are_copied_on_a_gpu(columns, width, apart):
    rows = 150
    run = copied((rows, columns), width, apart, interpret=False)
    x = np.arange(rows * columns).reshape(rows, columns) % 251 - 125.0  # bfloat16s
    rng = np.random.default_rng(0)
    for _ in range(100):
        where = rng.integers(0, rows + 1, 5)
        where[2] = rng.integers(0, -(-columns // width))
        out, wanted = np.asarray(run(where.astype(np.int32), x.astype(BF16)), np.float32), wanted_copy(where, x, width)
        written = ~np.isnan(wanted)
        np.testing.assert_array_equal(out[written], wanted[written])
