"""Session keys and lists of very unequal sizes: bounded memory, at most two reads, same bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines import executor
from presage.pipelines.build import build
from presage.pipelines.clustering import star
from presage.pipelines.clustering.star import cluster, cluster_chunks
from presage.pipelines.clustering.storage_layout import choose_segment_layout
from presage.pipelines.demo_log.generate import GeneratorConfig, write_log
from presage.pipelines.exchange import Element, Exchange, FileRange, Progress
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples, concat_tuples, separate_tuples
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.verify import verify
from presage.schemas.arrays import large_list
from presage.schemas.dataset.opened import open_dataset
from tests.pipelines import logs
from tests.pipelines.logs import bytes_of
from tests.pipelines.test_clustering import GROUPS, REPOSITORY, START, data_config

pytestmark = pytest.mark.nightly

PART_SAMPLES, NUM_ITEMS = 500, 100


def hot_key(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return session keys, half of which are the same."""
    return np.where(rng.random(size) < 0.5, 7, rng.integers(0, size, size))


def hot_keys(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return session keys, nine tenths of which are a fiftieth of all keys."""
    others = rng.integers(0, size, size)
    return np.where(rng.random(size) < 0.9, rng.integers(0, size // 50, size), others)


KEYS = {"one hot key": hot_key, "many hot keys": hot_keys}


class Parts:
    """Samples of a part that are made anew in each iteration, which are counted."""

    def __init__(self, keys: str, size: int) -> None:
        """Draw the session keys."""
        self.sessions = KEYS[keys](np.random.default_rng(0), size)
        self.num_reads = 0

    def __iter__(self) -> Iterator[Tuples]:
        self.num_reads += 1
        for start in range(0, len(self.sessions), PART_SAMPLES):
            yield self.part(start, self.sessions[start : start + PART_SAMPLES])

    def part(self, start: int, sessions: np.ndarray) -> Tuples:
        """Return samples with one history each, none of which repeats."""
        rng = np.random.default_rng(start)
        size = len(sessions)
        offsets = NUM_ITEMS * np.arange(size + 1)
        table = pa.table(
            {
                "session": sessions,
                "time": pa.array(START + rng.integers(0, 10**9, size), pa.timestamp("us")),
                "name": pa.array([f"name {s % 9}" for s in sessions.tolist()]),
                "history": large_list(rng.integers(0, 10, NUM_ITEMS * size), offsets),
                ORIGIN: start + np.arange(size),
                LIST_INDEX: np.zeros(size, np.int32),
            }
        )
        return separate_tuples(table, GROUPS)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("chunk_bytes", "num_reads"), [(200_000, 2), (1 << 30, 1)])
def test_a_part_is_read_at_most_twice(
    keys: str, chunk_bytes: int, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, data = Parts(keys, 4_000), data_config(gap=15, evaluation_from=700)
    whole = cluster(concat_tuples(list(parts)), data)
    monkeypatch.setattr(star, "CHUNK_BYTES", chunk_bytes)
    parts.num_reads = 0
    found = list(cluster_chunks(parts, data))
    assert parts.num_reads == num_reads
    assert (len(found) > 1) == (num_reads == 2)
    for column in (ORIGIN, "history", "name"):
        joined = pa.concat_arrays([c.samples.column(column) for c in found])
        assert joined.equals(whole.samples.column(column))


def test_the_layout_is_chosen_in_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.pipelines.clustering.storage_layout.LAYOUT_SAMPLES", 100)
    for keys in KEYS:
        parts = Parts(keys, 4_000)
        choose_segment_layout(parts, data_config())
        assert parts.num_reads == 1


MEASURED = """
import sys
from pathlib import Path
from presage.pipelines.clustering import star
from presage.pipelines.clustering.part import build_part
from presage.pipelines.clustering.storage_layout import choose_segment_layout
from presage.schemas.features import FeatureSet
from presage.schemas.storage.location import Location
from tests.pipelines.test_clustering import data_config
from tests.pipelines.test_skew import Parts

root, keys, size, star.CHUNK_BYTES = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
data, parts = data_config(), Parts(keys, size)
layout = choose_segment_layout(parts, data)
def status(name):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(name))

Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the memory of now
before = status("VmRSS:")
build_part(Location.parse(root), 0, parts, data, layout, FeatureSet(()))
print(1024 * (status("VmHWM:") - before))
"""


def measure_part(root: Path, keys: str, size: int, chunk_bytes: int) -> int:
    """Return the memory in bytes that building a part adds to a process at most."""
    arguments = [str(root), keys, str(size), str(chunk_bytes)]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS)
def test_memory_follows_the_size_of_a_chunk_and_not_that_of_a_part(
    keys: str, tmp_path: Path
) -> None:
    whole = measure_part(tmp_path / "whole", keys, 100_000, 1 << 30)
    cut = measure_part(tmp_path / "cut", keys, 100_000, 4 << 20)
    assert whole > 150 << 20
    assert cut < 60 << 20


# Whole builds.


def replaced(rows: pa.Table, name: str, values: object) -> pa.Table:
    """Return rows with other values in one column."""
    index = rows.column_names.index(name)
    column = pa.array(values, rows.schema.field(name).type)
    return rows.set_column(index, name, column)


def with_hot_session(rows: pa.Table) -> pa.Table:
    """Return rows, half of which belong to one session."""
    return replaced(rows, "session", hot_key(np.random.default_rng(0), rows.num_rows))


def with_hot_sessions(rows: pa.Table) -> pa.Table:
    """Return rows, nine tenths of which belong to a fiftieth of the sessions."""
    return replaced(rows, "session", hot_keys(np.random.default_rng(0), rows.num_rows))


def with_long_history(rows: pa.Table) -> pa.Table:
    """Return rows, one of which has a list of a million items in its group."""
    history = rows["history"].to_pylist()
    history[7] = (np.arange(1_000_000) % 1000).tolist()
    return replaced(rows, "history", history)


def with_many_samples_of_a_row(rows: pa.Table) -> pa.Table:
    """Return rows, one of which has a list of a million items that become its samples."""
    items = rows["items"].to_pylist()
    items[7] = (np.arange(1_000_000) % 200).tolist()
    return replaced(rows, "items", items)


LOGS: dict[str, tuple[Callable[[pa.Table], pa.Table], int]] = {
    "one hot session": (with_hot_session, 20_000),
    "many hot sessions": (with_hot_sessions, 20_000),
    "a list of a million items in a group": (with_long_history, 1 << 20),
    "a row of a million samples": (with_many_samples_of_a_row, 8 << 20),
}


class InThreads(Exchange):
    """An exchange in files between threads, which see the patches of a test."""

    def __init__(
        self, context: BuildContext, num_workers: int, scratch: Path, progress: Progress | None
    ) -> None:
        super().__init__(context, num_workers, progress=progress)
        scratch.mkdir()
        self._scratch = scratch


@pytest.mark.slow
@pytest.mark.parametrize(("skew", "chunk_bytes"), LOGS.values(), ids=LOGS.keys())
def test_skewed_logs_have_the_same_bytes_for_any_number_of_workers(
    skew: Callable[[pa.Table], pa.Table],
    chunk_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = skew(logs.raw_rows(1_200, seed=3))
    (tmp_path / "log").mkdir()
    for index in range(3):
        part = rows.slice(400 * index, 400)
        pq.write_table(part, tmp_path / "log" / f"{index}.parquet", row_group_size=100)
    size = sum(file.stat().st_size for file in (tmp_path / "log").iterdir())
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", size // 3)
    monkeypatch.setattr(star, "CHUNK_BYTES", chunk_bytes)
    reads = count_reads(monkeypatch)
    job = logs.write_job(tmp_path / "job")
    build(logs.request(job, tmp_path / "log", tmp_path / "0"))
    assert not verify(tmp_path / "0")["problems"]
    assert not reads
    monkeypatch.setattr(executor, "holds_in_memory", lambda *_: False)
    monkeypatch.setattr(executor, "Exchange", InThreads)
    monkeypatch.setattr(executor, "BUNDLE_BYTES", size // 5)
    for num_workers in (1, 3):
        options = [f"--direct_num_workers={num_workers}"]
        dataset = tmp_path / str(num_workers)
        build(logs.request(job, tmp_path / "log", dataset, beam_args=options))
        assert bytes_of(dataset) == bytes_of(tmp_path / "0")
        assert 2 <= max(reads.values()) <= 3  # the layout is chosen from the first part
        assert sorted(reads.values())[len(reads) // 2] <= 2
        reads.clear()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[FileRange]:
    """Return the number of times that each element is read from a file."""
    reads: Counter[FileRange] = Counter()
    read = FileRange.read

    def counted(self: FileRange) -> Element:
        reads[self] += 1
        return read(self)

    monkeypatch.setattr(FileRange, "read", counted)
    return reads


DEMO = REPOSITORY / "schemas" / "demo" / "job.yaml"
WORKER_BYTES = 2 << 30


def write_hot_demo_log(directory: Path, num_samples: int, num_hot: int) -> None:
    """Write a log like the demo's, in which half of the samples belong to a few sessions."""
    start, span = datetime(2026, 1, 1), timedelta(days=2)
    config = GeneratorConfig(num_samples=num_samples, seed=1, start=start, span=span)
    for number, path in enumerate(write_log(config, directory)):
        rows, rng = pq.read_table(path), np.random.default_rng(number)
        hot = rng.random(rows.num_rows) < 0.5
        keys = np.where(hot, rng.integers(0, num_hot, len(hot)), rows["session_id"].to_numpy())
        pq.write_table(replaced(rows, "session_id", keys), path)


def peak_bytes(command: list[str]) -> int:
    """Run a command; return the most memory that one of its processes has taken."""
    peak = 0
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        while process.poll() is None:
            peak = max([peak, *map(_peak_of_process, _descendants(process.pid))])
            time.sleep(0.05)
    assert process.returncode == 0
    return peak


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                yield from _descendants(int(child))


def _peak_of_process(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


@pytest.mark.chaos
@pytest.mark.parametrize(("num_samples", "num_hot"), [(3_000_000, 1), (1_000_000, 10_000)])
def test_hot_sessions_build_in_bounded_memory(
    tmp_path: Path, num_samples: int, num_hot: int
) -> None:
    write_hot_demo_log(tmp_path / "log", num_samples, num_hot)
    places = ["--input", str(tmp_path / "log"), "--output", str(tmp_path / "dataset")]
    command = [sys.executable, "-m", "pipelines", "build", str(DEMO), *places, *logs.PROCESSES]
    peak = peak_bytes(command)
    assert peak < WORKER_BYTES
    assert open_dataset(tmp_path / "dataset").segments[0].manifest.num_samples == num_samples
