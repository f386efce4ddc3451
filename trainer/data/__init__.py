"""From stored row groups to batches."""
