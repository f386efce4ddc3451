"""Processes that read the same steps decode each row group once together."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from presage.schemas.dataset.opened import open_dataset
from presage.schemas.storage.locks import lock_file
from presage.trainer.data import reader, shared_row_groups
from presage.trainer.data.decode import RowGroup, spec_of
from presage.trainer.data.reader import Reader
from presage.trainer.data.shared_row_groups import SharedRowGroups


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in place of the shared memory, of which none needs to be free."""
    monkeypatch.setattr(shared_row_groups, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shared_row_groups, "MIN_FREE_BYTES", 0)
    return tmp_path


def readers(dataset: Path, count: int, shuffle: str = "blocks") -> list[Reader]:
    opened = open_dataset(dataset)
    order, spec = opened.order(64, 2, shuffle, 5), spec_of(opened, "float32", ("session",))
    return [Reader(opened, order, spec, num_sharing=count) for _ in range(count)]


@pytest.mark.parametrize("shuffle", ["none", "blocks"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_row_group_is_decoded_once_an_epoch_in_all_ranks_together(
    dataset: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, shuffle: str
) -> None:
    decoded: list[list[int]] = []

    def count(spec, counts, *others):
        decoded.append(counts.blocks.tolist())
        return decode(spec, counts, *others)

    decode = reader.decode
    (alone,) = readers(dataset, 1, shuffle)
    ranks = readers(dataset, world_size, shuffle)
    expected = [alone.read(step) for step in range(32)]
    segments = open_dataset(dataset).segments
    ids = [np.frombuffer(s.row_groups("train"), np.int32) for s in segments]
    num_row_groups = sum(len(np.unique(each)) for each in ids)
    monkeypatch.setattr(reader, "decode", count)
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)
    for rank in ranks:
        rank._cache_bytes = 0
    for step, batch in enumerate(expected):
        parts = [each.read_rank(step, i, world_size) for i, each in enumerate(ranks)]
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
        assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense)
        kept = np.concatenate([part.kept["session"] for part in parts])
        assert np.array_equal(kept, batch.kept["session"])
        if step == 15:
            assert len(decoded) == num_row_groups
    assert len(decoded) <= 2 * num_row_groups
    for rank in ranks:
        rank.close()
    assert not list(memory.glob("*/*"))


def test_row_group_is_decoded_where_shared_memory_is_full_or_small(
    dataset: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    (alone,) = readers(dataset, 1)
    full = readers(dataset, 2)[0]
    monkeypatch.setattr(shared_row_groups, "_dump", fill)
    assert torch.equal(full.read(3).dense, alone.read(3).dense)
    monkeypatch.setattr(shared_row_groups, "MIN_FREE_BYTES", 1 << 60)
    assert readers(dataset, 2)[0]._shared is None


def test_directory_is_removed_when_no_process_uses_it(memory: Path) -> None:
    code = "import sys, time; from pathlib import Path\n"
    code += "from presage.trainer.data.shared_row_groups import SharedRowGroups\n"
    code += (
        "used = SharedRowGroups(Path(sys.argv[1]), 'theirs'); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (theirs,) = memory.glob("*/*")
        ours = SharedRowGroups(memory, "ours")
        assert len(list(memory.glob("*/*"))) == 2
        process.kill()
        process.wait()
        assert theirs.exists()
        ours.close()
        SharedRowGroups(memory, "next").close()
    assert not list(memory.glob("*/*"))


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_directory_that_others_may_have_made_is_refused(memory: Path, kind: str) -> None:
    parent = memory / f"presage-{os.getuid()}"
    if kind == "a link":
        (memory / "elsewhere").mkdir(mode=0o700)
        parent.symlink_to(memory / "elsewhere")
    else:
        parent.mkdir()
        parent.chmod(0o777)
    with pytest.raises(PermissionError, match="not private to this user"):
        SharedRowGroups(memory, "ours")


def test_process_that_is_stopped_while_it_decodes_is_not_waited_for(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_row_groups, "LOCK_SEC", 0.05)
    shared, decoded = SharedRowGroups(memory, "ours"), RowGroup.__new__(RowGroup)
    [folder] = memory.glob("presage-*/*")
    with (folder / "group.lock").open("w") as stopped:
        assert lock_file(stopped)
        assert shared.get("group", lambda: decoded) is decoded
    shared.close()
