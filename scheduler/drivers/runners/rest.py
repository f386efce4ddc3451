"""What Flink's REST API tells of a session cluster: its slots, and who holds them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

TIMEOUT_SEC = 5.0
"""A scheduler that waits longer for an answer looks at nothing else meanwhile."""
ENDED = ("FINISHED", "CANCELED", "FAILED", "CANCELLING")
"""States of jobs that are not to be cancelled."""
GONE = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT)
"""Answers about one that is not there any more, or that ended before it could be cancelled."""


class SilentError(Exception):
    """The API does not answer, or what answers is none."""


@dataclass(frozen=True, slots=True)
class Load:
    """Slots of a cluster.

    Attributes:
        free: that no job holds.
        own: that jobs of the asked names hold.
        total: all.
        running: ids of jobs of these names that have not ended, by id their names.
    """

    free: int
    own: int
    total: int
    running: Mapping[str, str]


class FlinkRest:
    """The REST API of one cluster."""

    def __init__(self, address: str, timeout_sec: float = TIMEOUT_SEC) -> None:
        """Remember where it is.

        Args:
            address: URL.
            timeout_sec: longest time for one answer.
        """
        self._address = address.rstrip("/")
        self._timeout_sec = timeout_sec
        # A cluster lies where its scheduler reaches it, not behind a proxy for the web.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def load(self, prefix: str) -> Load:
        """Return how busy the cluster is now.

        Free slots are read first: a job of ours that takes some meanwhile is counted twice then,
        never not at all.

        Args:
            prefix: of the names of own jobs.

        Raises:
            SilentError: there is no answer.
        """
        try:
            managers = self._ask("GET", "/taskmanagers")["taskmanagers"]
            jobs = {job["jid"]: job for job in self._ask("GET", "/jobs/overview")["jobs"]}
            names = {i: job["name"] for i, job in jobs.items() if job["name"].startswith(prefix)}
            busy = [m["id"] for m in managers if names and m["freeSlots"] < m["slotsNumber"]]
            return Load(
                free=sum(manager["freeSlots"] for manager in managers),
                own=sum(self._held(manager, names) for manager in busy),
                total=sum(manager["slotsNumber"] for manager in managers),
                running={i: n for i, n in names.items() if jobs[i]["state"] not in ENDED},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SilentError(f"an answer that is none of Flink's ({error!r})") from error

    def cancel(self, job_id: str) -> None:
        """Ask the cluster to end a job; one that is gone has ended.

        Raises:
            SilentError: there is no answer.
        """
        self._ask("PATCH", f"/jobs/{quote(job_id)}?mode=cancel")

    def _held(self, manager: str, names: Mapping[str, str]) -> int:
        """Return the slots of a task manager that own jobs hold; none where it is gone."""
        answer = self._ask("GET", f"/taskmanagers/{quote(manager, safe=':')}")
        return sum(slot["jobId"] in names for slot in answer.get("allocatedSlots", []))

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self._address + path, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_sec) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in GONE and path.count("/") > 1:
                return {}  # one that was listed a moment ago
            raise SilentError(f"HTTP {error.code} of {path}") from error
        except urllib.error.URLError as error:
            raise SilentError(str(error.reason)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SilentError(f"{type(error).__name__}: {error}") from error
