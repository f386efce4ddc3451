"""Run the stages of a build over the first rows of a log."""
