"""One container of a node: the process that watches over it, and what its node knows of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cluster import container, pods
from tests.cluster.pods import Pod

SUPERVISOR = [sys.executable, "-I", "-S", str(Path(container.__file__))]
"""Starts in 20 ms: no site packages, no environment of Python."""


class Started:
    """One container that was started, and the last that is known of its Pod."""

    def __init__(self, pod: Pod, folder: Path, variables: Mapping[str, str]) -> None:
        """Start it.

        Args:
            pod: one that this node can run.
            folder: of its log and of its own files, which go with it.
            variables: those of Secrets and ConfigMaps.
        """
        self.pod = pod
        self.folder = folder
        self.log = folder / "log"
        self.message = folder / pods.MESSAGE
        self.started_at = pods.now()
        self.applied: dict[str, dict[str, str]] = {}
        self.end: dict[str, Any] | None = None
        self.misfit: tuple[str, dict[str, dict[str, str]]] | None = None
        self._grace_sec = float("inf")
        variables = pods.environment(pod, {**os.environ, **variables})
        mounted = pods.mounts(pod, folder)
        for path in mounted.values():
            if Path(path) == self.message:
                folder.mkdir(parents=True, exist_ok=True)
                self.message.touch()
            else:
                Path(path).mkdir(parents=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*SUPERVISOR, *pods.command(pod, variables, mounted)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=variables,
                cwd=pod.spec.containers[0].working_dir,
                start_new_session=True,
            )
        self.apply(pods.resources(pod))

    def apply(self, resources: dict[str, dict[str, str]]) -> None:
        """Give it these resources; of them only the limit of memory is felt."""
        self.applied = resources
        self._send(f"limit {pods.amount(resources, 'limits', 'memory'):.0f}")

    def stop(self, grace_sec: float) -> None:
        """Ask it to end, and kill it after so many seconds."""
        if grace_sec < self._grace_sec:
            self._grace_sec = grace_sec
            self._send(f"stop {grace_sec}")

    def wait(self) -> dict[str, Any]:
        """Return how it ended, when it has."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.wait()
        end = json.loads(line) if line else container.ending(container.KILLED, "Error")
        end["message"] = end["message"] or pods.message(
            self.pod, self.message, self.log, end["exitCode"]
        )
        return end

    def remove_volumes(self) -> None:
        """Remove its own folders, as its node does when the Pod is gone; the log stays."""
        for path in pods.mounts(self.pod, self.folder).values():
            if Path(path) != self.message:
                shutil.rmtree(path, ignore_errors=True)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is reported soon
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
