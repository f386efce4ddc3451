"""Samples of some ids: without weight at once, and in no byte after the next rewriting."""
