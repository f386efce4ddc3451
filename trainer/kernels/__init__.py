"""Pooled look-ups with the row update fused into their backward: compiled, or torch operators."""
