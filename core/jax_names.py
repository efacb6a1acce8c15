"""Names of JAX that are not in its stable API. The ops import them from here, so that one file follows where JAX moves them."""

from jax._src.state import AbstractRef
from jax.experimental import io_callback

__all__ = ["AbstractRef", "io_callback"]
