"""Show the status of a scheduler: page, terminal, metrics."""
