"""Checkpoints that are copied to memory at a step boundary and written beside training."""
