"""Embedding kernels: C++ and torch operators."""
