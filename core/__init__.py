"""The Mosaic GPU engine of mgpu_ops: it knows no op, no config and no other device.

`engine.py` is what kernels use beside JAX's own `plgpu` and `pl`. It imports Pallas, which `import mgpu_ops` does not.
"""
