"""Benchmarks of the scheduler, besides `benchmarks.model` and `benchmarks.policies`."""
