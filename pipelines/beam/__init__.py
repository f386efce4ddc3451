"""Beam pipelines of a build, transforms for users' pipelines, and scoring."""
