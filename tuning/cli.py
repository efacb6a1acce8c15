"""The command `mgpu-tune`.

Exit codes: 0 done, 1 it ran but something is wrong (no candidate worked, a database is invalid, a result is wrong), 2 it was
asked wrongly or cannot run here, 130 stopped by Ctrl-C (what was found is stored).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mgpu_ops.tuning import commands
from mgpu_ops.tuning.commands import INTERRUPTED, OK, USAGE, Parser, UsageError, bench, demo, run, show, validate, which

COMMANDS = (run, show, which, validate, bench, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    _prepare_jax()
    from mgpu_ops.core.database import DatabaseError
    from mgpu_ops.tuning.measure import MeasurementError
    from mgpu_ops.tuning.worker import WorkerError

    try:
        return int(arguments.run(arguments))
    except (UsageError, DatabaseError, MeasurementError, WorkerError, ValueError) as e:
        print(f"mgpu-tune: {e}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("mgpu-tune: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `mgpu-tune show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _prepare_jax() -> None:
    """Before JAX starts: the CPU backend where there is no GPU, and threads enough to interpret kernels."""
    os.environ.setdefault("NPROC", str(max(64, os.cpu_count() or 1)))
    if not commands.has_gpu() and not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-tune",
        description="Tunes mgpu_ops for a GPU, and shows, checks and benchmarks what is tuned.",
        epilog="exit codes: 0 done; 1 something is wrong; 2 asked wrongly, or not possible here; 130 Ctrl-C",
    )
    known = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(known)
    return parser


if __name__ == "__main__":
    sys.exit(main())
