"""The oracle: accesses to rows, their next uses, and the cache plan."""
