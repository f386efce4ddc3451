"""`DataLoader` beside other processes: leases, followed datasets in workers, stores, threads."""

import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import presage
from presage.batch import Batch
from presage.pipelines.table.vacuum import check_unused, vacuum
from presage.schemas.dataset.manifest import commit_root, find_root, read_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SEGMENTS
from presage.schemas.storage.leases import LEASES, live_leases
from presage.schemas.storage.location import Location
from presage.trainer.growing.follow import directories_of
from tests.object_store import Store
from tests.pipelines.logs import age
from tests.presage.test_loader import ORDER, samples_of, through_json
from tests.shared import hard_links
from tests.trainer.growing import commit, grown_versions
from tests.trainer.processes import is_gone, wait_for
from tests.trainer.runs import small_dataset


def copy_of_dataset(folder: Path) -> Path:
    return hard_links(small_dataset(), folder / "dataset")


# ---- Leases ----


def test_segments_are_leased_while_they_are_read(tmp_path: Path) -> None:
    dataset = copy_of_dataset(tmp_path)
    location = Location.parse(dataset)
    loader = presage.DataLoader(dataset, **ORDER)
    loader.first_batch()
    assert not (dataset / LEASES).exists()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    leases = live_leases(location)
    names = frozenset(directories_of(presage.Dataset(dataset).opened))
    assert [lease.directories for lease in leases] == [names] * 2
    with pytest.raises(SchemaError, match=f"dataset is in use by loader .*:{os.getpid()} in "):
        check_unused(location)  # as `compact` does, which must remove the old files
    del first
    assert len(live_leases(location)) == 1
    assert len(list(second)) == 31
    assert not (dataset / LEASES).exists()


def test_folder_that_cannot_be_written_is_read_without_a_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = copy_of_dataset(tmp_path)
    (dataset / LEASES).write_bytes(b"a file is in the way")
    with caplog.at_level(logging.WARNING):
        assert len(list(presage.DataLoader(dataset, **ORDER))) == 32
    [record] = caplog.records
    assert "lease cannot be written" in record.getMessage()


def test_vacuum_keeps_what_a_loader_reads(tmp_path: Path) -> None:
    dataset = copy_of_dataset(tmp_path)
    location, removed = Location.parse(dataset), presage.Dataset(dataset).segments[0].id
    batches = iter(presage.DataLoader(dataset, batch_samples=16))
    next(batches)  # one of 46 batches of the first segment
    root = read_dataset(dataset)
    without = replace(root, segments=root.segments[1:])
    assert commit_root(dataset, find_root(dataset), without) is not None
    age(dataset)
    vacuum(location)
    assert len(list(batches)) == 61
    vacuum(location)
    assert not (dataset / SEGMENTS / removed).exists()


# ---- Stores and damaged files ----
#
# Workers are forked in scripts only: pytest's process has threads of gRPC, which a fork may crash.

FORK_AT_A_STORE = """
import sys, torch, presage
from presage.schemas.storage.location import StorageError
loader = presage.DataLoader(sys.argv[1], batch_samples=64)
next(iter(loader))
wrapped = torch.utils.data.DataLoader(
    loader, batch_size=None, num_workers=1, multiprocessing_context="fork"
)
try:
    next(iter(wrapped))
except StorageError as error:
    print(error)
"""


def run_script(script: str, dataset: str, repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, dataset]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_dataset_at_a_store_is_read_here_and_by_spawned_workers_but_not_by_forked_ones(
    tmp_path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    url = Location.parse(s3_store.new_url())
    dataset = copy_of_dataset(tmp_path)
    for entry in Location.parse(dataset).entries():
        (url / entry.path).upload(dataset / entry.path)
    loader = presage.DataLoader(str(url), **ORDER)
    expected = list(map(samples_of, presage.DataLoader(small_dataset(), **ORDER)))
    batches = iter(loader)
    found = [samples_of(next(batches))]
    assert len(live_leases(url)) == 1
    found += map(samples_of, batches)
    assert found == expected
    spawned = TorchLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert list(map(samples_of, spawned)) == expected
    assert live_leases(url) == []
    forked = run_script(FORK_AT_A_STORE, str(url), repository)
    assert "process was forked from one that uses an object store in s3:" in forked.stdout


def test_damaged_file_is_named_after_the_batches_before_it(tmp_path: Path) -> None:
    dataset = copy_of_dataset(tmp_path)
    file = dataset / "segments" / presage.Dataset(dataset).segments[1].id / "samples/00000.parquet"
    data = bytearray(file.read_bytes())
    data[100] ^= 255
    file.unlink()  # a hard link
    file.write_bytes(data)
    found: list[int] = []
    with pytest.raises(SchemaError, match=r"crc32 .*00000\.parquet; restore the file"):
        found.extend(batch.step for batch in presage.DataLoader(dataset, batch_samples=64))
    assert found == list(range(12))
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())


# ---- Followed by worker processes ----


@pytest.mark.slow
def test_worker_processes_follow_a_dataset(tmp_path: Path) -> None:
    versions, dataset = grown_versions(), tmp_path / "dataset"
    dataset.mkdir()
    commit(versions[0], dataset)
    options: dict[str, Any] = {**ORDER, "rank": 1, "world_size": 2}
    following = presage.DataLoader(dataset, follow=True, **options)
    found = iter(
        TorchLoader(following, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    )
    batches: list[Batch] = [next(found) for _ in range(12)]  # all steps of the first segment
    for version in versions[1:]:
        timer = threading.Timer(0.05, commit, (version, dataset))
        timer.start()
        batches.append(next(found))  # waits
        timer.join()
    batches += found
    whole = presage.DataLoader(versions[-1], **options)
    assert [samples_of(batch) for batch in batches] == [samples_of(batch) for batch in whole]
    for position in (5, 14, 30):  # in the first epoch, in a later segment, in the second epoch
        state = through_json(following.state_after(batches[position]))
        whole.load_state_dict(state)
        batch = next(iter(whole))
        assert (batch.epoch, batch.step) == divmod(position + 1, 22)


FOLLOW = """
import sys, torch, presage
loader = presage.DataLoader(sys.argv[1], batch_samples=64, follow=True)
wrapped = torch.utils.data.DataLoader(
    loader, batch_size=None, num_workers=1, multiprocessing_context="fork"
)
batches = iter(wrapped)
for _ in range(12):
    next(batches)
print(batches._workers[0].pid, flush=True)
next(batches)
"""


@pytest.mark.slow
def test_worker_that_follows_ends_with_its_parent(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "dataset").mkdir()
    commit(grown_versions()[0], tmp_path / "dataset")
    parent = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, str(tmp_path / "dataset")],
        env={**os.environ, "PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert not is_gone(worker)  # it waits for segments
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: is_gone(worker))
