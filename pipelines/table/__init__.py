"""The dataset as a table of segments: commit, delete, compact, verify."""
