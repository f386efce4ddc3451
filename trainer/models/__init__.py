"""Models over an embedding module: from a batch to one logit per sample."""
