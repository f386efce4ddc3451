"""`groups: auto`."""
