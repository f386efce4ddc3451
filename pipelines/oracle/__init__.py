"""Compute access lists and indexes, and report the results of cache plans."""
