"""Recorded sweeps, and searches replayed on them."""
