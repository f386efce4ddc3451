"""Histories: events that are stored once, and the counts by which samples see them."""
