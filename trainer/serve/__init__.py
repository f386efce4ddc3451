"""Exported and published models."""
