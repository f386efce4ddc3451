"""Training on a dataset to which segments are appended."""
