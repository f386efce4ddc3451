"""Generate the log of the demo."""
