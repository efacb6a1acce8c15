"""Products of groups of rows: `grouped_matmul`, and `ragged_contraction`, its gradient of the weights.

`groups.py` is what both share; importing the package gives both their gradients (`gradients.py`).
"""

from mgpu_ops.grouped import gradients  # noqa: F401  which makes them differentiable
