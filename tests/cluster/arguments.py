"""How the servers of a cluster are started: ports, credentials and arguments."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLERS = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
HOST = "127.0.0.1"
LOWEST_PORT, HIGHEST_PORT = 20_000, 30_000
"""Below those that Linux gives to clients and to servers that ask for port 0."""
FAILED_AFTER_SEC = 30
"""A node that was silent for so long is unreachable; its process may get no core for some time,
beside trainers."""
TOLERATED_SEC = 2
"""Pods stay this long on an unreachable node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of the servers that must be told theirs."""

    etcd: int
    """For its client, the API server."""
    etcd_peers: int
    """For other members of etcd, of which there are none."""
    api_server: int
    """For everybody."""


def free_ports() -> Ports:
    """Choose ports that nobody listens on; somebody may take one before it is used."""
    found: set[int] = set()
    while len(found) < 3:
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
        with closing(socket.socket()) as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            found.add(port)
    etcd, etcd_peers, api_server = found
    return Ports(etcd=etcd, etcd_peers=etcd_peers, api_server=api_server)


def credentials(folder: Path, ports: Ports) -> dict[str, str]:
    """Return the files by which a client may do everything, by their names.

    Args:
        folder: of the cluster.
        ports: of its servers.
    """
    token = secrets.token_hex(16)
    cluster = {
        "server": f"https://{HOST}:{ports.api_server}",
        "certificate-authority": str(folder / "certificates" / "apiserver.crt"),
    }
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    return {
        "tokens.csv": f"{token},admin,admin,system:masters\n",
        "kubeconfig": json.dumps(kubeconfig, indent=2),
    }


def servers(folder: Path, ports: Ports) -> dict[str, list[str]]:
    """Return the arguments of each server, in the order in which they are started.

    Args:
        folder: of the cluster, with its credentials.
        ports: of its servers.
    """
    return {
        ETCD: etcd(folder, ports),
        API_SERVER: api_server(folder, ports),
        CONTROLLERS: controllers(folder),
        SCHEDULER: scheduler(folder),
    }


def etcd(folder: Path, ports: Ports) -> list[str]:
    """Return the arguments of the store: what it has outlives it, but not a power cut."""
    clients = f"http://{HOST}:{ports.etcd}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls=http://{HOST}:{ports.etcd_peers}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def api_server(folder: Path, ports: Ports) -> list[str]:
    """Return the arguments of the API server."""
    key = folder / "signing.key"
    return [
        f"--etcd-servers=http://{HOST}:{ports.etcd}",
        f"--cert-dir={folder / 'certificates'}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        f"--secure-port={ports.api_server}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://cluster.test",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--default-unreachable-toleration-seconds={TOLERATED_SEC}",
        f"--default-not-ready-toleration-seconds={TOLERATED_SEC}",
    ]


def controllers(folder: Path) -> list[str]:
    """Return the arguments of the controllers, which ask nobody whether they lead."""
    return [
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--secure-port=0",
        "--leader-elect=false",
        f"--service-account-private-key-file={folder / 'signing.key'}",
        f"--root-ca-file={folder / 'certificates' / 'apiserver.crt'}",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={FAILED_AFTER_SEC}s",
    ]


def scheduler(folder: Path) -> list[str]:
    """Return the arguments of the scheduler."""
    return [f"--kubeconfig={folder / 'kubeconfig'}", "--secure-port=0", "--leader-elect=false"]
