"""`groups: auto`: which features to deduplicate together."""
