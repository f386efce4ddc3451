"""Stores in processes of their own, behind Arrow Flight."""
