"""Attention: `flash_attention`, and `dot_product_attention` with JAX's own arguments."""
