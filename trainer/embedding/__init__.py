"""Embedding look-ups, caches and updates."""
