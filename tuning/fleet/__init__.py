"""Studies in a storage that many workers share, and what comes of them."""
