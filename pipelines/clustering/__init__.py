"""Cluster samples by session, deduplicate them and write them as parts of a segment."""
