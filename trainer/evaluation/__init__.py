"""Metrics of models."""
