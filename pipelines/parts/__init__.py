"""One part of a segment: order, blocks, unique tuples, layouts, files; and back."""
