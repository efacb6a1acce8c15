"""Whether the kernel of a small product or XLA runs, where nothing is stored, beside what was measured on an H200."""

import pytest

from mgpu_ops import MatmulProblem as P
from mgpu_ops import spec_of
from mgpu_ops.core import gpu

MATMUL, H200 = spec_of("matmul"), gpu.find("h200")


def kernel_runs(problem: P) -> bool:
    seconds = MATMUL.cost(problem, MATMUL.default(problem, H200), H200)
    return seconds <= MATMUL.modelled_margin(problem) * MATMUL.baseline_cost(problem, H200)


# In results/2026-11-30-h200-matmul-small.jsonl.gz and -small-drawn.jsonl.
FASTER = [  # the kernel, by 1.5 to 3.9 times
    P(1, 768, 16256, layout="nt"),
    P(1, 1976, 9312, layout="nt"),
    P(1, 1488, 2560),
    P(1, 896, 512),
    P(4, 128, 1768),
    P(24, 632, 4488),
    P(123, 2992, 1280),
]
SLOWER = [  # than XLA's, which takes 0.65 to 0.96 of its time
    P(1, 640, 2560, layout="nt"),
    P(1, 4288, 1920, layout="nt"),
    P(1, 128, 7680, layout="nt"),
    P(3229, 928, 120, layout="nt"),
    P(2148, 2432, 160),
    P(1507, 3104, 688),
]


@pytest.mark.parametrize("problem", FASTER, ids=str)
def test_the_kernel_runs_where_it_was_faster(problem):
    assert kernel_runs(problem)


@pytest.mark.parametrize("problem", SLOWER, ids=str)
def test_xla_runs_where_it_was_faster(problem):
    assert not kernel_runs(problem)


@pytest.mark.parametrize("epilogue", [{"bias": True}, {"activation": "silu"}, {"residual": True}], ids=str)
@pytest.mark.parametrize(("n", "k"), [(200, 5000), (64, 16256), (640, 1600), (640, 2560)])
def test_one_row_by_rows_of_b_with_an_epilogue_which_was_not_timed_is_left_to_xla_s_reduction(n, k, epilogue):
    assert not kernel_runs(P(1, n, k, layout="nt", **epilogue))


def test_a_tiny_product_with_a_long_k_is_not_modelled_beyond_what_was_timed():
    assert MATMUL.baseline_cost(P(2, 8, 60000), H200) < 1e-5
