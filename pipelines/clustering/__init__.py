"""Sessions side by side, deduplicated, and written as parts of a segment."""
