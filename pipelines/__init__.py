"""From raw logs to a deduplicated dataset with its oracle, on Beam."""
