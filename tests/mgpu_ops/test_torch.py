"""`mgpu_ops.torch`: values, gradients and refusals on torch's tensors. Skipped where torch is not installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import mgpu_ops  # noqa: E402
import mgpu_ops.torch as ours  # noqa: E402
from scripts import torch_times  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # torch's own
BF16, F32 = torch.bfloat16, torch.float32
CPU = "cpu"


def tensor(seed: int, *shape: int, dtype: Any = BF16, grad: bool = True, device: str = CPU) -> Any:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_(grad)


def near(out: Any, wanted: Any, tolerance: float) -> None:
    out, wanted = out.detach().double().cpu(), wanted.detach().double().cpu()
    assert out.shape == wanted.shape
    assert float((out - wanted).abs().max()) <= tolerance * float(wanted.abs().max() + 1e-30)


def grads(out: Any, *tensors: Any) -> tuple[Any, ...]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.device)
    return torch.autograd.grad((out.float() * cotangent).sum(), tensors)


def attention(q: Any, k: Any, v: Any, causal: bool = True) -> Any:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def experts(lhs: Any, rhs: Any, sizes: list[int], bias: Any) -> Any:
    """Each group's rows by its matrix; the rows of no group are zeros."""
    rows = torch.split(lhs.float(), [*sizes, len(lhs) - sum(sizes)])
    parts = [torch.nn.functional.silu(x @ w.float() + b.float()) for x, w, b in zip(rows, rhs, bias)]
    return torch.cat([*parts, rows[-1].new_zeros(len(rows[-1]), rhs.shape[2])])


# --- values and gradients

Case = tuple[Any, Any, tuple[Any, ...]]


def matmul(device: str, size: int) -> Case:
    a, w = tensor(0, size, 64, device=device), tensor(1, 32, 64, device=device)  # as torch.nn.Linear has its weight
    return ours.matmul(a, w, transpose_b=True), a.float() @ w.float().T, (a, w)


def fused_matmul(device: str, size: int) -> Case:
    a, b, bias = tensor(0, size, 64, device=device), tensor(1, 64, 32, device=device), tensor(2, 32, device=device)
    residual = tensor(3, size, 32, device=device)
    wanted = torch.relu(a.float() @ b.float() + bias.float()) + residual.float()
    return ours.matmul(a, b, bias=bias, activation="relu", residual=residual), wanted, (a, b, bias, residual)


def wide_matmul(device: str, size: int) -> Case:
    a, b = tensor(0, 64, size, device=device), tensor(1, 64, 32, device=device)
    out = ours.matmul(a, b, transpose_a=True, out_dtype=F32)
    assert out.dtype == F32
    return out, a.float().T @ b.float(), (a, b)


def grouped(device: str, size: int) -> Case:
    lhs, rhs, bias = tensor(0, size, 64, device=device), tensor(1, 3, 64, 32, device=device), tensor(2, 3, 32, device=device)
    sizes = [size // 2, 0, size // 4]
    out = ours.grouped_matmul(lhs, rhs, torch.tensor(sizes, device=device), bias=bias, activation="silu")
    return out, experts(lhs, rhs, sizes, bias), (lhs, rhs, bias)


def flash(device: str, size: int) -> Case:
    q = tensor(0, 2, size, 4, 64, device=device)
    k, v = (tensor(seed, 2, size, 2, 64, device=device) for seed in (1, 2))
    return ours.flash_attention(q, k, v, causal=True), attention(q, k, v), (q, k, v)


CASES: list[Callable[[str, int], Case]] = [matmul, fused_matmul, wide_matmul, grouped, flash]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch(case: Callable[[str, int], Case]) -> None:
    out, wanted, tensors = case(CPU, 32)
    near(out, wanted, 2e-2)
    for own, theirs in zip(grads(out, *tensors), grads(wanted, *tensors)):
        assert own.dtype == BF16
        near(own, theirs, 4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_torchs_tensors(case: Callable[[str, int], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind work that torch's stream has not done yet, and with memory that torch gives out again at once."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    monkeypatch.setenv("MGPU_OPS_BACKEND", "mosaic")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 64
        out, wanted, tensors = case("cuda", 512)
        near(out, wanted, 2e-2)
        for own, theirs in zip(grads(out, *tensors), grads(wanted, *tensors)):
            near(own, theirs, 4e-2)
        for seed in range(20):
            a, b = tensor(seed, 2048, 2048, device="cuda", grad=False), tensor(seed + 1, 2048, 2048, device="cuda", grad=False)
            product, theirs = ours.matmul(a, b), a @ b
            del a, b
            torch.full((2048, 2048), 7.0, dtype=BF16, device="cuda")  # lies where a lay
            near(product, theirs, 2e-2)


def test_the_memory_is_shared() -> None:
    x = torch.zeros(64, 64)
    array = ours._to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert ours._to_torch(array).data_ptr() == x.data_ptr()


def test_a_tensor_that_is_not_contiguous_is_right_too() -> None:
    a, b = tensor(0, 64, 32), tensor(1, 64, 16)
    near(ours.matmul(a.T, b), a.float().T @ b.float(), 2e-2)


# --- autograd


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    a, w = tensor(0, 32, 64), tensor(1, 64, 16, grad=False)
    out = ours.matmul(a, w)
    out.float().sum().backward()
    assert a.grad is not None
    assert w.grad is None
    with torch.no_grad():
        assert not ours.matmul(a, w).requires_grad
    assert not ours.matmul(a.detach(), w).requires_grad


def test_a_tensor_changed_in_place_is_refused_in_the_backward_pass() -> None:
    a, w = tensor(0, 32, 64), tensor(1, 64, 16)
    out = ours.matmul(a, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_a_second_gradient_is_refused() -> None:
    a, w = tensor(0, 32, 64, dtype=F32), tensor(1, 64, 16, dtype=F32)
    (first,) = torch.autograd.grad(ours.matmul(a, w).pow(2).sum(), [a], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_layer_learns_with_torchs_optimizer() -> None:
    w, x = torch.nn.Parameter(torch.zeros(16, 64)), tensor(0, 32, 64, grad=False)
    wanted = x.float() @ tensor(1, 64, 16, dtype=F32, grad=False)
    optimizer = torch.optim.Adam([w], lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        out = ours.matmul(x, w.to(BF16), transpose_b=True, out_dtype=F32)
        loss = torch.nn.functional.mse_loss(out, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# --- refusals


def test_wrong_arguments_raise_what_the_op_raises() -> None:
    a, b = tensor(0, 32, 64), tensor(1, 32, 16)
    with pytest.raises(ValueError, match=r"differ in k: 64 != 32"):
        ours.matmul(a, b)
    with pytest.raises(ValueError, match=r"cast one with \.astype"):
        ours.matmul(a, b.float())
    with pytest.raises(ValueError, match="backend='mosaic' cannot run matmul"):
        ours.matmul(a, tensor(1, 64, 16), backend="mosaic")
    with pytest.raises(TypeError, match=r"b is list: mgpu_ops\.torch takes tensors"):
        ours.matmul(a, [1.0])
    with pytest.raises(ValueError, match="tensors of several devices: a cpu, b meta"):
        ours.matmul(a, b.to("meta"))


def test_the_page_runs_as_it_stands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "pytorch.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert all(p.grad is not None for p in names["layer"].parameters())


def test_the_times_beside_torch_are_told_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_times.main(["--small", "--seconds", "0.01"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["op", "problem", "pass", "impl", "median_us", "spread_us"]
    assert {(row[0], row[3]) for row in rows[1:]} == {
        ("matmul", "mgpu_ops"),
        ("matmul", "torch.matmul"),
        ("flash_attention", "mgpu_ops"),
        ("flash_attention", "scaled_dot_product_attention"),
    }
    assert all(float(row[4]) > 0 for row in rows[1:])


def test_the_module_is_found_by_its_name() -> None:
    assert mgpu_ops.torch is ours
    assert ours.__all__ == ["flash_attention", "grouped_matmul", "matmul"]
