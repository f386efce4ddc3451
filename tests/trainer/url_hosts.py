"""Launchers and replicas of a run at a URL, as if each was on a host of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from presage.schemas.run.records import CHECKPOINTS, RENDEZVOUS, RunSummary
from presage.schemas.storage.location import Location
from presage.trainer.elastic.launcher import LaunchOptions, train_replicas
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, DrainInterrupt
from tests.trainer.faults import Faults
from tests.trainer.processes import PATIENCE, wait_for
from tests.trainer.url_runs import newest_of

SLOWLY = Faults().pause(0, 0.15).pause(1, 0.15)
"""So that what is to happen at a step happens before the last one."""


class Hosts:
    """A launcher and replicas, each with a directory of its own, as if on hosts of their own."""

    def __init__(self, url: str, job: Path | Location, dataset: Path, directory: Path) -> None:
        self.url, self.run, self.drain = url, Location.parse(url), Drain()
        self._job, self._dataset, self._directory = job, dataset, directory
        self._token = directory / "secret"
        directory.mkdir()
        self._token.write_text("of-tests")
        self._pool = ThreadPoolExecutor(1)
        self.replicas: list[subprocess.Popen[bytes]] = []

    def launch(self, **options: object) -> Future[RunSummary]:
        """Start a launcher in a thread, and wait until replicas can join."""
        launch = LaunchOptions(count=0, heartbeat_sec=2.0, work=self.folder_of("launcher"))
        given = TrainOptions(output=self.run, **options)  # type: ignore[arg-type]
        before = self.rendezvous()
        running = self._pool.submit(
            train_replicas,
            self._job,
            Location.parse(self._dataset),
            self.run,
            given,
            launch,
            lambda *_: None,
            self.drain,
        )
        wait_for(lambda: running.done() or self.rendezvous() not in (None, before))
        return running

    def rendezvous(self) -> bytes | None:
        """Return what replicas join, None if there is nothing."""
        with suppress(FileNotFoundError):
            return (self.run / RENDEZVOUS).read_bytes()
        return None

    def folder_of(self, name: object) -> Path:
        """Return the directory of work folders of a replica or launcher."""
        return self._directory / f"host-{name}"

    def start(
        self, number: int, expected: int = 1, faults: Faults = SLOWLY
    ) -> subprocess.Popen[bytes]:
        """Start a replica on a host of its own."""
        arguments = ["replica", self.url, "--number", str(number), "--expected", str(expected)]
        arguments += ["--token-file", str(self._token), "--work", str(self.folder_of(number))]
        arguments += ["--end-with-stdin"]
        self.replicas.append(faults.start(arguments))
        return self.replicas[-1]

    def saved(self, step: int) -> Callable[[], bool]:
        """Return whether a function that tells whether a checkpoint of a step or later exists."""

        def is_saved() -> bool:
            names = newest_of(self.url).files
            return any(
                name.endswith("MANIFEST.json") and int(name.split("/")[1]) >= step
                for name in names
                if name.startswith(CHECKPOINTS)
            )

        return is_saved

    def close(self) -> None:
        """End what runs."""
        for replica in self.replicas:
            replica.kill()
            replica.communicate()
        with suppress(DrainInterrupt):
            self.drain.ask("test")
        self._pool.shutdown()


def statuses(*replicas: subprocess.Popen[bytes]) -> list[int]:
    return [replica.wait(PATIENCE) for replica in replicas]
