"""A cluster, and a namespace for each test."""

from tests.cluster.fixtures import cluster, namespace

__all__ = ["cluster", "namespace"]
