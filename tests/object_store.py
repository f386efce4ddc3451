"""Real object stores on this machine, and a proxy before them that injects faults.

versitygw for S3, fake-gcs-server for Google Cloud Storage (its JSON API is conditional, but clients
use the XML API, to which the proxy translates: `gcs_api.py`), and Azurite for Azure.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import select
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tests import fork_server, gcs_api
from tests.external_tools import build_go_program, install_npm_packages
from tests.fault_proxy import Faults, fault_proxy

VERSITYGW, VERSITYGW_VERSION = "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"
FAKE_GCS, FAKE_GCS_VERSION = "github.com/fsouza/fake-gcs-server", "v1.56.1"
AZURITE = Path(__file__).parent / "azurite"
ACCESS_KEY, SECRET_KEY = "presage-test", "presage-test-secret"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = base64.b64encode(b"a key that only tests know").decode()
BUCKET = "bucket"


@contextmanager
def s3_server(folder: Path) -> Generator[str]:
    """Run versitygw over a folder with one empty bucket; yield its endpoint."""
    program = build_go_program(VERSITYGW, VERSITYGW_VERSION)
    (folder / "root" / BUCKET).mkdir(parents=True)
    (folder / "meta").mkdir()
    port = _free_port()
    command = [program, "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--quiet"]
    command += ["--port", f"127.0.0.1:{port}", "posix", "--sidecar", folder / "meta"]
    with _running([*command, folder / "root"], port, folder):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gcs_server(folder: Path, buckets: Path | None = None) -> Generator[str]:
    """Run fake-gcs-server, whose JSON API Google's own clients use; yield its endpoint.

    Args:
        folder: for its log.
        buckets: a folder for each bucket, with the objects that it begins with; one empty one.
    """
    program = build_go_program(FAKE_GCS, FAKE_GCS_VERSION)
    if buckets is None:
        buckets = folder / "buckets"
        (buckets / BUCKET).mkdir(parents=True)
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", port]
    command += ["-external-url", endpoint, "-public-host", f"127.0.0.1:{port}"]
    with _running([*command, "-backend", "memory", "-data", buckets], port, folder):
        yield endpoint


@contextmanager
def azure_server(folder: Path) -> Generator[str]:
    """Run Azurite with one empty container; yield the endpoint of its account."""
    program = install_npm_packages("azurite", AZURITE) / "azurite-blob"
    port = _free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", port, "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    account = {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    with _running(command, port, folder, account):
        _create_container(f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}/{BUCKET}")
        yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"


def _create_container(url: str) -> None:
    """Send the one request that clients of objects do not know, with a shared key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2020-10-02"}
    text = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    text += f"/{AZURE_ACCOUNT}{urlsplit(url).path}\nrestype:container"
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Length"] = "0"
    urlopen(Request(f"{url}?restype=container", method="PUT", headers=headers)).close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _running(
    command: list[Any], port: int, folder: Path, variables: Mapping[str, str] | None = None
) -> Generator[None]:
    """Run a server until the end of the body, which begins when it answers."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **(variables or {})}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=log, env=environment, cwd=folder
        )
    try:
        while server.poll() is None:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 1)):
                break
            time.sleep(0.02)
        else:
            raise RuntimeError(f"store ended: {(folder / 'server.log').read_text()[-1000:]}")
        yield
    finally:
        server.kill()
        server.wait()


@dataclass(frozen=True, slots=True)
class Store:
    """A running store.

    Attributes:
        scheme: of its URLs.
        endpoint: its address, or that of a proxy.
    """

    scheme: str
    endpoint: str

    def new_url(self) -> str:
        """Return the URL of a new empty directory."""
        return f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a client finds it."""
        if self.scheme == "s3":
            return s3_environment(self.endpoint)
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": self.endpoint, "NO_GCE_CHECK": "true"}
        key = {"AZURE_STORAGE_ACCOUNT": AZURE_ACCOUNT, "AZURE_STORAGE_KEY": AZURE_KEY}
        return {**key, "AZURE_STORAGE_ENDPOINT": self.endpoint}

    @contextmanager
    def behind_proxy(self, faults: Faults) -> Generator[Store]:
        """Run a proxy before it; yield the store as seen through the proxy."""
        with fault_proxy(self.endpoint, faults) as endpoint:
            yield Store(self.scheme, endpoint)


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which a client finds an S3 server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@contextmanager
def start_store(scheme: str, folder: Path) -> Generator[Store]:
    """Run a store that clients of objects can use; `folder` exists and is empty."""
    with ExitStack() as stack:
        if scheme == "s3":
            endpoint = stack.enter_context(s3_server(folder))
        elif scheme == "az":
            endpoint = stack.enter_context(azure_server(folder))
        else:
            endpoint = stack.enter_context(gcs_server(folder))
            endpoint = stack.enter_context(fault_proxy(endpoint, Faults(), gcs_api.forward))
        yield Store(scheme, endpoint)


def shared_store(scheme: str) -> Store:
    """Return a store that all workers of a test session share; it ends with the session."""
    session = Path(os.environ[fork_server.ADDRESS])
    folder = session / f"store-{scheme}"
    address = session / f"store-{scheme}.url"
    with (session / f"store-{scheme}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            _install(scheme)
            folder.mkdir()
            owner = (session / "owner").read_text()
            with (session / f"store-{scheme}.log").open("wb") as log, fork_server.without_forking():
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.object_store", scheme, folder, address, owner],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while not address.exists():
                assert server.poll() is None, (session / f"store-{scheme}.log").read_text()
                time.sleep(0.01)
    return Store(scheme, address.read_text())


def _install(scheme: str) -> None:
    """Build the server here, where a test can be skipped if that is impossible."""
    if scheme == "s3":
        build_go_program(VERSITYGW, VERSITYGW_VERSION)
    elif scheme == "gs":
        build_go_program(FAKE_GCS, FAKE_GCS_VERSION)
    else:
        install_npm_packages("azurite", AZURITE)


def main(scheme: str, folder: str, address: str, owner: str) -> None:
    """Run a store until a process ends; write its endpoint to a file."""
    ends = os.pidfd_open(int(owner))
    with start_store(scheme, Path(folder)) as store:
        unfinished = Path(f"{address}.partial")
        unfinished.write_text(store.endpoint)
        unfinished.rename(address)
        select.select([ends], [], [])


def new_url() -> str:
    """Return the URL of a new empty directory of an S3 store."""
    return Store("s3", "").new_url()


if __name__ == "__main__":
    main(*sys.argv[1:])
