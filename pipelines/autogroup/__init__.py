"""`groups: auto`: choose the features to deduplicate together."""
