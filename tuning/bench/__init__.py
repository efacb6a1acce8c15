"""Benchmarks beside other implementations, and their tables and pictures."""
