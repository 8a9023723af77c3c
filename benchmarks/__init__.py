"""Measurements of accuracy and speed: ``python -m benchmarks.run``."""
