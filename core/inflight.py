"""Checks, while a kernel is traced, that it waits for the tensor cores before it uses what they read or write.

wgmma is asynchronous: only after a wait that covers it may its accumulator be read and the stages of its operands be refilled.
Where a wait is missing, neither JAX's interpreter nor a GPU reports it, and results are wrong now and then. So the functions of
`engine` and `rows` report here what they do, in program order, and InFlight is raised for:

- an accumulator that is read (`accumulated`) while a wgmma that adds to it is in flight;
- an arrival at an `empty` barrier of a `Pipeline` while a wgmma that reads the pipeline's buffers is in flight;
- a wgmma that is in flight at the end of the loop or branch that started it. A loop's body is traced once, so each iteration
  must begin in the same state;
- a wgmma that a loop's body leaves to the next iteration (`iteration`) with its left operand in registers. ptxas lets that
  iteration overwrite them while they are read: seen on an H200, as results that differ from run to run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jax._src import core as jax_core
from jax._src.state.types import AbstractRef, TransformedRef

from mgpu_ops.core.contexts import having


class InFlight(RuntimeError):
    """A kernel uses what a wgmma in flight still reads or writes."""


@dataclasses.dataclass(frozen=True)
class _Product:
    """A wgmma in flight: the whole refs of its accumulator and operands, and the trace (loop or branch) that started it."""

    accumulator: Any
    operands: tuple[Any, ...]
    trace: Any


@dataclasses.dataclass
class _Kernel:
    """A kernel that is being traced. Lists instead of dicts, because refs are compared by identity."""

    # wgmma in flight, the oldest first.
    products: list[_Product] = dataclasses.field(default_factory=list)
    # (barrier that a copy arrives at, the buffer that it fills)
    copies: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    # (full, empty) barriers of each Pipeline
    pipelines: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def check_branches(self) -> None:
        """Raises where the loop or branch that started a wgmma in flight has ended."""
        open_traces = list(_ancestors(jax_core.trace_ctx.trace))
        if any(all(product.trace is not trace for trace in open_traces) for product in self.products):
            raise InFlight(
                "a wgmma is still in flight at the end of the loop or branch that started it, and the next iteration may "
                "overwrite what it reads: call wgmma_wait(0) or read the accumulator with accumulated(acc, 0) there"
            )

    def wait(self, in_flight: int) -> None:
        self.products = self.products[len(self.products) - in_flight :] if in_flight else []


_kernel: ContextVar[_Kernel | None] = ContextVar("_kernel", default=None)


def watched() -> contextlib.AbstractContextManager[None]:
    """Checks the kernel that is traced in this context."""
    return having(_kernel, _Kernel())


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """The scope of accumulators. At its end JAX waits for all wgmma."""
    yield
    if kernel := _kernel.get():
        kernel.check_branches()
        kernel.products = []


def copies(buffer: Any, barrier: Any) -> None:
    """The kernel starts a copy to `buffer` that arrives at `barrier`."""
    if (kernel := _kernel.get()) and barrier is not None:
        kernel.copies.append((_base(barrier), _base(buffer)))


def has_pipeline(full: Any, empty: Any) -> None:
    """The kernel has a Pipeline: copies that arrive at `full` fill its stages, an arrival at `empty` lets them be refilled."""
    if kernel := _kernel.get():
        kernel.pipelines.append((_base(full), _base(empty)))


def starts(accumulator: Any, *operands: Any) -> None:
    """The kernel starts a wgmma."""
    if kernel := _kernel.get():
        kernel.check_branches()
        kernel.products.append(_Product(_base(accumulator), tuple(map(_base, operands)), jax_core.trace_ctx.trace))


def waits(in_flight: int) -> None:
    """The kernel waits for all wgmma but the last `in_flight`."""
    if kernel := _kernel.get():
        kernel.check_branches()
        kernel.wait(in_flight)


def reads(accumulator: Any, in_flight: int) -> None:
    """The kernel waits for all wgmma but the last `in_flight` and reads an accumulator."""
    if kernel := _kernel.get():
        waits(in_flight)
        if any(product.accumulator is _base(accumulator) for product in kernel.products):
            raise InFlight(
                f"accumulated(acc, {in_flight}) reads what one of the last {in_flight} wgmma adds to: leave fewer in flight"
            )


@contextlib.contextmanager
def iteration() -> Iterator[None]:
    """The body of a loop that begins and ends with equally many wgmma in flight, and so leaves them to the next iteration."""
    if not (kernel := _kernel.get()):
        yield
        return
    before = list(kernel.products)
    yield
    if any(
        not isinstance(jax_core.typeof(operand), AbstractRef) for product in kernel.products for operand in product.operands[:1]
    ):
        raise InFlight(
            "a loop's body leaves a wgmma in flight whose left operand is in registers: ptxas does not know that the next "
            "iteration may not overwrite them yet; wait for it in the body"
        )
    if len(kernel.products) != len(before):
        raise InFlight(
            f"a loop's body begins with {len(before)} wgmma in flight and ends with {len(kernel.products)}: wait in it"
        )
    kernel.products = [dataclasses.replace(new, trace=old.trace) for new, old in zip(kernel.products, before, strict=True)]


def arrives(barrier: Any, in_flight: int = 0) -> None:
    """The kernel arrives at a barrier. From now on, a pipeline whose `empty` barrier it is may refill its stages.

    in_flight: how many of the last wgmma read other stages than the one that is declared empty.
    """
    if not (kernel := _kernel.get()):
        return
    kernel.check_branches()
    filling = [full for full, empty in kernel.pipelines if empty is _base(barrier)]
    buffers = [buffer for arrived_at, buffer in kernel.copies if any(arrived_at is full for full in filling)]
    for product in kernel.products[: len(kernel.products) - in_flight]:
        if any(operand is buffer for operand in product.operands for buffer in buffers):
            raise InFlight(
                "a pipeline stage is declared empty while a wgmma in flight may still read it: before barrier_arrive, call "
                "wgmma_wait, or accumulated to read the sum"
            )


def _base(ref: Any) -> Any:
    while isinstance(ref, TransformedRef):
        ref = ref.ref
    return ref


def _ancestors(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)
