"""A Kubernetes cluster of this machine: real servers, and nodes whose containers are processes.

Everything listens on loopback, and nothing outlives the process that started it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubernetes import client, config
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from tests.cluster import arguments
from tests.cluster.arguments import API_SERVER, ETCD, Ports
from tests.cluster.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]
TAKEN = "address already in use"
"""What a server says whose port somebody has taken since it was chosen."""
ATTEMPTS = 5
LAST_CHARACTERS = 2000
"""Of a log, in the message of a failure."""
STARTED_SEC = 180.0
"""A cold API server on two cores that others use has begun by then."""
ANSWER_SEC = (3.0, 20.0)
"""To connect and to read: who took the API server's port and says nothing is asked no longer.

A pair, as the client leaves out one number that is no integer and then waits for ever.
"""
STOP_SEC = 5
"""A server that was asked to end is killed after this."""


class PortTakenError(Exception):
    """Somebody else listens on a port that was free a moment ago."""


class Cluster:
    """Servers and nodes, and the processes that they are."""

    def __init__(self, folder: Path, binary: Path) -> None:
        """Remember what is to be run.

        Args:
            folder: of this cluster alone: its data, its logs, its kubeconfig.
            binary: the program that holds the servers.
        """
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._binary = binary
        self._commands: dict[str, Sequence[str | Path]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start all servers; other ports are tried where one is taken."""
        for attempt in range(ATTEMPTS):
            try:
                self._start_servers(arguments.free_ports())
                return self
            except PortTakenError:
                self._end()
                if attempt == ATTEMPTS - 1:
                    raise
            except BaseException:
                self._end()
                raise
        raise AssertionError("an attempt returns or raises")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End everything, and keep the logs."""
        self._end()

    def client(self) -> client.ApiClient:
        """Return a client of the API server that may do everything."""
        return config.new_client_from_config(str(self.kubeconfig))

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """Return a kubeconfig with which one may do what a service account may."""
        request = {"spec": {"expirationSeconds": 3600}}
        response = self.core().create_namespaced_service_account_token(account, namespace, request)
        settings = json.loads(self.kubeconfig.read_text())
        settings["users"][0]["user"]["token"] = response.status.token
        path = self.folder / f"{namespace}-{account}.kubeconfig"
        path.write_text(json.dumps(settings, indent=2))
        return path

    def core(self) -> Any:
        """Return the API of Pods, nodes and namespaces; what it returns has no types."""
        return client.CoreV1Api(self.client())

    def add_namespace(self, name: str) -> str:
        """Make a namespace in which Pods can be made, and return its name."""
        api = self.core()
        api.create_namespace({"metadata": {"name": name}})
        until(f"the service account of namespace {name}", lambda: has_account(api, name))
        return name

    def add_node(self, name: str, *, cpu: str = "2", memory: str = "4Gi") -> None:
        """Add a node, or start one again that failed; it may need some seconds to be ready.

        Args:
            name: of the node.
            cpu: cores, as a quantity; of a node that is new.
            memory: bytes, as a quantity; of a node that is new.
        """
        room = {"cpu": cpu, "memory": memory, "pods": "110"}
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        metadata = {"name": name, "labels": labels}
        try:
            node = {"metadata": metadata, "status": {"allocatable": room, "capacity": room}}
            self.core().create_node(node)
        except ApiException as error:
            if error.status != 409:
                raise
        kubelet = (sys.executable, "-m", "tests.cluster.kubelet")
        self._run(name, *kubelet, self.kubeconfig, name, self.folder / name)

    def fail_node(self, name: str) -> None:
        """Kill a node and all its containers at once; `add_node` brings it back, empty."""
        self.stop(name, signal.SIGKILL)

    def remove_node(self, name: str) -> None:
        """Take a node out of the cluster for good; its Pods go with it."""
        if name in self._processes:
            self.stop(name, signal.SIGKILL)
        self.core().delete_node(name)

    def wait_for_nodes(self, *names: str) -> None:
        """Wait until Pods may be put on these nodes."""
        api = self.core()
        until(f"nodes {', '.join(names)}", lambda: self._are_ready(api, names))

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop a server or a node; it is gone when this returns.

        Args:
            name: of a node, or of a server as its program is called, such as `kube-apiserver`.
            how: the signal; who is asked to end is killed after some seconds.

        Raises:
            ValueError: no process has this name.
        """
        if name not in self._processes:
            raise ValueError(f"name must be one of {', '.join(self._processes)}, got {name=}")
        process = self._processes.pop(name)
        process.send_signal(how)
        try:
            process.wait(STOP_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Start again what was stopped, with what it has on disk."""
        self._run(name, *self._commands[name])
        if name == API_SERVER:
            self._wait_for_api()

    def restart_api_server(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop the API server and start it again: all its connections are cut."""
        self.stop(API_SERVER, how)
        self.start(API_SERVER)

    def log(self, name: str) -> str:
        """Return what a server or a node has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_servers(self, ports: Ports) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_credentials(ports)
        commands = arguments.servers(self.folder, ports)
        for name in (ETCD, API_SERVER):
            self._run(name, self._binary, name, *commands.pop(name))
        self._wait_for_api()
        for name, command in commands.items():
            self._run(name, self._binary, name, *command)
        api = self.core()
        until("the default service account", lambda: has_account(api, "default"))

    def _write_credentials(self, ports: Ports) -> None:
        for name, content in arguments.credentials(self.folder, ports).items():
            (self.folder / name).write_text(content)
        key = subprocess.run([self._binary, "signing-key"], capture_output=True, check=True)
        (self.folder / "signing.key").write_bytes(key.stdout)

    def _run(self, name: str, *command: str | Path) -> None:
        self._commands[name] = command
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # ends with this process
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
            )

    def _wait_for_api(self) -> None:
        until("the API server", self._api_answers, timeout_sec=STARTED_SEC)

    def _api_answers(self) -> bool:
        """Tell whether the API server is ready.

        Raises:
            PortTakenError: a server could not listen.
            RuntimeError: a server has ended for another reason.
        """
        self._check()
        if not (self.folder / "certificates" / "apiserver.crt").exists():
            return False
        try:
            anything: Any = self.client()
            answer = anything.call_api(
                "/readyz", "GET", auth_settings=["BearerToken"], _request_timeout=ANSWER_SEC
            )
            return answer[1] == 200
        except (ApiException, HTTPError, OSError):
            return False

    def _are_ready(self, api: Any, names: Sequence[str]) -> bool:
        self._check()
        return all(is_ready(api, name) for name in names)

    def _check(self) -> None:
        """Raise when a server or a node has ended by itself."""
        for name, process in self._processes.items():
            status = process.poll()
            if status is not None:
                last = self.log(name)[-LAST_CHARACTERS:]
                if TAKEN in last:
                    raise PortTakenError(last)
                raise RuntimeError(f"{name} must run, got exit status {status}; it printed: {last}")

    def _end(self) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name, signal.SIGKILL)
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)


def has_account(api: Any, namespace: str) -> bool:
    """Tell whether Pods can be made in a namespace: the controllers made its service account."""
    accounts = api.list_namespaced_service_account(namespace).items
    return any(account.metadata.name == "default" for account in accounts)


def is_ready(api: Any, node: str) -> bool:
    """Tell whether Pods may be put on a node."""
    found = api.read_node(node)
    conditions = {one.type: one.status for one in found.status.conditions or []}
    return conditions.get("Ready") == "True" and not found.spec.taints
