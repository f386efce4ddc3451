"""The command line of each kind of process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler.controller.slots import initial_slots, slots_of_range
from scheduler.drivers.base import Endpoint
from scheduler.drivers.local.job_files import JobPaths
from schemas.hashing import NUM_SLOTS
from schemas.paths import import_variables


def environment() -> dict[str, str]:
    """Return this process's environment with our packages on PYTHONPATH."""
    return {**os.environ, **import_variables()}


def module_command(name: str) -> list[str]:
    """Return the start of a command of one of our packages."""
    return [sys.executable, "-m", name]


def generate_command(job_file: Path, output: Path) -> list[str]:
    """Return the command that writes a job's synthetic log."""
    return [*module_command("pipelines"), "generate", str(job_file), "--output", str(output)]


def segment_command(
    paths: JobPaths, number: int, workers: int, runner_options: Sequence[str] = ()
) -> list[str]:
    """Return the command that builds a segment and commits it after its predecessors.

    Args:
        paths: of the job.
        number: of the segment.
        workers: of Beam's local runner.
        runner_options: options of another Beam runner; empty for the local one.
    """
    command = module_command("pipelines")
    if number:
        command += ["append", str(paths.job_file), "--dataset", str(paths.dataset)]
        command += ["--position", str(number), "--in-order"]
    else:
        command += ["build", str(paths.job_file), "--output", str(paths.dataset)]
    command += ["--input", str(paths.segment(number)), "--json"]
    command += ["--final"] if number + 1 == paths.num_segments else []
    return [*command, *paths.build_flags, *(runner_options or local_runner_options(workers))]


def local_runner_options(workers: int) -> list[str]:
    """Return the options of Beam's local runner."""
    count = f"--direct_num_workers={workers}"
    return [count, "--direct_running_mode=multi_processing"] if workers > 1 else [count]


def coordinator_command(
    paths: JobPaths, *, grouped: bool, served: bool, endpoint: Endpoint | None = None
) -> list[str]:
    """Return the command that starts or resumes training.

    Args:
        paths: of the job.
        grouped: whether separate replica processes train.
        served: whether stores hold the rows.
        endpoint: how processes connect; None if all share one loopback.
    """
    job = paths.served_job if served else paths.job_file
    command = [*module_command("trainer"), "train", str(job), "--dataset", str(paths.dataset)]
    command += ["--output", str(paths.run), "--follow", "--resume"]
    command += ["--embedding", "cached"] if served else []
    command += ["--replicas", "0"] if grouped else []
    command += paths.write_flags
    command += ["--host", endpoint.host] if grouped and endpoint is not None else []
    return command


def replica_command(
    paths: JobPaths, number: int, threads: int, endpoint: Endpoint | None = None
) -> list[str]:
    """Return the command of one replica."""
    command = [*module_command("trainer"), "replica", str(paths.run), "--number", str(number)]
    command += ["--threads", str(threads)]
    return command if endpoint is None else [*command, *_server_flags(endpoint)]


def store_command(
    paths: JobPaths, number: int, count: int, endpoint: Endpoint | None = None, first: int = 0
) -> list[str]:
    """Return the command of one store.

    Args:
        paths: of the job.
        number: of the store.
        count: stores that start with slots; those of higher numbers start empty.
        endpoint: how processes connect; None if all share one loopback.
        first: number of the first store that starts with slots.
    """
    index = number - first
    slots = "{}:{}".format(*initial_slots(index, count)) if index < count else "none"
    command = [*module_command("trainer"), "store", "--directory", str(paths.store(number))]
    command += ["--slots", slots, *paths.write_flags]
    return [*command, *(_loopback_flags(paths) if endpoint is None else _server_flags(endpoint))]


def move_command(
    paths: JobPaths,
    ranges: Sequence[int],
    sources: Sequence[int],
    target: int,
    endpoint: Endpoint | None = None,
) -> list[str]:
    """Return the command that moves slot ranges to a store.

    Args:
        paths: of the job.
        ranges: numbers of the ranges; empty for all that the sources own.
        sources: running stores that may own the ranges.
        target: store.
        endpoint: how processes connect; None if all share one loopback.
    """
    slots = [slots_of_range(number) for number in ranges] or [(0, NUM_SLOTS)]
    command = [*module_command("trainer"), "migrate-slots", "--served"]
    command += ["--slots", ",".join(f"{first}:{end}" for first, end in slots)]
    command += ["--from", ",".join(paths.store_address(number) for number in sources)]
    command += ["--to", paths.store_address(target)]
    return [*command, *(_loopback_flags(paths) if endpoint is None else _client_flags(endpoint))]


def _loopback_flags(paths: JobPaths) -> list[str]:
    return ["--token-file", str(paths.token)]


def _server_flags(endpoint: Endpoint) -> list[str]:
    files = ["--tls-cert", endpoint.certificate_file, "--tls-key", endpoint.key_file]
    return ["--host", endpoint.host, *files, *_client_flags(endpoint)]


def _client_flags(endpoint: Endpoint) -> list[str]:
    files = ["--token-file", endpoint.token_file, "--trusted", endpoint.certificate_file]
    return [*files, "--tls-name", endpoint.name]
