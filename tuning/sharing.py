"""How the arrays of a problem that takes several GPUs lie on them: row d of each on the d-th."""

from __future__ import annotations

from typing import Any


def shared_out(arrays: Any, devices: int, mesh: Any = None) -> Any:
    """Shapes, or with a mesh of GPUs arrays, of which each of several devices has its row; of one device, as they are."""
    import jax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    if devices == 1:
        return arrays
    sharding = NamedSharding(
        mesh or AbstractMesh((devices,), ("device",), axis_types=(AxisType.Auto,)), PartitionSpec("device")
    )
    if mesh is not None:
        return jax.tree.map(lambda x: jax.device_put(x, sharding), arrays)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)


def first_devices(devices: int) -> Any:
    """A mesh of this process's first so many GPUs."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    return Mesh(np.array(jax.local_devices()[:devices]), ("device",), (AxisType.Auto,))
