"""Whether the kernel of a gated layer or XLA runs, where nothing is stored, beside what was measured on an H200."""

import pytest

from mgpu_ops import GatedMatmulProblem as P
from mgpu_ops import spec_of
from mgpu_ops.core import gpu

GATED = spec_of("gated_matmul")
H200 = gpu.find("h200")

XLA_US = [  # measured: one product of two, two products, one of a joined weight
    (P(384, 8192, 3072), 98.3),
    (P(1024, 6144, 2048), 101.2),
    (P(2048, 3584, 4096), 192.4),
    (P(1100, 8192, 3072, activation="gelu"), 161.3),
    (P(2048, 14336, 4096), 645.2),
    (P(8056, 8192, 3072, layout="nt", joined=True), 1125.1),
    (P(362, 27648, 5120, joined=True), 295.7),
]


@pytest.mark.parametrize(("problem", "us"), XLA_US, ids=str)
def test_the_modelled_time_of_xla_is_what_was_measured(problem, us):
    assert GATED.baseline_cost(problem, H200) * 1e6 == pytest.approx(us, rel=0.06)


def test_weights_that_are_joined_are_one_product_of_xla_and_take_it_less_time():
    apart, joined = P(384, 8192, 3072), P(384, 8192, 3072, joined=True)
    assert GATED.baseline_cost(joined, H200) < 0.6 * GATED.baseline_cost(apart, H200)
    assert GATED.cost(joined, GATED.default(joined, H200), H200) == GATED.cost(apart, GATED.default(apart, H200), H200)


@pytest.mark.parametrize("kind", ["gradient", "stored"])
def test_a_joined_weight_has_no_gradient_or_stored_gate_of_its_own(kind):
    assert "leave joined out" in GATED.supports(P(256, 256, 256, joined=True, **{kind: True}), H200)
