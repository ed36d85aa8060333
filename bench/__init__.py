"""Benchmarks: peers of one workload, gated against float64 and measured interleaved. ``NOTES.md`` tells the method.

``python -m bench`` prints the table of ratios; ``pytest bench --benchmark-only`` times every peer by itself.
"""
