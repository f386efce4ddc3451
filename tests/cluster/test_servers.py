"""A cluster finds ports, and leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster import arguments
from tests.cluster.binary import cluster_binary, needs_cluster
from tests.cluster.container import descendants
from tests.cluster.servers import REPOSITORY, Cluster
from tests.cluster.waiting import runs, until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800), needs_cluster]

RUNS = """
import sys, time
from pathlib import Path
from tests.cluster.servers import Cluster
from tests.cluster.waiting import runs, until

with Cluster(Path(sys.argv[1]), Path(sys.argv[2])) as cluster:
    cluster.add_node("node-0")
    command = ["sh", "-c", "sleep 600 & : > " + sys.argv[1] + "/begun; wait"]
    container = {"name": "main", "image": "none", "command": command}
    spec = {"restartPolicy": "Never", "containers": [container], "nodeName": "node-0"}
    body = {"metadata": {"name": "one"}, "spec": spec}
    cluster.core().create_namespaced_pod("default", body)
    until("the container", (Path(sys.argv[1]) / "begun").exists)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_test_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    binary = cluster_binary()
    command = [sys.executable, "-c", RUNS, str(tmp_path), str(binary)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        left = list(descendants(run.pid))
        run.kill()
    assert line == "ready\n"
    names = ["etcd", "apiserver", "controllers", "scheduler", "node", "supervisor"]
    assert len(left) == len([*names, "sh", "sleep"])
    until("their end", lambda: not [pid for pid in left if runs(pid)])


@pytest.mark.parametrize("used", ["etcd", "api_server"])
def test_cluster_whose_port_is_taken_finds_another(
    used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = cluster_binary()
    with closing(socket.socket()) as somebody:
        somebody.bind((arguments.HOST, 0))
        somebody.listen()
        free = arguments.free_ports
        ports = {name: getattr(free(), name) for name in ("etcd", "etcd_peers", "api_server")}
        ports[used] = somebody.getsockname()[1]
        choices = iter([arguments.Ports(**ports)])
        monkeypatch.setattr(arguments, "free_ports", lambda: next(choices, None) or free())
        with Cluster(tmp_path, binary) as cluster:
            assert cluster.core().list_node().items == []
    assert next(choices, None) is None


def test_cluster_whose_server_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = cluster_binary()
    monkeypatch.setattr(arguments, "api_server", lambda *_: ["--no-such-flag"])
    with (
        pytest.raises(RuntimeError, match=r"kube-apiserver must run, .*unknown flag: --no-such-f"),
        Cluster(tmp_path, binary),
    ):
        pytest.fail("it cannot start")


def test_server_that_is_stopped_can_be_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, cluster_binary()) as cluster:
        cluster.add_namespace("kept")
        cluster.stop("kube-controller-manager", signal.SIGKILL)
        cluster.stop("kube-apiserver")
        cluster.stop("etcd", signal.SIGKILL)
        cluster.start("etcd")
        cluster.start("kube-apiserver")
        cluster.start("kube-controller-manager")
        names = {one.metadata.name for one in cluster.core().list_namespace().items}
        assert "kept" in names
        until("a new account", lambda: cluster.add_namespace("new"))
