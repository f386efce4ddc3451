"""Access lists, edges, indexes, and what a plan does."""
