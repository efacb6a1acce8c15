"""Whether the kernel of a gated layer or XLA runs, where nothing is stored, beside what was measured on an H200."""

import pytest

from mgpu_ops import GatedMatmulProblem as P
from mgpu_ops import spec_of
from mgpu_ops.core import gpu

GATED = spec_of("gated_matmul")
H100 = gpu.find("h100-sxm")

XLA_US = [  # of XLA on an H100, in results/2026-11-27-h100-gated_matmul-anywhere.csv
    (P(1938, 8192, 2048), 243.0),  # one product of both weights, which it joins
    (P(26, 8192, 3072, "float16", "float16"), 37.5),  # as it loads them
    (P(8, 8192, 2048), 24.7),
    (P(2220, 9728, 2560), 329.7),  # two products
    (P(2856, 6144, 2048, joined=True), 222.4),
    (P(553, 8192, 2048, "float16", "float16", gradient=True), 107.0),
    (P(1641, 8192, 2048, stored=True, gradient=True), 114.7),
    (P(7431, 9216, 2304, stored=True, gradient=True), 619.7),
]


@pytest.mark.parametrize(("problem", "us"), XLA_US, ids=str)
def test_the_modelled_time_of_xla_is_what_was_measured(problem, us):
    assert GATED.baseline_cost(problem, H100) * 1e6 == pytest.approx(us, rel=0.06)


def test_weights_that_are_joined_are_one_product_of_xla_and_take_it_less_time():
    apart, joined = P(384, 8192, 3072), P(384, 8192, 3072, joined=True)
    assert GATED.baseline_cost(joined, H100) < 0.6 * GATED.baseline_cost(apart, H100)
    assert GATED.cost(joined, GATED.default(joined, H100), H100) == GATED.cost(apart, GATED.default(apart, H100), H100)


@pytest.mark.parametrize("kind", ["gradient", "stored"])
def test_a_joined_weight_has_no_gradient_or_stored_gate_of_its_own(kind):
    assert "leave joined out" in GATED.supports(P(256, 256, 256, joined=True, **{kind: True}), H100)


FASTER = [  # the kernel, on an H200, in results/2026-11-28-h200-gated_matmul-other-models.csv
    P(8192, 18944, 3584),
    P(2048, 21504, 5376, activation="gelu"),
    P(4096, 10240, 4096, activation="gelu"),
    P(4096, 13824, 5120, gradient=True),
]


@pytest.mark.parametrize("problem", FASTER, ids=str)
def test_with_many_rows_the_kernel_runs_where_the_models_have_both_alike(problem):
    h200 = gpu.find("h200")
    assert GATED.modelled_margin(problem) == 1.0
    assert GATED.cost(problem, GATED.default(problem, h200), h200) < GATED.baseline_cost(problem, h200)
    assert GATED.modelled_margin(P(16, 18944, 3584)) == 0.95
