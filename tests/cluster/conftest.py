"""The fixtures of these tests."""

from tests.cluster.fixtures import cluster, namespace

__all__ = ["cluster", "namespace"]
