"""`python -m mgpu_ops.tuning.cli`."""

import sys

from mgpu_ops.tuning.cli import main

if __name__ == "__main__":
    sys.exit(main())
