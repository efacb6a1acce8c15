"""Products of groups of rows: `grouped_matmul`, `gated_grouped_matmul`, and `ragged_contraction`, the weights' gradient.

They share `sizes.py`, `problem.py`, `config.py`, `model.py`, `calls.py` and `kernel.py`. Importing the package gives the ops
their gradients (`gradients.py`).
"""

from mgpu_ops.grouped import gradients  # noqa: F401  which makes them differentiable
