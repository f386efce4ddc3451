"""Declared transforms: fitted on the training range, applied to unique tuples."""
