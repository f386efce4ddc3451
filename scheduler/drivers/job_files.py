"""The files of a job, and the command line of each kind of its processes, on every platform."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from presage.scheduler.controller.events import LoadKnown
from presage.scheduler.controller.slots import slots_of_range
from presage.scheduler.controller.state import State
from presage.scheduler.drivers.base import Endpoint
from presage.scheduler.model.plan_inputs import compute_lookahead
from presage.schemas.config.job import parse_job
from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.accesses import slot_accesses
from presage.schemas.dataset.opened import open_dataset, reading_histories
from presage.schemas.dataset.run_next_uses import NextUses, open_table
from presage.schemas.entry import process_variables
from presage.schemas.hashing import NUM_SLOTS
from presage.schemas.paths import is_below, schema_path
from presage.schemas.run.records import STORE_ADDRESS
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaths:
    """Where the files of one job are."""

    source: Path | Location
    """The job file as it was submitted."""
    folder: Path
    """Folder of the scheduler, which its processes need not see: records of processes, the list of
    segments, the token of processes of this machine."""
    storage: Location
    """What its processes share: job file and schema, dataset, run, addresses of stores."""
    input: Location
    segments: tuple[tuple[str, ...], ...]
    """Paths of each segment's files below the input; none of a segment of all files."""
    allow_outside: bool = False

    @property
    def num_segments(self) -> int:
        """Segments of its input."""
        return len(self.segments)

    @property
    def job_file(self) -> Location:
        """Copy of the job file that its processes read."""
        return self.storage / "job.yaml"

    @property
    def served_job(self) -> Location:
        """Job file with the addresses of the stores."""
        return self.storage / "job-with-stores.yaml"

    @property
    def dataset(self) -> Location:
        """Directory of the dataset."""
        return self.storage / "dataset"

    @property
    def run(self) -> Location:
        """Folder of the training run."""
        return self.storage / "run"

    @property
    def stores(self) -> Location:
        """Directory with the addresses of stores and, at a local path, with their logs."""
        return self.storage / "stores"

    @property
    def processes(self) -> Path:
        """Folder of pids and output of processes."""
        return self.folder / "processes"

    @property
    def token(self) -> Path:
        """Token of stores, and of replicas of a run at a URL, that share one loopback."""
        return self.folder / "stores" / "token"

    @property
    def is_remote(self) -> bool:
        """Whether the shared files are at an object store, so that processes need folders."""
        return self.storage.local is None

    def store(self, number: int, work: Path) -> Path:
        """Return the folder of a store's log."""
        if self.stores.local is not None:
            return self.stores.local / str(number)
        return work / f"store-{number}"

    def address_file(self, number: int) -> Location:
        """Return the file in which a store publishes its current network address."""
        return self.stores / str(number) / STORE_ADDRESS

    def store_address(self, number: int) -> str:
        """Return the address of a store, which stays the same across restarts."""
        file = self.address_file(number)
        return file.url if self.is_remote else f"file://{file}"


def copy_job_file(paths: JobPaths, text: str) -> None:
    """Write the text of the job file, and copy its schema, to where the job's processes read them.

    Raises:
        SchemaError: one of them is invalid.
    """
    name = parse_job(text, str(paths.source)).data.schema
    schema = schema_path(paths.source, name, allow_outside=paths.allow_outside)
    if not is_below(os.path.normpath(name)):
        name = "schema.pbtxt"
        body: Any = yaml.safe_load(text)
        body["data"]["schema"] = name
        text = yaml.safe_dump(body, sort_keys=False)
    _write_changed(paths.storage / os.path.normpath(name), schema.read_bytes())
    _write_changed(paths.job_file, text.encode())


def _write_changed(location: Location, data: bytes) -> None:
    """Write a file unless it has this content, as others may be reading it."""
    try:
        if location.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    location.write_bytes(data)


def prepare_stores(
    paths: JobPaths, numbers: Sequence[int], endpoint: Endpoint | None = None
) -> None:
    """Write the job file with the addresses of stores; nothing if it is unchanged.

    Each address is a file in which the store publishes its current network address.
    """
    stores: dict[str, object] = {"addresses": [paths.store_address(number) for number in numbers]}
    if endpoint is None:
        ensure_token(paths.token)
        stores["token_file"] = str(paths.token)
    else:
        stores["token_file"] = endpoint.token_file
        stores["certificates"] = endpoint.certificate_file
        stores["certificate_name"] = endpoint.name
    body: Any = yaml.safe_load(paths.job_file.read_text())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **stores}
    _write_changed(paths.served_job, yaml.safe_dump(body, sort_keys=False).encode())


def ensure_token(path: Path) -> None:
    """Write the token of processes that share one loopback, unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32) + "\n")
        new.replace(path)


def discard_stores(paths: JobPaths, numbers: Collection[int], work: Path) -> None:
    """Remove addresses and folders of all stores except these.

    The address goes first: another store may come to listen there.
    """
    names, _ = paths.stores.children()
    for number in (int(name) for name in names if name.isdigit()):
        if number not in numbers:
            paths.address_file(number).parent.remove([STORE_ADDRESS])
            # The store may still be writing.
            shutil.rmtree(paths.store(number, work), ignore_errors=True)


def read_load(paths: JobPaths, job: str, train: TrainConfig, time_sec: float) -> LoadKnown | None:
    """Return the load of the indexed steps, None if there are none of the job's batch size.

    Raises:
        SchemaError: the dataset is damaged, or the store failed.
    """
    dataset = reading_histories(open_dataset(paths.dataset), train.windows)
    complete = dataset.complete_indexes()
    entry = next((i for i in complete if i.batch_samples == train.batch_samples), None)
    if entry is None:
        return None
    index = dataset.open_index(entry)
    num_steps, slots_of_tables = index.order.num_steps, list[NDArray[np.int64]]()
    if not num_steps:
        return None

    def tables() -> Iterator[NextUses]:
        for table in dataset.job.data.tables:
            accesses, next_uses = open_table(dataset, index, table)
            slots_of_tables.append(slot_accesses(accesses.steps(), accesses.rows, num_steps))
            yield next_uses

    touched = compute_lookahead(tables(), train.cache).touched_rows
    slots = np.sum(slots_of_tables, axis=0)
    ends = [(period + 1) * len(touched) // len(slots) - 1 for period in range(len(slots))]
    return LoadKnown(
        time_sec=time_sec,
        job=job,
        num_steps=num_steps,
        slots=tuple(tuple(row) for row in slots.tolist()),
        touched_rows=tuple(touched[ends].tolist()),
    )


# Command lines.

Progress = Callable[[str], None]
"""Called with one line for each message."""


class SegmentRunner:
    """Where segment jobs run. This one is Beam's local runner, in their own processes."""

    largest_job: int | None = None
    """Most workers of one segment job; None if not limited."""

    def check(self) -> None:
        """Raise SchemaError if no segment job can run there."""

    def cancel_ended(self, state: State, now_sec: float, progress: Progress) -> None:
        """Cancel what remains of segment jobs that have ended; called about twice a second."""

    def options(self, job: str, process: str, workers: int) -> list[str]:
        """Return the Beam options of a segment job; those of the local runner are added later."""
        return []


def environment() -> dict[str, str]:
    """Return this process's environment with our packages on PYTHONPATH."""
    return {**os.environ, **process_variables()}


def module_command(name: str) -> list[str]:
    """Return the start of a command of one of our packages."""
    return [sys.executable, "-m", f"presage.{name}"]


def generate_command(job_file: Path | Location, output: Path | Location) -> list[str]:
    """Return the command that writes a job's synthetic log."""
    return [*module_command("pipelines"), "generate", str(job_file), "--output", str(output)]


def segment_command(
    paths: JobPaths, number: int, workers: int, runner_options: Sequence[str] = ()
) -> list[str]:
    """Return the command that builds a segment and commits it after its predecessors."""
    command = module_command("pipelines")
    if number:
        command += ["append", str(paths.job_file), "--dataset", str(paths.dataset)]
        command += ["--position", str(number), "--in-order"]
    else:
        command += ["build", str(paths.job_file), "--output", str(paths.dataset)]
    command += ["--input", str(paths.input), "--json"]
    for name in paths.segments[number]:
        command += ["--only", name]
    command += ["--final"] if number + 1 == paths.num_segments else []
    return [*command, *(runner_options or local_runner_options(workers))]


def local_runner_options(workers: int) -> list[str]:
    """Return the options of a build on this machine, which chooses threads or processes."""
    return [f"--direct_num_workers={workers}"]


def coordinator_command(
    paths: JobPaths,
    work: Path,
    *,
    has_replicas: bool,
    served: bool,
    endpoint: Endpoint | None = None,
) -> list[str]:
    """Return the command that starts or resumes training."""
    job = paths.served_job if served else paths.job_file
    command = [*module_command("trainer"), "train", str(job), "--dataset", str(paths.dataset)]
    command += ["--output", str(paths.run), "--follow", "--resume"]
    command += ["--embedding", "cached"] if served else []
    command += ["--replicas", "0"] if has_replicas else []
    command += ["--work", str(work / "coordinator")] if paths.is_remote else []
    command += ["--host", endpoint.host] if has_replicas and endpoint is not None else []
    return command


def replica_command(
    paths: JobPaths, work: Path, number: int, threads: int, endpoint: Endpoint | None = None
) -> list[str]:
    """Return the command of one replica."""
    command = [*module_command("trainer"), "replica", str(paths.run), "--number", str(number)]
    command += ["--threads", str(threads)]
    command += ["--work", str(work / f"replica-{number}")] if paths.is_remote else []
    if endpoint is not None:
        return [*command, *_server_flags(endpoint), *_client_flags(endpoint)]
    return [*command, *_loopback_flags(paths)] if paths.is_remote else command


def store_command(
    paths: JobPaths,
    work: Path,
    number: int,
    endpoint: Endpoint | None = None,
) -> list[str]:
    """Return the command of one store."""
    folder, address = paths.store(number, work), paths.address_file(number)
    command = [*module_command("trainer"), "store", "--directory", str(folder)]
    command += ["--address-file", str(address)] if paths.is_remote else []
    if endpoint is None:
        return [*command, *_loopback_flags(paths)]
    return [*command, *_server_flags(endpoint), "--token-file", endpoint.token_file]


def move_command(
    paths: JobPaths,
    ranges: Sequence[int],
    sources: Sequence[int],
    target: int,
    endpoint: Endpoint | None = None,
) -> list[str]:
    """Return the command that moves slot ranges from running stores to another one.

    No ranges stand for all that the sources own.
    """
    slots = [slots_of_range(number) for number in ranges] or [(0, NUM_SLOTS)]
    command = [*module_command("trainer"), "migrate-slots", "--json"]
    command += ["--slots", ",".join(f"{first}:{end}" for first, end in slots)]
    command += ["--from", ",".join(paths.store_address(number) for number in sources)]
    command += ["--to", paths.store_address(target)]
    return [*command, *(_loopback_flags(paths) if endpoint is None else _client_flags(endpoint))]


def _loopback_flags(paths: JobPaths) -> list[str]:
    return ["--token-file", str(paths.token)]


def _server_flags(endpoint: Endpoint) -> list[str]:
    files = ["--tls-cert", endpoint.certificate_file, "--tls-key", endpoint.key_file]
    return ["--host", endpoint.host, *files]


def _client_flags(endpoint: Endpoint) -> list[str]:
    files = ["--token-file", endpoint.token_file, "--trusted", endpoint.certificate_file]
    return [*files, "--tls-name", endpoint.name]
