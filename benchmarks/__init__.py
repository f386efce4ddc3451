"""Side-by-side measurements, each against the peer that a user would take instead."""
