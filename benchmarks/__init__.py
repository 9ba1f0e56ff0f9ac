"""Benchmarks: one program per question, run as ``python -m benchmarks.NAME``."""
