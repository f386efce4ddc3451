"""Compiled kernels over flat arrays, with a slower reference of each in numpy."""
