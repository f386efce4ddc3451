"""The cluster of these tests, and a namespace of its own for each."""

from tests.cluster.fixtures import cluster, namespace

__all__ = ["cluster", "namespace"]
