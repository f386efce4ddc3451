"""The place where segment jobs run, as a driver asks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from scheduler.drivers.runners.dataflow import Dataflow
from scheduler.drivers.runners.flink import Flink
from scheduler.drivers.runners.names import Names
from scheduler.drivers.runners.options import RunnerConfig
from scheduler.machine.events import Event, RunnerSet
from scheduler.machine.state import State
from schemas.declare import read_yaml


class Place(Protocol):
    """Where segment jobs run."""

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know before it decides anything.

        Raises:
            SchemaError: no segment job can run there.
        """
        ...

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return what is new; asked again and again, twice a second or so."""
        ...

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Leave nothing behind of segment jobs that have ended; asked once, at the end."""
        ...

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return Beam's options of a segment job; none where the local runner's suit."""
        ...


class Local:
    """Beam's local runner: a segment job runs in its own processes."""

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know, where it knew another place."""
        if state.runner.name == "local":
            return []
        return [RunnerSet(time_sec=now_sec, name="local")]

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return nothing: the budget bounds all."""
        return []

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Do nothing."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return nothing: the local runner has options of its own."""
        return []


def place_of(file: Path | None, output: Path) -> Place:
    """Return where a file says that segment jobs run.

    Args:
        file: none for the local runner.
        output: folder of the scheduler.

    Raises:
        SchemaError: the file is none.
    """
    config = RunnerConfig() if file is None else read_yaml(file, RunnerConfig)
    if config.runner == "flink" and config.flink is not None:
        return Flink(config.flink, Names.of_scheduler(output), str(file))
    if config.runner == "dataflow" and config.dataflow is not None:
        return Dataflow(config.dataflow, Names.of_scheduler(output))
    return Local()
