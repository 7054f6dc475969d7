"""Benchmarks anyone can run; each prints ratios measured in one run."""
