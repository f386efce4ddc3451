"""Processes that append segments to one dataset at the same time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from presage.pipelines.build import build
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SEGMENTS
from presage.schemas.storage.location import Location
from tests.pipelines.appending import addition
from tests.pipelines.logs import request, vacuum_later, write_job, write_log

NUM_ROWS = 24
"""Rows of a log; each gives some samples."""


@dataclass(frozen=True)
class Appends:
    """Logs for writers, each with a folder per round.

    Attributes:
        folder: holds the job, the logs, and `acknowledged/<writer>-<round>` with the printed id.
        dataset: of all writers.
    """

    folder: Path
    dataset: Location

    @property
    def job(self) -> Path:
        """The job file."""
        return self.folder / "job.yaml"

    def log(self, writer: int, number: int) -> Path:
        """Return the folder of a log."""
        return self.folder / f"log-{writer}-{number}"

    def acknowledgements(self) -> dict[str, str]:
        """Return the acknowledged appends: `<writer>-<round>` to the id of the segment."""
        paths = sorted((self.folder / "acknowledged").iterdir())
        return {path.name: path.read_text() for path in paths if path.suffix == ""}


def prepare(folder: Path, dataset: Location, writers: int, rounds: int) -> Appends:
    """Write the job and all logs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "acknowledged").mkdir()
    appends = Appends(folder, dataset)
    write_job(folder)
    for writer in range(writers):
        for number in range(rounds):
            seed = writer * rounds + number + 1
            write_log(appends.log(writer, number), NUM_ROWS, seed, num_files=1)
    return appends


def append(appends: Appends, writer: int, number: int) -> str:
    """Append a log; return the id of the segment."""
    log, attempt = appends.log(writer, number), uuid.uuid4().hex[:12]
    return build(addition(appends.job, log, appends.dataset, attempt=attempt))["segment"]


def write_rounds(
    appends: Appends, writer: int, rounds: Sequence[int], environment: Mapping[str, str]
) -> None:
    """Append a log in each round; a failed one is tried again, as an operator would."""
    os.environ.update(environment)
    for number in rounds:
        path = appends.folder / "acknowledged" / f"{writer}-{number}"
        while not path.exists():
            try:
                segment = append(appends, writer, number)
            except SchemaError as error:
                with path.with_suffix(".errors").open("a") as file:
                    file.write(f"{error}\n")
                time.sleep(random.uniform(0, 0.5))
                continue
            except BaseException:
                path.with_suffix(".traceback").write_text(traceback.format_exc())
                raise
            partial = path.with_suffix(".partial")
            partial.write_text(segment)
            partial.rename(path)


def run_writers(
    appends: Appends,
    writers: int,
    rounds: int,
    environment: Mapping[str, str],
    kills: Sequence[float] = (),
    seed: int = 0,
) -> None:
    """Run all writers to their ends; a writer that is killed is started again.

    Args:
        appends: the logs.
        writers: processes.
        rounds: appends of each.
        environment: by which they find the store.
        kills: seconds after the start when a random writer is killed.
        seed: of the choice.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(writer: int) -> BaseProcess:
        arguments = (appends, writer, range(rounds), environment)
        process = context.Process(target=write_rounds, args=arguments)
        process.start()
        return process

    chosen, begun_sec, pending = random.Random(seed), time.monotonic(), sorted(kills)
    processes = {writer: start(writer) for writer in range(writers)}
    while any(process.is_alive() for process in processes.values()):
        time.sleep(0.02)
        if pending and time.monotonic() - begun_sec >= pending[0]:
            pending.pop(0)
            alive = [w for w, process in processes.items() if process.is_alive()]
            if alive:
                victim = chosen.choice(alive)
                pid = processes[victim].pid
                with suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGKILL)
                processes[victim].join()
                processes[victim] = start(victim)
    assert all(process.exitcode == 0 for process in processes.values()), "see *.traceback"


def first_segment(appends: Appends) -> None:
    """Build the dataset of a log of its own."""
    write_log(appends.folder / "log-0-first", NUM_ROWS, 0, num_files=1)
    build(request(appends.job, appends.folder / "log-0-first", appends.dataset))


def check(appends: Appends, writers: int, rounds: int) -> None:
    """Check that each acknowledged append is in the dataset exactly once, and nothing else is."""
    root = read_dataset(appends.dataset)
    acknowledged = appends.acknowledgements()
    assert len(acknowledged) == writers * rounds
    ids = [segment.id for segment in root.segments]
    keys = [name.partition("-")[2] for name in ids]
    assert len(keys) == len(set(keys)), "no log is in the dataset twice"
    wanted = {segment.partition("-")[2] for segment in acknowledged.values()}
    assert wanted | {keys[0]} == set(keys), "nothing but what was acknowledged, and the first"
    assert [segment.position for segment in root.segments] == list(range(len(ids)))
    listed = [f.sha256 for s in open_dataset(appends.dataset).segments for f in s.manifest.listing]
    assert len(listed) == len(set(listed)) == len(ids)


def check_nothing_else(dataset: Location) -> None:
    """Vacuum when what killed processes have left is old enough; check what is left."""
    vacuum_later(dataset)
    root = read_dataset(dataset)
    # A process that is killed before its first file leaves an empty directory on a disk.
    directories = {entry.path.split("/")[0] for entry in (dataset / SEGMENTS).entries()}
    assert directories == {segment.directory for segment in root.segments}
    for index in root.indexes:
        parts, _ = (dataset / index.id).children()
        assert parts == sorted(part.directory for part in index.parts.values())
    assert verify(dataset)["problems"] == []
