"""Fixtures of tests that need a cluster; a conftest.py beside them imports what it uses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.binary import cluster_binary
from tests.cluster.servers import Cluster

NODES = ("node-0", "node-1")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with two nodes of processes, of 2 cores and 4 GiB each.

    Tests share it: each works in a namespace of its own, and brings back what it breaks.
    """
    binary = cluster_binary()
    with Cluster(tmp_path_factory.mktemp("cluster"), binary) as running:
        for name in NODES:
            running.add_node(name)
        running.wait_for_nodes(*NODES)
        yield running


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test alone; its Pods are killed at the end."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    name = cluster.add_namespace(words[:63].strip("-"))
    yield name
    api = cluster.core()
    api.delete_collection_namespaced_pod(name, grace_period_seconds=0)
    api.delete_namespace(name)
