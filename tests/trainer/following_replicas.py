"""Replicas beside a pipeline that commits the segments that they wait for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from presage.schemas.run.records import RunSummary
from presage.trainer.elastic.launcher import LocalReplicas
from presage.trainer.recovery import Drain
from tests.trainer.growing import Versions
from tests.trainer.processes import num_steps, wait_for
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import checkpoint_at

WAITS = (12, 16, 19, 20)
"""Steps before which replicas wait while the next version is not committed."""


class FollowingReplicas:
    """Replicas of a run that follows its dataset, of which the first version is committed."""

    def __init__(self, job: Path, versions: list[Path], folder: Path) -> None:
        """Commit the first version, if there is one."""
        self.job, self.dataset, self.run = job, folder / "dataset", folder / "run"
        self.replicas: list[LocalReplicas] = []
        self.drain = Drain()
        self.versions = Versions(versions, self.dataset)
        self._ended = threading.Event()

    def kill(self, number: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a replica, which may just be restarted."""
        self.until(lambda: number in self.replicas[-1].pids)
        os.kill(self.replicas[-1].pids[number], with_signal)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the run trains."""
        wait_for(lambda: condition() or self._has_ended())

    def _has_ended(self) -> bool:
        assert not self._ended.is_set(), "the run has ended before"
        return False

    def waits_at(self, step: int) -> bool:
        """Return whether all steps before one are trained and saved, as before a wait."""
        return num_steps(self.run) == step and checkpoint_at(self.run, step).is_dir()

    def train(
        self,
        at_wait: Callable[[int], None] | None = None,
        waits: Sequence[int] = WAITS,
        **options: Any,
    ) -> RunSummary:
        """Train by `run_replicas`, and act whenever the replicas wait.

        Args:
            at_wait: called with each step of `waits`; None: commits the next version.
            waits: steps to wait at.
            options: of `run_replicas`.
        """
        errors: list[BaseException] = []

        def watch() -> None:
            try:
                for step in waits:
                    self.until(lambda step=step: self.waits_at(step))
                    if at_wait is None:
                        self.versions.commit_next()
                    else:
                        at_wait(step)
            except BaseException as error:
                errors.append(error)
                self.drain.ask("SIGTERM")

        watching = threading.Thread(target=watch)
        self._ended.clear()
        watching.start()
        try:
            return run_replicas(
                self.job,
                self.run,
                dataset=self.dataset,
                on_start=self.replicas.append,
                drain=self.drain,
                follow=True,
                **options,
            )
        finally:
            self._ended.set()
            watching.join()
            assert not errors, errors
