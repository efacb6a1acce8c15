"""A small matmul config that the tests vary."""

from mgpu_ops import MatmulConfig

BASE = MatmulConfig(
    tile_m=128,
    tile_n=128,
    tile_k=64,
    max_concurrent_steps=3,
    compute_warpgroups=2,
    wg_dimension="m",
    cluster="none",
    raster_dimension="m",
    raster_width=8,
    epilogue_tile_n=64,
    split_k=1,
    memory_registers=40,
)
