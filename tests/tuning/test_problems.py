"""Files of problems, and the problems of models: what is read is what was captured, the longest first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import FlashAttentionProblem, GroupedMatmulProblem, MatmulProblem, capture, matmul, spec_of
from mgpu_ops.core.gpu import find
from mgpu_ops.models import MODELS
from mgpu_ops.tuning import problems
from mgpu_ops.tuning.problems import TuningJob

H200 = find("h200")
SMALL = {"op": "matmul", "problem": {"m": 512, "n": 512, "k": 512}, "count": 1}


def seconds(work: TuningJob, gpu: Any = H200) -> float:
    return work.count * work.spec.cost(work.problem, work.spec.default(work.problem, gpu), gpu)


def captured() -> Any:
    def program(x: Any, w: Any) -> Any:
        for _ in range(50):
            x = matmul(x, w)
        return matmul(x, w, out_dtype=jnp.float32), matmul(x, w, out_dtype=jnp.float16)

    return capture(program)(jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))


def text(**changes: Any) -> str:
    return json.dumps({"schema": 1, "gpu": "h200", "function": "a:b", "problems": [SMALL]} | changes)


def written(folder: Path, content: str) -> Path:
    path = folder / "problems.json"
    path.write_text(content)
    return path


def test_a_file_gives_back_what_was_captured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "problems.json"
    file = problems.to_file(captured(), "program:step")
    problems.write(path, file)
    assert problems.read(path) == problems.of(captured())
    assert problems.read(path) == [
        TuningJob("matmul", MatmulProblem(512, 512, 512), 50, "512x512x512 bfloat16 nn"),
        TuningJob("matmul", MatmulProblem(512, 512, 512, out_dtype="float32"), 1, "512x512x512 bfloat16->float32 nn"),
    ]
    told = json.loads(path.read_text())
    assert (told["gpu"], told["function"]) == ("h200", "program:step")
    (skipped,) = told["skipped"]
    assert "out_dtype float16 is neither" in skipped["reason"]
    assert len(path.read_text().splitlines()) == 4  # a problem a line


def test_the_order_is_count_times_modelled_time(tmp_path: Path) -> None:
    sides = [(512, 40), (4096, 1), (2048, 3), (512, 2), (512, 3000)]
    rows = [SMALL | {"problem": {"m": m, "n": 512 + 8 * i, "k": 512}, "count": n} for i, (m, n) in enumerate(sides)]
    path = written(tmp_path, text(problems=rows))
    for gpu in (None, find("h20")):
        times = [seconds(work, gpu or H200) for work in problems.read(path, gpu)]
        assert times == sorted(times, reverse=True)
    assert problems.read(path)[0].count == 3000


def test_one_problem_that_stands_twice_counts_together(tmp_path: Path) -> None:
    whole = SMALL | {"problem": {"m": 512, "n": 512, "k": 512, "batch": 1, "layout": "nn"}, "count": 4}
    path = written(tmp_path, text(problems=[SMALL, whole]))
    assert [(work.problem, work.count) for work in problems.read(path)] == [(MatmulProblem(512, 512, 512), 5)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "capture again"),
        ("[" * 100_000, "capture again"),
        (text(schema=2), "schema"),
        (text(gpu="h300"), "h300"),
        (text(extra=1), "extra"),
        (text(problems=[SMALL | {"op": "convolution"}]), "'convolution' is not one of matmul"),
        (text(problems=[SMALL | {"count": 0}]), "count"),
        (text(problems=[SMALL | {"problem": {"m": 512, "n": 512}}]), "`k`"),
        (text(problems=[SMALL | {"problem": {"m": 512, "n": 512, "k": 512, "z": 1}}]), "matmul problems have no z"),
        (text(problems=[SMALL | {"problem": {"m": 512, "n": -8, "k": 512}}]), "n=-8 of Problem must be at least 0"),
        (text(problems=[SMALL | {"problem": {"m": "512", "n": 512, "k": 512}}]), "Expected `int`"),
    ],
)
def test_what_is_no_file_of_problems_is_refused_with_its_path_and_the_way_out(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match="capture again with `mgpu-tune capture --output`") as error:
        problems.read(path)
    assert reason in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_or_cannot_be_written_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.json: cannot be read .* write it with `mgpu-tune capture --output`"):
        problems.read(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"cannot be written .* name another file"):
        problems.write(tmp_path, problems.to_file(captured(), "a:b"))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps))
def test_reading_never_fails_but_by_a_value_error(content: bytes | str) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        with pytest.raises(ValueError, match="capture again"):
            problems.read(Path(file.name))


# --- Models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_problems_of_every_op_that_it_concerns(name: str) -> None:
    forward, all_of_them = problems.of_model(name), problems.of_model(name, grad=True)
    experts = {"grouped_matmul"} if MODELS[name].experts else set()
    assert {work.op for work in forward} == {"matmul", "flash_attention"} | experts
    backward = {"flash_attention_backward"} | ({"ragged_contraction"} if experts else set())
    assert {work.op for work in all_of_them} == {"matmul", "flash_attention"} | experts | backward
    assert set(forward) <= set(all_of_them)
    assert (
        len({(work.op, work.problem) for work in all_of_them}) == len({work.name for work in all_of_them}) == len(all_of_them)
    )
    for work in all_of_them:
        reason = work.spec.supports(work.problem, H200)
        assert reason is None or (name == "gpt2" and "50257 needs 16-byte rows" in reason)  # its vocabulary


def test_the_problems_of_a_model_are_as_its_layers_run_them() -> None:
    every = problems.of_model("mixtral-8x7b", (1, 4096), grad=True)
    found = {work.name.removeprefix("mixtral-8x7b-"): (work.op, work.problem, work.count) for work in every}
    assert found["qkv-1"] == ("matmul", MatmulProblem(1, 6144, 4096), 32)
    assert found["logits-4096"] == ("matmul", MatmulProblem(4096, 32000, 4096), 1)
    assert found["experts-down-4096"] == ("grouped_matmul", GroupedMatmulProblem(8192, 4096, 14336, 8), 32)
    attention = FlashAttentionProblem(1, 4096, 4096, 32, 8, 128, causal=True)
    assert found["attention-4096"] == ("flash_attention", attention, 32)
    assert "attention-1" not in found  # decoding: how long the context is, no number of tokens says
    layers = problems.of_model("gpt-oss-20b", (4096,), op="flash_attention")
    assert [(work.problem.window_left, work.problem.sinks, work.count) for work in layers] == [(127, True, 12), (-1, True, 12)]


def test_the_backward_problems_of_a_model_are_those_that_its_gradient_runs() -> None:
    """As `capture` finds them."""
    shapes = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 6144), jnp.bfloat16)
    loss = lambda a, b: jnp.sum(jnp.sin(matmul(a, b).astype(jnp.float32)))  # noqa: E731
    wanted = {use.problem for use in capture(jax.grad(loss, argnums=(0, 1)))(*shapes).problems}
    found = problems.of_model("llama3-8b", (256,), op="matmul", grad=True)
    assert {work.problem for work in found if "-qkv-" in work.name} == wanted


def test_of_one_op_only_its_own_are_given_and_gradients_of_ops_that_are_gradients() -> None:
    for op in ("matmul", "ragged_contraction", "flash_attention_backward"):
        assert {work.op for work in problems.of_model("qwen3-30b-a3b", op=op)} == {op}
    assert {work.problem.layout for work in problems.of_model("llama3-8b", op="matmul")} == {"nn"}
    with pytest.raises(ValueError, match="model llama3-8b has no problem of flash_attention with 16 tokens"):
        problems.of_model("llama3-8b", (16,), op="flash_attention")
    with pytest.raises(ValueError, match="model gpt2 has no problem of grouped_matmul with 128, 256, 4096 tokens"):
        problems.of_model("gpt2", op="grouped_matmul")


def test_named_shapes_and_the_model_agree() -> None:
    found = problems.of_model("llama3-8b", op="matmul")
    named = spec_of("matmul").shapes
    assert {name: named[name] for name in spec_of("matmul").suites["llama3-8b"]} == {
        work.name: work.problem for work in found if "-logits-" not in work.name
    }
