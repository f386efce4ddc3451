"""Check a machine before anything is started on it."""
