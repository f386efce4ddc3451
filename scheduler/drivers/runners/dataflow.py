"""Segment jobs as jobs of Dataflow: their options, which fix the size that the plan wants."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.drivers.runners.names import Names
from scheduler.drivers.runners.options import DataflowConfig
from scheduler.machine.events import Event, RunnerSet
from scheduler.machine.state import State


class Dataflow:
    """Jobs of Dataflow; nothing is asked of it."""

    def __init__(self, config: DataflowConfig, names: Names) -> None:
        """Remember where jobs go.

        Args:
            config: of the file.
            names: of the jobs.
        """
        self._config = config
        self._names = names

    def begin(self, state: State, now_sec: float) -> list[Event]:
        """Return what the machine is to know of it."""
        largest = self._config.max_workers
        if (state.runner.name, state.runner.largest) == ("dataflow", largest):
            return []
        return [RunnerSet(time_sec=now_sec, name="dataflow", largest=largest)]

    def poll(self, state: State, now_sec: float, say: Callable[[str], None]) -> list[Event]:
        """Return nothing: Dataflow has as many workers as are asked for."""
        return []

    def end(self, state: State, say: Callable[[str], None]) -> None:
        """Do nothing."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the options of a segment job."""
        return dataflow_options(self._config, self._names.of(job, process), workers)


def dataflow_options(config: DataflowConfig, name: str, workers: int) -> list[str]:
    """Return Beam's options of one job.

    Args:
        config: of the file.
        name: of the job.
        workers: machines that it begins with, and keeps unless Dataflow may add some.
    """
    staging = config.staging_location
    most = config.max_workers if config.autoscaling else workers
    return [
        "--runner=DataflowRunner",
        f"--project={config.project}",
        f"--region={config.region}",
        f"--temp_location={config.temp_location}",
        *([] if staging is None else [f"--staging_location={staging}"]),
        f"--sdk_container_image={config.image}",
        "--sdk_location=container",
        f"--worker_machine_type={config.machine_type}",
        f"--job_name={name}",
        f"--num_workers={workers}",
        f"--max_num_workers={most}",
        f"--autoscaling_algorithm={'THROUGHPUT_BASED' if config.autoscaling else 'NONE'}",
        *config.options,
    ]
