"""From raw rows to samples: SQL, look-ups, sampling, tuples apart from samples."""
