"""Segments and datasets: commit, append, verify."""
