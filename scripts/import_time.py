"""Prints how long `from mgpu_ops import matmul` takes after `import jax`: milliseconds, the median of several processes."""

import os
import statistics
import subprocess
import sys

RUNS = 11
CODE = """
import time
start = time.perf_counter()
import jax
middle = time.perf_counter()
from mgpu_ops import matmul
print((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3)
"""


def measure() -> tuple[float, float]:
    """(import jax, the ops after it) of one fresh process, in milliseconds."""
    # Users have bytecode caches, so the processes keep theirs whatever this shell says.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    output = subprocess.run([sys.executable, "-c", CODE], env=env, check=True, capture_output=True)
    jax_ms, ours_ms = map(float, output.stdout.split())
    return jax_ms, ours_ms


def main() -> None:
    measure()  # writes the bytecode caches
    jax_ms, ours_ms = zip(*(measure() for _ in range(RUNS)))
    print(
        f"from mgpu_ops import matmul: {statistics.median(ours_ms):.1f} ms over import jax "
        f"({statistics.median(jax_ms):.1f} ms); median of {RUNS} processes, "
        f"range {min(ours_ms):.1f}-{max(ours_ms):.1f} ms"
    )


if __name__ == "__main__":
    main()
