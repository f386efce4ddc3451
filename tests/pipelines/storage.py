"""Google Cloud Storage on loopback, by an emulator that Google's own clients talk to."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

from tests.cluster.waiting import until
from tests.external_tools import build_go_program

PACKAGE, VERSION = "github.com/fsouza/fake-gcs-server", "v1.56.1"
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Storage:
    """A running emulator.

    Attributes:
        url: where it listens.
        credentials: file of a user whose token nobody checks, and nobody renews before 2099.
    """

    url: str
    credentials: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which Google's clients find it, and look for no other service."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.credentials),
            "NO_GCE_CHECK": "true",
        }

    def names(self, bucket: str) -> list[str]:
        """Return the objects of a bucket."""
        with urlopen(f"{self.url}/storage/v1/b/{bucket}/o") as answer:
            return [found["name"] for found in json.load(answer).get("items", [])]

    def read(self, bucket: str, name: str) -> bytes:
        """Return an object's content."""
        with urlopen(f"{self.url}/storage/v1/b/{bucket}/o/{quote(name, '')}?alt=media") as answer:
            return answer.read()


@contextmanager
def storage(buckets: Path, scratch: Path) -> Iterator[Storage]:
    """Run an emulator.

    Args:
        buckets: a folder for each bucket, with the objects that it begins with.
        scratch: a folder for its log and the credentials.
    """
    credentials = scratch / "credentials.json"
    keys = dict.fromkeys(("client_id", "client_secret", "refresh_token", "token"), "nobody")
    user = {"type": "authorized_user", **keys, "expiry": "2099-01-01T00:00:00Z"}
    credentials.write_text(json.dumps(user))
    with socket.socket() as chosen:  # it takes no port 0
        chosen.bind((HOST, 0))
        port = chosen.getsockname()[1]
    url = f"http://{HOST}:{port}"
    where = ["-scheme", "http", "-host", HOST, "-port", str(port), "-external-url", url]
    held = ["-backend", "memory", "-data", str(buckets)]
    with (scratch / "storage.log").open("w") as log:
        server = subprocess.Popen(
            [str(build_go_program(PACKAGE, VERSION)), *where, *held], stdout=log, stderr=log
        )
    try:
        until("the storage", lambda: _answers(server, url, scratch / "storage.log"))
        yield Storage(url, credentials)
    finally:
        server.kill()
        server.wait()


def _answers(server: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if server.poll() is not None:
        raise RuntimeError(f"the storage must run, got its end: {log.read_text()[-1000:]}")
    try:
        with urlopen(f"{url}/_internal/healthcheck", timeout=5):
            return True
    except (URLError, OSError):
        return False
