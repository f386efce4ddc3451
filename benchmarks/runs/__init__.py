"""Benchmarks of whole runs and commands."""
