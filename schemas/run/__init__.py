"""The files of a run, and exported models."""
