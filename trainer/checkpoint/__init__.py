"""Checkpoints: copied at a step boundary, written beside training."""
