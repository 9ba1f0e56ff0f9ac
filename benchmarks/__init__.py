"""What is how fast, run as ``python -m benchmarks.operators``."""
