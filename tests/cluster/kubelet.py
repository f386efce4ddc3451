"""A node whose containers are processes of this machine: a kubelet as far as tests need one.

It is run as `python -m tests.cluster.kubelet KUBECONFIG NODE FOLDER`; the Node must exist.
When it dies its containers die, and what is known of them is lost, as with a machine.
"""

from __future__ import annotations

import base64
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from tests.cluster import container, pods
from tests.cluster.pods import Pod
from tests.cluster.started import Started

HEARTBEAT_SEC = 2.0
LEASE_SEC = 4
RETRY_SEC = 0.5
LIST_AGAIN_SEC = 60
"""A watch ends after this; the list that follows finds what it missed."""
AGAIN = "please apply your changes to the latest version"
"""Said where two write at once; other conflicts are with a Pod or a lease that is there already."""
LEASES = "kube-node-lease"
LOST = {
    "exitCode": container.KILLED,
    "reason": "ContainerStatusUnknown",
    "message": "the container could not be found when the node came back",
}


def retried(call: Callable[[], Any]) -> Any:
    """Call the API server until it answers; None where what is meant is gone, or is there."""
    while True:
        try:
            return call()
        except ApiException as error:
            if error.status == 404 or (error.status == 409 and AGAIN not in str(error.body)):
                return None
            if error.status is not None and error.status < 500 and error.status not in (409, 429):
                raise
        except (HTTPError, OSError):
            pass
        time.sleep(RETRY_SEC)


def write_secret(folder: Path, data: Mapping[str, str], mode: int) -> None:
    """Write the files of a Secret, each in one go: others may read the same at this moment."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in data.items():
        beside = folder / f".{name}.{uuid.uuid4().hex}"
        beside.touch(mode=0o600)
        beside.write_bytes(base64.b64decode(text))
        beside.chmod(mode)
        beside.rename(folder / name)


class Kubelet:
    """The node: one loop over what it is told, by the API server and by its containers."""

    def __init__(self, api: Any, node: str, folder: Path) -> None:
        """Remember where it works.

        Args:
            api: of the API server.
            node: its name.
            folder: of the containers' output.
        """
        self._api = api
        self._node = node
        self._folder = folder
        self._containers: dict[str, Started] = {}
        self._capacity: dict[str, str] = {}
        self._waiting: set[str] = set()
        self.events: queue.Queue[tuple[Callable[..., None], Any]] = queue.Queue()

    def run(self) -> None:
        """Work until it is killed."""
        self._capacity = retried(lambda: self._api.read_node(self._node)).status.allocatable
        while True:
            take_in, what = self.events.get()
            take_in(what)

    def observe_all(self, listed: Sequence[Pod]) -> None:
        """Take in all Pods of this node."""
        for uid in self._containers.keys() - {pod.metadata.uid for pod in listed}:
            self._forget(uid)
        for pod in listed:
            self.observe(pod)

    def observe_event(self, event: Mapping[str, Any]) -> None:
        """Take in one change."""
        if event["type"] == "DELETED":
            self._forget(event["object"].metadata.uid)
        else:
            self.observe(event["object"])

    def observe(self, pod: Pod) -> None:
        """Take in what a Pod is now."""
        started = self._containers.get(pod.metadata.uid)
        if started is not None:
            started.pod = pod
            self._follow(started)
        elif pod.metadata.deletion_timestamp:
            self._remove(pod)
        elif pod.status.phase == "Running":  # of this node before it died
            self._report(pod, pods.ended(pod, None, LOST))
        elif pod.status.phase == "Pending":
            self._start(pod)

    def _follow(self, started: Started) -> None:
        """Do to a container what its Pod says."""
        if started.end is not None:
            if started.pod.metadata.deletion_timestamp:
                self._remove(started.pod)
        elif started.pod.metadata.deletion_timestamp:
            started.stop(started.pod.metadata.deletion_grace_period_seconds or 0)
        elif pods.resources(started.pod) != started.applied:
            self._resize(started)

    def _start(self, pod: Pod) -> None:
        why = pods.unsupported(pod)
        if why:
            self._report(pod, pods.refused(pod, why))
            return
        missing = self._secret_that_is_missing(pod)
        if missing:
            self._wait_for(pod, "ContainerCreating", missing)
            return
        variables = self._variables(pod)
        if isinstance(variables, str):
            self._wait_for(pod, "CreateContainerConfigError", variables)
            return
        self._waiting.discard(pod.metadata.uid)
        try:
            started = Started(pod, self._folder / pod.metadata.uid, variables)
        except OSError as error:  # such as a working folder that is not there
            end = container.ending(container.NOT_STARTED, "StartError", str(error))
            self._report(pod, pods.ended(pod, None, end))
            return
        self._containers[pod.metadata.uid] = started
        self._report(pod, pods.running(pod, started.started_at, started.applied))
        threading.Thread(target=self._wait, args=(started,), daemon=True).start()

    def _wait_for(self, pod: Pod, reason: str, missing: str) -> None:
        """Say once what a Pod waits for, and look again later."""
        if pod.metadata.uid in self._waiting:
            return  # one look is on its way
        self._waiting.add(pod.metadata.uid)
        self._report(pod, pods.waiting(pod, reason, missing))
        threading.Timer(RETRY_SEC, self.events.put, [(self._poll_pod, pod)]).start()

    def _poll_pod(self, pod: Pod) -> None:
        """Start a Pod that waited, if it is still there."""
        self._waiting.discard(pod.metadata.uid)
        found = retried(
            lambda: self._api.read_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        )
        if found is not None and found.metadata.uid == pod.metadata.uid:
            self.observe(found)

    def _secret_that_is_missing(self, pod: Pod) -> str:
        """Write a container's Secrets where it looks for them; say which there is not."""
        for folder, (name, mode) in pods.secrets(pod).items():
            found = retried(
                lambda name=name: self._api.read_namespaced_secret(name, pod.metadata.namespace)
            )
            if found is None:
                return f'MountVolume.SetUp failed: secret "{name}" not found'
            write_secret(Path(folder), found.data or {}, mode)
        return ""

    def _variables(self, pod: Pod) -> dict[str, str] | str:
        """Return the variables of a container's Secrets and ConfigMaps, or which there is not."""
        variables: dict[str, str] = {}
        for kind, name in pods.sources(pod):
            read = {
                "Secret": self._api.read_namespaced_secret,
                "ConfigMap": self._api.read_namespaced_config_map,
            }[kind]
            found = retried(lambda read=read, name=name: read(name, pod.metadata.namespace))
            if found is None:
                return f'{kind.lower()} "{name}" not found'
            for key, text in (found.data or {}).items():
                is_secret = kind == "Secret"
                variables[key] = base64.b64decode(text).decode() if is_secret else text
        return variables

    def _wait(self, started: Started) -> None:
        end = started.wait()
        self.events.put((self._take_in_end, (started, end)))

    def _take_in_end(self, what: tuple[Started, dict[str, Any]]) -> None:
        started, started.end = what
        if started.pod.metadata.uid in self._containers:
            self._report(started.pod, pods.ended(started.pod, started.started_at, what[1]))
            self._follow(started)
        else:
            started.remove_volumes()
        for other in self._containers.values():  # one may fit now that did not
            if other.end is None:
                self._follow(other)

    def _resize(self, started: Started) -> None:
        """Change a container's resources where they fit, or say that they do not."""
        wanted = pods.resources(started.pod)
        reason = self._misfit(started, wanted)
        if reason and started.misfit == (reason, wanted):
            return  # already reported
        started.misfit = (reason, wanted) if reason else None
        if reason:
            text = f"the node has {self._capacity}, and the Pod asks for {wanted}"
            pending = pods.condition("PodResizePending", holds=True, reason=reason, text=text)
            self._report(started.pod, {"conditions": [pending]})
            return
        started.apply(wanted)
        status = pods.running(started.pod, started.started_at, wanted)
        status["conditions"].append({"type": "PodResizePending", "$patch": "delete"})
        self._report(started.pod, status)

    def _misfit(self, started: Started, wanted: dict[str, dict[str, str]]) -> str | None:
        """Say in one word why a container cannot have these resources; None where it can."""
        others = [
            other.applied
            for other in self._containers.values()
            if other is not started and other.end is None
        ]
        for name in ("cpu", "memory"):
            capacity = pods.amount({"node": self._capacity}, "node", name)
            if pods.requested([wanted], name) > capacity:
                return "Infeasible"
            if pods.requested([wanted, *others], name) > capacity:
                return "Deferred"
        return None

    def _forget(self, uid: str) -> None:
        """End what is no longer in the API: it was removed without waiting for this node."""
        started = self._containers.pop(uid, None)
        if started is not None and started.end is None:
            started.stop(0)
        elif started is not None:
            started.remove_volumes()

    def _remove(self, pod: Pod) -> None:
        """Take a Pod that has ended from the API, as only its node may do."""
        options = client.V1DeleteOptions(
            grace_period_seconds=0, preconditions=client.V1Preconditions(uid=pod.metadata.uid)
        )
        name, namespace = pod.metadata.name, pod.metadata.namespace
        retried(lambda: self._api.delete_namespaced_pod(name, namespace, body=options))

    def _report(self, pod: Pod, status: Mapping[str, Any]) -> None:
        body = {"metadata": {"uid": pod.metadata.uid}, "status": status}
        name, namespace = pod.metadata.name, pod.metadata.namespace
        retried(lambda: self._api.patch_namespaced_pod_status(name, namespace, body))


def follow_pods(api: Any, node: str, kubelet: Kubelet) -> None:
    """Tell a kubelet of its Pods, over and over."""
    selector = f"spec.nodeName={node}"
    while True:
        listed = retried(lambda: api.list_pod_for_all_namespaces(field_selector=selector))
        kubelet.events.put((kubelet.observe_all, listed.items))
        try:
            for event in watch.Watch().stream(
                api.list_pod_for_all_namespaces,
                field_selector=selector,
                resource_version=listed.metadata.resource_version,
                timeout_seconds=LIST_AGAIN_SEC,
            ):
                kubelet.events.put((kubelet.observe_event, event))
        except (ApiException, HTTPError, OSError):
            time.sleep(RETRY_SEC)


def renew_lease(api: Any, leases: Any, node: str) -> None:
    """Say over and over that the node lives."""
    lease = {
        "metadata": {"name": node, "namespace": LEASES},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": LEASE_SEC},
    }
    retried(lambda: leases.create_namespaced_lease(LEASES, lease))
    while True:
        ready = {"type": "Ready", "status": "True", "reason": "ProcessesRun", "message": ""}
        ready |= {"lastHeartbeatTime": pods.now(), "lastTransitionTime": pods.now()}
        renewed = {"spec": {"renewTime": pods.now()}}
        retried(lambda body=renewed: leases.patch_namespaced_lease(node, LEASES, body))
        status = {"status": {"conditions": [ready]}}
        retried(lambda body=status: api.patch_node_status(node, body))
        time.sleep(HEARTBEAT_SEC)


def main(argv: Sequence[str]) -> None:
    """Run a node."""
    kubeconfig, node, folder = argv
    Path(folder).mkdir(parents=True, exist_ok=True)
    connection = config.new_client_from_config(kubeconfig)
    api = client.CoreV1Api(connection)
    kubelet = Kubelet(api, node, Path(folder))
    leases = client.CoordinationV1Api(connection)
    threading.Thread(target=renew_lease, args=(api, leases, node), daemon=True).start()
    threading.Thread(target=follow_pods, args=(api, node, kubelet), daemon=True).start()
    kubelet.run()


if __name__ == "__main__":
    main(sys.argv[1:])
