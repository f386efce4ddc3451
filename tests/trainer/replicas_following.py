"""Replicas beside a pipeline that commits what they wait for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from schemas.run_log import RunSummary, StepMetric
from schemas.storage import Location
from tests.trainer.faults import Faults
from tests.trainer.growing import commit
from tests.trainer.processes import num_steps, wait_for
from tests.trainer.runs import checkpoint_at
from trainer.elastic.launcher import LaunchOptions, LocalReplicas, StartChild, train_replicas
from trainer.options import TrainOptions
from trainer.recovery import Drain

KNOWN = (12, 16, 19, 20)
"""Steps that may be trained while the next version is not committed."""


class Together:
    """Replicas beside a pipeline, which commits what they wait for."""

    def __init__(self, job: Path, versions: list[Path], folder: Path) -> None:
        """Commit the first version."""
        self.job, self.dataset, self.run = job, folder / "dataset", folder / "run"
        self.replicas: list[LocalReplicas] = []
        self.drain = Drain()
        self.left = iter(versions)
        self._ended = threading.Event()
        self.more()

    def more(self) -> None:
        """Commit the next version, if there is one."""
        version = next(self.left, None)
        if version is not None:
            commit(version, self.dataset)

    def kill(self, number: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a replica, which may just be started again."""
        self.until(lambda: number in self.replicas[-1].pids)
        os.kill(self.replicas[-1].pids[number], with_signal)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something."""
        wait_for(lambda: happened() or self._has_ended())

    def _has_ended(self) -> bool:
        assert not self._ended.is_set(), "the run has ended before"
        return False

    def waits(self, step: int) -> bool:
        """Tell whether all steps before one are trained and saved, as they are before a wait."""
        return num_steps(self.run) == step and checkpoint_at(self.run, step).is_dir()

    def train(
        self,
        at_wait: Callable[[int], None],
        waits: Sequence[int] = KNOWN,
        *,
        at_step: dict[int, Callable[[], None]] | None = None,
        count: int = 2,
        faults: Faults | None = None,
        start: StartChild | None = None,
        progress: Callable[[str], None] = lambda _: None,
        **options: object,
    ) -> RunSummary:
        """Train, and do something whenever the replicas wait.

        Args:
            at_wait: called with each step that is waited at.
            waits: those steps.
            at_step: done after steps.
            count: replicas.
            faults: that happen to them.
            start: starts one; None: with the faults.
            progress: called with a line when the start waits.
            options: of the run.
        """
        wanted, failed = dict(at_step or {}), list[BaseException]()

        def act(metric: StepMetric, _: int) -> None:
            if metric.step in wanted:
                wanted.pop(metric.step)()

        def watch() -> None:
            try:
                for step in waits:
                    self.until(lambda step=step: self.waits(step))
                    at_wait(step)
            except BaseException as error:
                failed.append(error)
                self.drain.ask("SIGTERM")

        launch = LaunchOptions(
            count=count, heartbeat_sec=2.0, start=start or (faults or Faults()).start
        )
        given = TrainOptions(follow=True, **options)  # type: ignore[arg-type]
        paths = (self.job, Location.parse(self.dataset), self.run)
        watching = threading.Thread(target=watch)
        self._ended.clear()
        watching.start()
        try:
            return train_replicas(
                *paths, given, launch, act, self.drain, self.replicas.append, progress
            )
        finally:
            self._ended.set()
            watching.join()
            assert not failed, failed
