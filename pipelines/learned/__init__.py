"""Transforms, and what they learn from the training range."""
