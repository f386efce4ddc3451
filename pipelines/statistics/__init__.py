"""Statistics that add up exactly, and their text."""
