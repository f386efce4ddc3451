"""Statistics of a segment, and the gate that judges them."""
