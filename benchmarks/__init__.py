"""Benchmarks, each a program: ``python -m benchmarks.operators``."""
