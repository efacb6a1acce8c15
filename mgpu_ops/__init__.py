"""Fast GPU ops for JAX on NVIDIA Hopper, tuned per GPU: `mgpu_ops.matmul(a, b)`, `mgpu_ops.grouped_matmul(lhs, rhs, sizes)`."""

import sys as _sys
from pathlib import PurePath as _PurePath

# `mgpu-tune COMMAND --help` answers at once: it needs no op, and importing JAX takes longer than all else that it does.
if [_PurePath(word).name for word in _sys.argv[:1]] != ["mgpu-tune"] or not {"-h", "--help"} & {*_sys.argv[1:]}:
    from mgpu_ops.api import *  # noqa: F403
    from mgpu_ops.api import __all__ as __all__
