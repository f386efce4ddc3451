"""The files of a job, and the command line of each kind of its processes, on every platform."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scheduler.controller.events import LoadKnown
from scheduler.controller.slots import initial_slots, slots_of_range
from scheduler.drivers.base import Endpoint
from scheduler.model.snapshot import compute_lookahead
from schemas.accesses import NextUses, index_load
from schemas.config.job import load_job
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.hashing import NUM_SLOTS
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER, import_variables, resolve_beside
from schemas.run_log import STORE_ADDRESS
from schemas.storage import Location


@dataclass(frozen=True, slots=True)
class CommandFlags:
    """Flags that commands of our packages get besides paths.

    Attributes:
        single_writer: whether nothing else writes to runs and stores there, as the user asserts
            (network filesystems); datasets may have several writers.
        allow_outside: whether the job's schema may be outside the folder of the job file.
    """

    single_writer: bool = False
    allow_outside: bool = False

    @property
    def write(self) -> list[str]:
        """Flags of commands that write a run or a store."""
        return [SINGLE_WRITER] if self.single_writer else []

    @property
    def build(self) -> list[str]:
        """Flags of commands that build."""
        return [ALLOW_OUTSIDE] if self.allow_outside else []


NO_FLAGS = CommandFlags()


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Paths of one job.

    Attributes:
        job_file: the job file, or its URL.
        folder: of everything else.
        num_segments: segments of its input.
        flags: of the commands of its processes.
    """

    job_file: Path | Location
    folder: Path
    num_segments: int
    flags: CommandFlags = NO_FLAGS

    @property
    def dataset(self) -> Path:
        """The dataset."""
        return self.folder / "dataset"

    @property
    def run(self) -> Path:
        """The training run."""
        return self.folder / "run"

    @property
    def processes(self) -> Path:
        """Folder of pids and output of processes."""
        return self.folder / "processes"

    @property
    def stores(self) -> Path:
        """Folder of the stores, their token and the job file with their addresses."""
        return self.folder / "stores"

    @property
    def served_job(self) -> Path:
        """Job file with the addresses of the stores."""
        return self.stores / "job.yaml"

    @property
    def token(self) -> Path:
        """Token of stores that share one loopback."""
        return self.stores / "token"

    def store(self, number: int) -> Path:
        """Return the folder of a store."""
        return self.stores / str(number)

    def store_address(self, number: int) -> str:
        """Return the address of a store, which stays the same across restarts."""
        return f"file://{self.store(number) / STORE_ADDRESS}"

    def segment(self, number: int) -> Path:
        """Return the input folder of one segment."""
        return segment_folder(self.folder, number)


def segment_folder(folder: Path, number: int) -> Path:
    """Return the input folder of one segment below the folder of its job."""
    return folder / "segments" / f"{number:05d}"


def prepare_stores(
    paths: JobPaths, numbers: Sequence[int], endpoint: Endpoint | None = None
) -> None:
    """Write the job file with the addresses of stores; nothing if it is unchanged.

    Each address is a file in which the store publishes its current network address.

    Args:
        paths: of the job.
        numbers: of the stores that own slots.
        endpoint: how processes connect; None if all share one loopback.
    """
    paths.stores.mkdir(parents=True, exist_ok=True)
    stores: dict[str, object] = {"addresses": [paths.store_address(number) for number in numbers]}
    if endpoint is None:
        _write_token(paths.token)
        stores["token_file"] = str(paths.token)
    else:
        stores["token_file"] = endpoint.token_file
        stores["certificates"] = endpoint.certificate_file
        stores["certificate_name"] = endpoint.name
    body: Any = yaml.safe_load(paths.job_file.read_bytes())
    schema = load_job(paths.job_file).data.schema
    body["data"]["schema"] = str(resolve_beside(paths.job_file, schema).resolve())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **stores, "elastic": True}
    text = yaml.safe_dump(body, sort_keys=False).encode()
    if not paths.served_job.exists() or paths.served_job.read_bytes() != text:
        replace_bytes(paths.served_job, text)


def _write_token(path: Path) -> None:
    if not path.exists():
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32) + "\n")
        new.replace(path)


def discard_stores(paths: JobPaths, numbers: Collection[int]) -> None:
    """Remove the folders of all stores except these.

    The address goes first: another store may come to listen there.
    """
    for folder in paths.stores.iterdir() if paths.stores.is_dir() else ():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in numbers:
            (folder / STORE_ADDRESS).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # the store may still be writing


def read_load(paths: JobPaths, job: str, time_sec: float) -> LoadKnown | None:
    """Return the load of the indexed steps, None without an index for the job's batch size."""
    train = load_job(paths.job_file).train
    try:
        dataset = open_dataset(paths.dataset)
    except SchemaError:
        return None  # damaged: the trainer reports it in full
    complete = dataset.complete_indexes()
    entry = next((i for i in complete if i.batch_samples == train.batch_samples), None)
    if entry is None:
        return None
    index = dataset.open_index(entry)
    order = index.order
    slots = sum(index_load(dataset, table, order).slots for table in dataset.job.data.tables)
    assert not isinstance(slots, int), "a job has a table"
    distances = (NextUses(dataset, index, table) for table in dataset.job.data.tables)
    touched = compute_lookahead(distances, train.cache).touched_rows
    ends = [(period + 1) * len(touched) // len(slots) - 1 for period in range(len(slots))]
    return LoadKnown(
        time_sec=time_sec,
        job=job,
        num_steps=order.num_steps,
        slots=tuple(tuple(row) for row in slots.tolist()),
        touched_rows=tuple(touched[ends].tolist()),
    )


# Command lines.


def environment() -> dict[str, str]:
    """Return this process's environment with our packages on PYTHONPATH."""
    return {**os.environ, **import_variables()}


def module_command(name: str) -> list[str]:
    """Return the start of a command of one of our packages."""
    return [sys.executable, "-m", name]


def generate_command(job_file: Path | Location, output: Path) -> list[str]:
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
    return [*command, *paths.flags.build, *(runner_options or local_runner_options(workers))]


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
    command += paths.flags.write
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
    command += ["--slots", slots, *paths.flags.write]
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
