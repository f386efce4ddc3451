"""Requests to the Kubernetes API server, as plain JSON; its errors; a watch in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import load_incluster_config, load_kube_config
from kubernetes.config.config_exception import ConfigException
from kubernetes.utils.quantity import parse_quantity

from presage.scheduler.drivers.kubernetes.pod_manifest import MANAGER, ClusterConfig
from presage.schemas.errors import PlanError

APPLY, MERGE = "application/apply-patch+yaml", "application/strategic-merge-patch+json"
CONNECT_SEC, ANSWER_SEC = 3.0, 20.0
"""Time limits of a connection and of an answer; the scheduler's loop waits for them."""
WATCH_SEC = 50
"""Duration of one watch. A broken connection without a reset is detected when it expires."""
GONE, CONFLICT, NOT_FOUND, INVALID = 410, 409, 404, 422


class UnreachableError(Exception):
    """The API server does not answer, or asks to retry later."""


class ApiRefusedError(Exception):
    """The API server rejects a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    @property
    def is_quota(self) -> bool:
        """Whether the namespace's quota is exceeded, rather than a permission missing."""
        return self.status == 403 and "exceeded quota" in self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class PodUsage:
    """Use of resources by a Pod, from the metrics server."""

    memory_bytes: int
    cores: float
    """Mean number of busy cores in the server's last window."""


class Api:
    """Pods of one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._open: urllib3.HTTPResponse | None = None

    @property
    def host(self) -> str:
        """Address of the API server."""
        return str(self._client.configuration.host)

    def list(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Return the Pods with these labels, and the resource version of the list."""
        pods = self._call("GET", self._pods, {"labelSelector": selector})
        return pods["items"], pods["metadata"]["resourceVersion"]

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a Pod, None if it does not exist."""
        try:
            return self._call("GET", f"{self._pods}/{name}")
        except ApiRefusedError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def apply(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Create a Pod or change our fields of it; a conflict with another manager is an error."""
        path = f"{self._pods}/{pod['metadata']['name']}"
        return self._call(
            "PATCH", path, {"fieldManager": MANAGER, "fieldValidation": "Strict"}, pod, APPLY
        )

    def delete(self, name: str, uid: str, grace_sec: int) -> None:
        """Delete the Pod with this uid, if it exists."""
        body = {"gracePeriodSeconds": grace_sec, "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", f"{self._pods}/{name}", body=body)
        except ApiRefusedError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # a new Pod has the name
                raise

    def resize(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change the resources of a running Pod."""
        query = {"fieldManager": MANAGER}
        return self._call("PATCH", f"{self._pods}/{name}/resize", query, patch, MERGE)

    def ensure_secret(self, secret: Mapping[str, Any]) -> None:
        """Create a Secret, unless one of this name exists; it is not read or changed."""
        try:
            self._call("POST", self._secrets, {"fieldManager": MANAGER}, secret)
        except ApiRefusedError as error:
            if error.status != CONFLICT:
                raise

    def delete_secret(self, name: str) -> None:
        """Delete a Secret, if it exists."""
        try:
            self._call("DELETE", f"{self._secrets}/{name}")
        except ApiRefusedError as error:
            if error.status != NOT_FOUND:
                raise

    def usage(self, selector: str) -> dict[str, PodUsage]:
        """Return the use of resources by Pod name."""
        path = f"/apis/metrics.k8s.io/v1beta1/namespaces/{self._namespace}/pods"
        metrics = self._call("GET", path, {"labelSelector": selector})
        return {
            pod["metadata"]["name"]: PodUsage(
                memory_bytes=sum(quantity(c["usage"]["memory"]) for c in pod["containers"]),
                cores=sum(float(parse_quantity(c["usage"]["cpu"])) for c in pod["containers"]),
            )
            for pod in metrics["items"]
        }

    def watch(self, selector: str, version: str) -> Generator[tuple[str, dict[str, Any]]]:
        """Return the changes after a resource version, until the server ends the watch.

        Yields:
            Event type (ADDED, MODIFIED, DELETED or BOOKMARK) and Pod.

        Raises:
            RefusedError: with status 410 if the version is too old; also during iteration.
            UnreachableError: the connection is lost; also during iteration.
        """
        query = {
            "labelSelector": selector,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SEC),
        }
        with _converted_errors():
            response = self._send("GET", self._pods, query, read_sec=WATCH_SEC + 10, whole=False)
        self._open = response
        return _events(response)

    def interrupt(self) -> None:
        """End a watch that another thread reads."""
        if self._open is not None:
            with suppress(OSError, RuntimeError, ValueError):
                self._open.shutdown()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> Any:
        with _converted_errors():
            return self._send(method, path, query or {}, body, content)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        *,
        read_sec: float = ANSWER_SEC,
        whole: bool = True,
    ) -> Any:
        return self._client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content},
            body=body,
            response_type="object" if whole else None,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=whole,
            _request_timeout=(CONNECT_SEC, read_sec),
        )


@contextmanager
def _converted_errors() -> Generator[None]:
    try:
        yield
    except ApiException as error:
        status, message = int(error.status or 0), _message(error)
        if status in (0, 401, 429) or status >= 500:  # 401: the token is being renewed
            raise UnreachableError(message) from error
        raise ApiRefusedError(status, message) from error
    except (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError) as error:
        raise UnreachableError(_cause(error)) from error


def _cause(error: Exception) -> str:
    """Return the cause without text that differs each time, such as object addresses."""
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    return str(error).rpartition(": ")[2]


def _message(error: ApiException) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.body or "")["message"])
    return str(error.reason)


def _events(response: urllib3.HTTPResponse) -> Generator[tuple[str, dict[str, Any]]]:
    with _converted_errors(), closing(response):
        for line in _lines(response):
            event: Any = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiRefusedError(int(status["code"]), status["message"])
            yield event["type"], event["object"]


def _lines(response: urllib3.HTTPResponse) -> Generator[bytes]:
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)


def connect(config: ClusterConfig) -> Api:
    """Return a client of the API server.

    Raises:
        PlanError: there is no kubeconfig, and this process is no Pod of a cluster.
    """
    configuration = Configuration()
    try:
        if config.kubeconfig is None:
            load_incluster_config(client_configuration=configuration)
        else:
            load_kube_config(config.kubeconfig, config.context, configuration)
    except (ConfigException, OSError) as error:
        raise PlanError(
            f"no API server is configured: {error}; set kubeconfig in the --cluster file, or run "
            "the scheduler in the cluster"
        ) from error
    setattr(configuration, "retries", urllib3.Retry(0))  # noqa: B010 - declared as None
    return Api(ApiClient(configuration), config.namespace)


def millicores(text: str) -> int:
    """Return a Kubernetes quantity of cores in thousandths.

    Example:
        >>> millicores("1"), millicores("250m")
        (1000, 250)
    """
    return round(1000 * parse_quantity(text))


def quantity(text: str) -> int:
    """Return a Kubernetes quantity of memory in bytes.

    Example:
        >>> quantity("3Mi"), quantity("1500"), quantity("1e3"), quantity("1500m")
        (3145728, 1500, 1000, 1)
    """
    return int(parse_quantity(text))


# Changes of Pods.

FIRST_WAIT_SEC, MAX_WAIT_SEC = 0.5, 10.0
"""Delay after the first failure of the watch, and its limit; it doubles with each failure."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A complete list of Pods."""

    pods: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class PodChange:
    """A Pod was created, changed or deleted."""

    pod: dict[str, Any]
    gone: bool


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The API server does not answer, or answers again.

    Attributes:
        reason: error message; empty when it answers.
    """

    reason: str


WatchEvent = Listed | PodChange | Unreachable


class Watch:
    """A list and its watch in a thread, continued from version to version."""

    def __init__(self, api: Api, selector: str) -> None:
        self._api = api
        self._selector = selector
        self._events: SimpleQueue[WatchEvent] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
        self._version: str | None = None
        self._wait_sec = 0.0

    def start(self) -> tuple[dict[str, Any], ...]:
        """Return the current Pods, and start to watch from there.

        Raises:
            RefusedError: access is denied.
            UnreachableError: the API server does not answer.
        """
        pods, self._version = self._api.list(self._selector)
        self._thread.start()
        return tuple(pods)

    def stop(self) -> None:
        """End the watch; wait for its thread for 5 s, as a server may not answer."""
        self._stopping.set()
        for _ in range(50):
            self._api.interrupt()  # it may have connected again
            if not self._thread.is_alive():
                return
            self._thread.join(0.1)

    def take(self) -> list[WatchEvent]:
        """Return the events since the last call."""
        return [self._events.get() for _ in range(self._events.qsize())]

    def _run(self) -> None:
        while not self._stopping.wait(self._wait_sec):
            try:
                self._follow()
            except UnreachableError as error:
                self._on_failure(str(error))
            except ApiRefusedError as error:
                if error.status == GONE:  # the version has expired
                    self._version = None
                else:
                    self._on_failure(error.message)
            except Exception as error:  # a dead thread would look like an idle cluster
                self._version = None
                self._on_failure(repr(error))

    def _follow(self) -> None:
        """List without a version; then watch until the server ends it."""
        if self._version is None:
            pods, self._version = self._api.list(self._selector)
            self._on_answer()
            self._events.put(Listed(tuple(pods)))
        events = self._api.watch(self._selector, self._version)
        self._on_answer()
        for kind, pod in events:
            if kind != "BOOKMARK":
                self._events.put(PodChange(pod, gone=kind == "DELETED"))
            self._version = pod["metadata"]["resourceVersion"]

    def _on_answer(self) -> None:
        if self._wait_sec:
            self._wait_sec = 0.0
            self._events.put(Unreachable(""))

    def _on_failure(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._wait_sec = min(MAX_WAIT_SEC, 2.0 * self._wait_sec or FIRST_WAIT_SEC)
            self._events.put(Unreachable(reason))
