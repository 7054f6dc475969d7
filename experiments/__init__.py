"""Scenario files, benchmark tables and benchmarks."""
