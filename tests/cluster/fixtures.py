"""Fixtures of tests that need a cluster; a conftest.py beside them imports what it uses."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.binary import cluster_binary
from tests.cluster.servers import Cluster

NODES = ("node-0", "node-1")
TRIES, AGAIN_SEC = 3, 10.0
"""How often the servers of the shared cluster are started at most, and the time between."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with two nodes of processes, of 2 cores and 4 GiB each.

    Tests share it: each works in a namespace of its own, and brings back what it breaks.
    """
    with _started(tmp_path_factory, cluster_binary()) as running:
        for name in NODES:
            running.add_node(name)
        running.wait_for_nodes(*NODES)
        yield running


@contextmanager
def _started(factory: pytest.TempPathFactory, binary: Path) -> Iterator[Cluster]:
    """Start the servers; on a machine that is short of something they may need another try."""
    with ExitStack() as stack:
        for left in reversed(range(TRIES)):
            try:
                running = stack.enter_context(Cluster(factory.mktemp("cluster"), binary))
            except RuntimeError as error:
                if not left:
                    raise
                warnings.warn(f"the cluster is started again: {error}", stacklevel=2)
                time.sleep(AGAIN_SEC)
            else:
                yield running
                return


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test alone; its Pods are killed at the end."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    name = cluster.add_namespace(words[:63].strip("-"))
    yield name
    api = cluster.core()
    api.delete_collection_namespaced_pod(name, grace_period_seconds=0)
    api.delete_namespace(name)
