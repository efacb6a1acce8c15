"""The ptxas that Mosaic GPU compiles with, and what is known to go wrong with it."""

from __future__ import annotations

import functools
import logging

_FIXED = 93  # the PTX ISA of CUDA 13.3
_log = logging.getLogger("mgpu_ops")


def register_operand_bug(isa: int) -> str | None:
    """What may go wrong where wgmma reads its first operand from registers, and the way out; None for a ptxas that is fixed.

    isa: the newest PTX ISA that ptxas knows, 93 for 9.3. Such a ptxas may give the operand's registers to something else before
    the asynchronous wgmma has read them. Source: triton-lang/triton#11781, which saw wrong sums with 12.9 and right ones with
    13.4, and names the release notes of CUDA 13.3 for the fix; kernels that it hits are rare.
    """
    if isa >= _FIXED:
        return None
    return (
        f"Mosaic GPU compiles with a ptxas of PTX ISA {isa // 10}.{isa % 10}, older than CUDA 13.3: it may overwrite registers "
        "that a wgmma still reads, so that results of attention may be wrong (triton-lang/triton#11781). Upgrade "
        "nvidia-cuda-nvcc or the CUDA toolkit to 13.3 or newer, and see that no older ptxas comes first in PATH"
    )


@functools.cache
def isa() -> int | None:
    """The newest PTX ISA that Mosaic's ptxas knows, 93 for 9.3: Mosaic's own answer. None where there is no ptxas."""
    from jax._src.lib import mosaic_gpu

    try:
        return mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version()
    except (AttributeError, RuntimeError):  # no CUDA plugin; no ptxas
        return None


@functools.cache
def warn_of_register_operands() -> None:
    """Logs `register_operand_bug` of this process's ptxas, if any, the first time that a kernel is traced that it may hit."""
    found = isa()
    reason = None if found is None else register_operand_bug(found)
    if reason is not None:
        _log.warning("%s", reason)
