"""What a checkpoint is made of: rows that changed, copies, parts on disk, and what is swept."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.errors import SchemaError
from presage.trainer.checkpoint import files as manifests
from presage.trainer.checkpoint.agent import MAX_PARTS, write_snapshot
from presage.trainer.checkpoint.files import (
    complete_checkpoints,
    lock_checkpoints,
    read_checkpoint_manifest,
    verify_files,
)
from presage.trainer.checkpoint.format import RowPart
from presage.trainer.checkpoint.load import CheckpointTable
from presage.trainer.checkpoint.snapshot import (
    COMMITTED,
    DATA_OFFSET,
    DENSE,
    Snapshot,
    SnapshotHeader,
    SnapshotMemory,
    claim_memory,
    commit_snapshot,
    max_changed_rows,
    memory_path,
)
from presage.trainer.embedding.changes import Changes, EvictedDirtyRows, UsedPositions
from presage.trainer.stores.local import MappedArena
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsInPlace,
    TableLayout,
    merge_newest,
)
from tests.trainer.stores import as_records, largest_file

LAYOUT = TableLayout(table="items", dim=3, state_width=1, dtype="float32", seed=3)
OTHER = TableLayout(table="users", dim=3, state_width=1, dtype="float32", seed=3)
PLACES = st.lists(st.integers(0, 40), max_size=12, unique=True)


def records_of(values: np.ndarray) -> Records:
    state = np.asarray(values, np.float32)[:, None]
    return as_records(np.repeat(state, 3, axis=1), state)


@pytest.mark.slow
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["use", "free", "since", "forget"]), PLACES, st.integers(0, 9)),
        max_size=40,
    )
)
@settings(max_examples=300)
def test_used_places_are_those_of_a_dictionary(events: list[tuple[str, list[int], int]]) -> None:
    used, last = UsedPositions(), dict[int, int]()
    for step, (kind, places, back) in enumerate(events):
        array = np.array(places, np.int64)
        if kind == "use":
            used.use(array, step)
            last |= dict.fromkeys(places, step)
        elif kind == "free":
            assert used.free(array).tolist() == [last.pop(place, -1) for place in places]
        elif kind == "since":
            found = used.since(step - back).tolist()
            assert sorted(found) == sorted(p for p, at in last.items() if at >= step - back)
        else:
            used.drop_before(step - back)
            last = {place: at for place, at in last.items() if at >= step - back}


@pytest.mark.slow
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["put", "since", "forget"]),
            st.lists(st.integers(0, 1 << 62), max_size=8, unique=True),
            st.integers(0, 9),
        ),
        max_size=30,
    ),
    memory_bytes=st.sampled_from([None, 0, 1 << 15]),
)
@settings(max_examples=200)
def test_rows_that_left_are_those_of_a_dictionary(
    events: list[tuple[str, list[int], int]],
    memory_bytes: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    spill = partial(MappedArena, tmp_path_factory.getbasetemp(), memory_bytes or 0)
    left = EvictedDirtyRows(LAYOUT) if memory_bytes is None else EvictedDirtyRows(LAYOUT, spill)
    held = dict[int, tuple[int, float]]()
    for step, (kind, rows, back) in enumerate(events):
        array = np.array(rows, np.int64)
        if kind == "put":
            values = np.arange(len(rows), dtype=np.float32) + 100 * step
            left.put(array, records_of(values), np.full(len(rows), step))
            held |= {r: (step, v) for r, v in zip(rows, values.tolist(), strict=True)}
        elif kind == "since":
            found, gathered = left.since(step - back, array)
            records = gathered.copy()
            assert (records.values == records.state).all()
            assert dict(zip(found.tolist(), records.state[:, 0].tolist(), strict=True)) == {
                r: value for r, (at, value) in held.items() if at >= step - back and r not in rows
            }
        else:
            left.drop_before(step - back)
            held = {r: each for r, each in held.items() if each[0] >= step - back}
        assert len(left) == len(held)


def test_positions_that_are_freed_and_used_again_do_not_accumulate() -> None:
    used = UsedPositions()
    for step in range(3000):
        positions = np.arange(10) + step % 7
        used.free(positions)
        used.use(positions, step)
    assert sum(map(len, used._listed)) < 3000  # pyright: ignore[reportPrivateUsage]
    assert sorted(used.since(2999).tolist()) == (np.arange(10) + 2999 % 7).tolist()
    assert sorted(used.since(0).tolist()) == list(range(16))


def test_copies_of_rows_that_left_are_in_files_beyond_a_size(tmp_path: Path) -> None:
    left = EvictedDirtyRows(LAYOUT, partial(MappedArena, tmp_path, 1 << 16))
    numbers, mapped_bytes = np.arange(20_000, dtype=np.float32), list[int]()
    for start in range(0, 20_000, 500):
        part = slice(start, start + 500)
        left.put(np.arange(20_000)[part] * 1_000_003, records_of(numbers[part]), numbers[part])
        mapped_bytes.append(bytes_mapped_in(tmp_path))
    assert mapped_bytes[0] == 0
    assert mapped_bytes[-1] >= 20_000 * LAYOUT.dim * 4
    assert list(tmp_path.iterdir()) == []  # they have no names, so a killed run leaves none
    left.drop_before(15_000)
    rows, view = left.since(0, np.empty(0, np.int64))
    copies = view.copy()
    assert (
        (rows // 1_000_003).tolist() == copies.state[:, 0].tolist() == list(range(15_000, 20_000))
    )
    del view
    assert bytes_mapped_in(tmp_path) < mapped_bytes[-1] / 2
    with largest_file(1 << 19), pytest.raises(SchemaError, match=r"^no room on disk for the rows"):
        left.put(np.arange(300_000), records_of(np.ones(300_000, np.float32)), np.ones(300_000))


def bytes_mapped_in(folder: Path) -> int:
    """Return the bytes of files of a folder that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return sum(int(end, 16) - int(first, 16) for first, end in ranges)


def test_a_row_that_left_and_came_back_is_given_once_as_it_is_now(tmp_path: Path) -> None:
    changes = Changes({"items": LAYOUT}, tmp_path)
    arena = records_of(np.zeros(4, np.float32))
    rows = np.array([10, 11, 12, 13])

    def held(table: str, places: np.ndarray) -> RowsInPlace:
        return rows[places], GatheredRows(arena, places)

    changes.record_use("items", np.array([0, 1]), 5)
    arena.state[:2] = [[1], [2]]
    places = np.array([0, 1, 3], np.int32)
    # 13 was never used
    changes.record_eviction("items", places, rows[places], GatheredRows(arena, places))
    rows[2] = 11  # comes back into another place
    changes.record_use("items", np.array([2]), 6)
    arena.state[2] = 7
    (back, view), (left, left_view) = changes.since(5, held)["items"]
    assert (back.tolist(), view.copy().state.tolist()) == ([11], [[7]])
    assert (left.tolist(), left_view.copy().state.tolist()) == ([10], [[1]])
    changes.drop_before(6)
    assert [found.tolist() for found, _ in changes.since(0, held)["items"]] == [[11]]


@pytest.mark.slow
@given(
    accesses=st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=14),
    first=st.integers(0, 5),
    every=st.integers(1, 5),
)
@settings(max_examples=200)
def test_most_changed_counts_the_rows_of_each_interval(
    accesses: list[list[int]], first: int, every: int
) -> None:
    last_uses = [0] * first
    for step, rows in enumerate(accesses, start=first):
        end = (step // every + 1) * every - first  # of the interval
        again = {row for later in accesses[step - first + 1 : end] for row in later}
        last_uses.append(len(set(rows) - again))
    wanted = 0
    changed = set[int]()
    for step, rows in enumerate(accesses, start=first):
        changed |= set(rows)
        wanted = max(wanted, len(changed))
        if (step + 1) % every == 0:
            changed = set()
    steps = range(first, len(last_uses))
    assert max_changed_rows(np.array(last_uses, np.int64), steps, every) == wanted


def snapshot_of(
    memory: SnapshotMemory, step: int, since: int | None, rows: dict[str, dict[int, float]]
) -> Snapshot:
    layouts = {"items": LAYOUT, "users": OTHER}
    changed: dict[str, list[RowsInPlace]] = {}
    for table, values in rows.items():
        numbers = np.array([*values.values()], np.float32)
        found = np.array([*values], np.int64)
        half = len(found) // 2
        parts = [slice(0, half), slice(half, None)]
        changed[table] = [(found[p], GatheredRows(records_of(numbers[p]))) for p in parts]
    about = SnapshotHeader(train_step=step, since=since, fingerprint={"a": 1}, layouts=layouts)
    size = commit_snapshot(memory, about, {"w": np.arange(step)}, {}, changed)
    assert memory.state == COMMITTED
    assert size <= memory.num_bytes
    return Snapshot(memory)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [1, 3])
def test_every_kept_checkpoint_has_the_rows_of_its_step_through_any_number_of_parts(
    seed: int, keep: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    memory, checkpoints = SnapshotMemory(tmp_path / "memory"), tmp_path / "checkpoints"
    memory.create(0)
    state: dict[str, dict[int, float]] = {"items": {}, "users": {}}
    at_step: dict[int, dict[str, dict[int, float]]] = {}
    since, most = None, 0
    for step in range(1, 40):
        changed: dict[str, dict[int, float]] = {}
        for table, size in (("items", 40_000), ("users", 20)):
            count = 50_000 if step == 1 else int(rng.integers(0, 3000))
            rows = np.unique(rng.integers(0, size, count)).tolist()
            changed[table] = dict(
                zip(rows, rng.random(len(rows), np.float32).tolist(), strict=True)
            )
            state[table] |= changed[table]
        at_step[step] = {table: dict(rows) for table, rows in state.items()}
        if rng.random() < 0.2:
            (checkpoints / f"{step:08d}.partial").mkdir(parents=True)  # a half-written one
        write_snapshot(checkpoints, snapshot_of(memory, step, since, changed), keep=keep)
        if since is not None and rng.random() < 0.1:
            break
        since = step
        found = complete_checkpoints(checkpoints)
        assert [int(folder.name) for folder in found] == list(
            range(max(1, step - keep + 1), step + 1)
        )
        for folder in found if step % 9 == 0 else found[-1:]:
            manifest = read_checkpoint_manifest(folder)
            verify_files(folder, manifest.files)
            most = max(most, len(manifest.parts["items"]))
            for layout in (LAYOUT, OTHER):
                parts = [checkpoints / part for part in manifest.parts[layout.table]]
                store = CheckpointTable(layout, parts)
                wanted = at_step[int(folder.name)][layout.table]
                given_rows = [(r, rec) for r, rec in store.contents()]
                rows = [row for r, _ in given_rows for row in r.tolist()]
                values = [v for _, rec in given_rows for v in rec.state[:, 0].tolist()]
                assert rows == sorted(wanted)
                assert values == [wanted[row] for row in rows]
                some = np.array([*rows[:50], 1 << 40], np.int64)
                assert store.fetch(some).state[:-1, 0].tolist() == values[:50]
    assert 2 <= most <= MAX_PARTS
    memory.remove()


def test_newest_takes_rows_of_the_first_stream_that_has_them() -> None:
    rng = np.random.default_rng(0)
    streams, wanted = [], dict[int, float]()
    for number in range(4):
        rows = np.unique(rng.integers(0, 1000, 300))
        values = rows + number / 10
        wanted = dict(zip(rows.tolist(), values.tolist(), strict=True)) | wanted
        cuts = np.sort(rng.integers(0, len(rows), 5))
        pieces = zip(np.split(rows, cuts), np.split(values[:, None], cuts), strict=True)
        streams.append(iter([(r, as_records(v, v)) for r, v in pieces]))
    found = [(r, rec) for r, rec in merge_newest(streams)]
    rows = np.concatenate([r for r, _ in found]).tolist()
    assert rows == sorted(wanted)
    assert np.concatenate([rec.values[:, 0] for _, rec in found]).tolist() == [
        wanted[row] for row in rows
    ]


def test_part_whose_rows_have_all_changed_is_dropped(tmp_path: Path) -> None:
    memory, checkpoints = SnapshotMemory(tmp_path / "memory"), tmp_path / "checkpoints"
    memory.create(0)
    base = {"items": {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, "users": {}}
    write_snapshot(checkpoints, snapshot_of(memory, 1, None, base), keep=1)
    write_snapshot(checkpoints, snapshot_of(memory, 2, 1, {"items": {2: 5.0}, "users": {}}), keep=1)
    rows = checkpoints / "00000001" / "items" / "rows.npy"
    data = rows.read_bytes()
    rows.write_bytes(data.replace((4).to_bytes(8, "little"), (9).to_bytes(8, "little")))
    changed = {"items": {9: 1.5, 2: 2.5, 1: 3.5, 3: 4.5}, "users": {}}
    with pytest.raises(SchemaError, match="file must have sha256"):
        write_snapshot(checkpoints, snapshot_of(memory, 3, 2, changed), keep=1)
    rows.write_bytes(data)
    changed["items"][4] = 5.5
    folder = write_snapshot(checkpoints, snapshot_of(memory, 3, 2, changed), keep=1)
    assert read_checkpoint_manifest(folder).parts["items"] == ("00000003/items",)
    assert RowPart(folder / "items").rows.tolist() == [1, 2, 3, 4, 9]
    assert not rows.exists()


def test_part_without_rows_is_read(tmp_path: Path) -> None:
    memory = SnapshotMemory(tmp_path / "memory")
    memory.create(0)
    folder = write_snapshot(
        tmp_path / "checkpoints",
        snapshot_of(memory, 3, None, {"items": {}, "users": {5: 1.5}}),
        keep=1,
    )
    assert list(RowPart(folder / "items").chunks()) == []
    assert Snapshot(memory).arrays(DENSE)["w"].tolist() == [0, 1, 2]


def test_checkpoint_that_a_delta_adds_to_must_be_there(tmp_path: Path) -> None:
    memory = SnapshotMemory(tmp_path / "memory")
    memory.create(0)
    snapshot = snapshot_of(memory, 3, 2, {"items": {}, "users": {}})
    with pytest.raises(SchemaError, match=r"^checkpoint that the new one builds on is missing in "):
        write_snapshot(tmp_path / "checkpoints", snapshot, keep=1)


def test_memory_of_a_run_is_claimed_when_no_process_holds_it(tmp_path: Path) -> None:
    path = memory_path(tmp_path, tmp_path / "run")
    assert path != memory_path(tmp_path, tmp_path / "other")
    assert claim_memory(path) is None
    memory = SnapshotMemory(path)
    memory.create(5000)
    assert path.stat().st_size >= DATA_OFFSET + 5000
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SchemaError, match=r"^another process still trains the run after "):
        claim_memory(path, wait_sec=0.2)
    memory.close()
    found = claim_memory(path)
    assert found is not None
    found.remove()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_too_small_names_the_missing_bytes(tmp_path: Path) -> None:
    memory = SnapshotMemory(tmp_path / "memory")
    with pytest.raises(
        SchemaError,
        match=r"^snapshots of checkpoints need \d+ bytes in .*, where \d+ are free: "
        r".*; enlarge it, save more often \(train\.checkpoint\.every_steps\), or set "
        r"train\.checkpoint\.copy_to to a directory of a disk$",
    ):
        memory.create(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_what_a_newer_checkpoint_supersedes_is_dropped(tmp_path: Path) -> None:
    memory, checkpoints = SnapshotMemory(tmp_path / "memory"), tmp_path / "checkpoints"
    memory.create(0)
    early = snapshot_of(memory, 4, None, {"items": {1: 1}, "users": {}})
    write_snapshot(checkpoints, early, keep=1)
    (checkpoints / "00000012.0123abcd.partial").mkdir()  # another process writes it
    (checkpoints / "00000008.0123abcd.partial").mkdir()
    newer = snapshot_of(memory, 9, None, {"items": {1: 2}, "users": {}})
    write_snapshot(checkpoints, newer, keep=1)
    for since in (None, 4):  # its base went with those that are not kept
        late = snapshot_of(memory, 8, since, {"items": {1: 3}, "users": {}})
        assert write_snapshot(checkpoints, late, keep=1).name == "00000009"
    same = snapshot_of(memory, 9, None, {"items": {1: 4}, "users": {}})
    assert write_snapshot(checkpoints, same, keep=1) == checkpoints / "00000009"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "00000009",
        "00000012.0123abcd.partial",
    ]
    assert RowPart(checkpoints / "00000009" / "items").records.state.tolist() == [[2]]


def test_holder_of_the_checkpoints_lock_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "LOCK_SEC", 0.1)
    memory, checkpoints = SnapshotMemory(tmp_path / "memory"), tmp_path / "checkpoints"
    memory.create(0)
    for step in (2, 4):
        write_snapshot(
            checkpoints, snapshot_of(memory, step, None, {"items": {1: 1}, "users": {}}), keep=2
        )
    with lock_checkpoints(checkpoints) as held:
        assert held
        delta = snapshot_of(memory, 6, 4, {"items": {}, "users": {}})
        with pytest.raises(SchemaError, match="checkpoint that the new one builds on is missing"):
            write_snapshot(checkpoints, delta, keep=2)
        whole = snapshot_of(memory, 6, None, {"items": {1: 1}, "users": {}})
        write_snapshot(checkpoints, whole, keep=2)
        assert [int(folder.name) for folder in complete_checkpoints(checkpoints)] == [2, 4, 6]
    write_snapshot(checkpoints, snapshot_of(memory, 8, 6, {"items": {}, "users": {}}), keep=2)
    assert [int(folder.name) for folder in complete_checkpoints(checkpoints)] == [6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_several_writers_leave_no_checkpoint_that_is_not_whole(keep: int, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"

    def write(number: int) -> int:
        rng, memory = np.random.default_rng([number, keep]), SnapshotMemory(tmp_path / str(number))
        memory.create(0)
        step = done = 0
        while step < 100:
            found = complete_checkpoints(checkpoints)
            newest = int(found[-1].name) if found else 0
            since = newest if found and rng.random() < 0.8 else None
            step = newest + int(rng.integers(1, 4))
            rows = {"items": {int(rng.integers(9)): float(step)}, "users": {}}
            with suppress(SchemaError):  # of a delta whose base went meanwhile
                write_snapshot(checkpoints, snapshot_of(memory, step, since, rows), keep=keep)
                done += 1
        memory.remove()
        return done

    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(write, range(4))) > 0
    found = complete_checkpoints(checkpoints)
    assert len(found) == keep
    for folder in found:
        verify_files(folder, read_checkpoint_manifest(folder).files)


def test_memory_is_removed_by_those_alone_that_hold_it(tmp_path: Path) -> None:
    trainer, agent, other = (SnapshotMemory(tmp_path / "memory") for _ in range(3))
    trainer.create(10)
    agent.inherit(os.dup(trainer.file))
    with pytest.raises(FileExistsError):
        other.create(10)
    trainer.close()
    with pytest.raises(SchemaError, match="still trains the run after 0 s"):
        claim_memory(other.path, wait_sec=0)
    agent.remove()
    assert not other.path.exists()
    trainer.create(10)
    agent.inherit(os.dup(trainer.file))
    agent.remove()
    other.create(10)
    trainer.remove()
    assert other.path.exists(), "it is another's by now"
    other.remove()
