"""The log of a shard: whole records, replayed and rewritten while the shard serves."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import slot_of_row
from presage.trainer.stores.remote import shard as shard_module
from presage.trainer.stores.remote.ownership import ShardControl
from presage.trainer.stores.remote.shard import Shard
from presage.trainer.stores.remote.wal import (
    Entry,
    RecordLog,
    RowsEntry,
    ShardLog,
    entry_to_buffers,
    read_entries,
    read_records,
)
from presage.trainer.stores.remote.wire import ARRIVING, WRITE, Request
from presage.trainer.stores.store import Records
from tests.trainer.processes import wait_for
from tests.trainer.stores import (
    LAYOUT,
    control_of,
    largest_file,
    log_bytes,
    log_files,
    one_store_map,
)

ALL, LOW, HIGH = ((0, 4096),), ((0, 2048),), ((2048, 4096),)
TABLES = {name: replace(LAYOUT, table=name) for name in ("items", "users")}
PATIENCE_SEC = 60.0


def opened(directory: Path) -> Shard:
    shard = Shard(directory, sync=False)
    shard.load()
    begin_session(shard, "process")
    return shard


def begin_session(shard: Shard, session: str) -> None:
    slot_map = one_store_map(ALL, shard.control.epoch + 1, session)
    shard.open(control_of(slot_map, TABLES))


def request_of(shard: Shard, train_step: int = -1) -> Request:
    return Request(
        op="write", session=shard.control.session, epoch=shard.control.epoch, train_step=train_step
    )


def write(shard: Shard, step: int, rows: np.ndarray, table: str = "items") -> None:
    block = np.repeat(rows[:, None] + np.float32(step) / 64, 5, axis=1).astype(np.float32)
    shard.write(request_of(shard, step), {table: rows}, Records(block, 4))


def state_of(shard: Shard) -> dict[str, object]:
    """Return all that a shard must have again after a restart."""
    found: dict[str, object] = {"control": asdict(shard.control)}
    for name, table in shard.tables.items():
        rows, records = table.written(np.sort(table.rows))
        found[name] = rows.tolist(), records.block.tolist()
    return found


def state_after_kill(shard: Shard, folder: Path) -> dict[str, object]:
    """Return the state of a shard that starts on a copy of another one's files."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(shard._log.directory, folder)  # pyright: ignore[reportPrivateUsage]
    other = Shard(folder, sync=False)
    other.load()
    found = state_of(other)
    other.close()
    return found


def test_shard_serves_while_its_log_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, rows, holds = opened(tmp_path / "store"), np.arange(1000), threading.Event()
    write(shard, 1, rows)
    flush = RecordLog.flush_to_disk

    def flush_late(log: RecordLog) -> None:  # as on a disk that takes a minute for the new log
        assert holds.wait(PATIENCE_SEC)
        flush(log)

    monkeypatch.setattr(RecordLog, "flush_to_disk", flush_late)
    with ThreadPoolExecutor(2) as pool:
        notified = pool.submit(shard.notify_checkpoint, "process")
        try:
            wait_for(lambda: list((tmp_path / "store").glob("*.partial")))
            pool.submit(write, shard, 2, rows[:500]).result(10.0)
            fetched = pool.submit(shard.fetch, request_of(shard), {"items": rows}).result(10.0)
        finally:
            holds.set()
        notified.result()
    steps = np.where(rows < 500, 2, 1)
    assert (fetched[0].block[:, 0] == rows + np.float32(steps) / 64).all()
    wait_for(lambda: [path.name[-6:-4] for path in log_files(tmp_path / "store")] == ["02", "02"])
    assert state_after_kill(shard, tmp_path / "copy") == state_of(shard)
    shard.close()


def between_records(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Act before each record of rows of a new base, as other threads may."""
    write_base = ShardLog.write_base

    def write_and_act(log: ShardLog, number: int, entries: Iterable[Entry]) -> int:
        def acting() -> Iterator[Entry]:
            for entry in entries:
                if isinstance(entry, RowsEntry):
                    act()
                yield entry

        return write_base(log, number, acting())

    monkeypatch.setattr(ShardLog, "write_base", write_and_act)


class Drawn:
    """Writes, sessions and moves of slots that are drawn."""

    def __init__(self, shard: Shard, data: st.DataObject) -> None:
        self.shard, self.data, self.names = shard, data, count()

    def act(self) -> None:
        action = self.data.draw(st.sampled_from(["write"] * 6 + ["give", "take", "session"]))
        if action == "write":
            table = self.data.draw(st.sampled_from(sorted(TABLES)))
            rows = self.data.draw(st.sets(st.integers(0, 60), min_size=1))
            self.write(table, np.array(sorted(rows)) * 1_000_003)
        elif action == "session":
            begin_session(self.shard, f"later-{next(self.names)}")
        else:
            self.move(give=action == "give")

    def write(self, table: str, rows: np.ndarray, op: str = WRITE) -> None:
        """Write those of the rows that may be written."""
        slots, control = slot_of_row(rows), self.shard.control
        rows = rows[control.moving[slots] if op == ARRIVING else control.owned[slots]]
        step = control.newest_step + self.data.draw(st.integers(0, 2))
        block = np.full((len(rows), 5), next(self.names), np.float32)
        request = replace(request_of(self.shard, step), op=op)
        self.shard.write(request, {table: rows}, Records(block, 4))

    def move(self, *, give: bool) -> None:
        """Give a part of the slots away, or get them anew."""
        control = self.shard.control
        if give != control.owned[0]:
            return
        epoch, session = control.epoch + 1, control.session
        before, after = (ALL, HIGH) if give else (HIGH, ALL)
        self.shard.apply_map(one_store_map(before, epoch, session, moving=LOW), "here")
        if not give:
            for table in TABLES:
                self.write(table, np.arange(70) * 1_000_003, ARRIVING)
        self.shard.apply_map(one_store_map(after, epoch + 1, session), "here")


@given(data=st.data(), rows_per_record=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_log_holds_the_state_whatever_happens_while_it_is_rewritten(
    data: st.DataObject, rows_per_record: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rewrite")
    shard = opened(folder / "store")
    drawn = Drawn(shard, data)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shard_module, "ROWS_PER_RECORD", rows_per_record)
        for _ in range(data.draw(st.integers(1, 6))):
            drawn.act()
        kill_at, records = data.draw(st.integers(0, 20)), count()

        def act() -> None:
            if data.draw(st.booleans()):
                drawn.act()
            if next(records) == kill_at:
                assert state_after_kill(shard, folder / "copy") == state_of(shard)

        between_records(monkeypatch, act)
        with suppress(SchemaError):  # another session was opened
            shard.compact()
    assert [path.name.partition("-")[0] for path in log_files(folder / "store")] == ["base", "log"]
    assert not list((folder / "store").glob("*.partial"))
    assert state_after_kill(shard, folder / "copy") == state_of(shard)
    drawn.write("items", np.arange(5))
    assert state_after_kill(shard, folder / "copy") == state_of(shard)
    shard.close()


def test_log_has_each_row_once_and_none_of_slots_that_were_given_away(tmp_path: Path) -> None:
    shard = opened(tmp_path / "store")
    for step in range(20):
        write(shard, step, np.arange(3000))
    long_bytes = log_bytes(tmp_path / "store")
    shard.apply_map(one_store_map(HIGH, shard.control.epoch + 1, "process"), "here")
    shard.compact()
    assert log_bytes(tmp_path / "store") < long_bytes / 35
    assert 1000 < len(shard.tables["items"]) < 2000
    assert state_after_kill(shard, tmp_path / "copy") == state_of(shard)
    shard.close()


def test_rewrite_on_a_full_disk_leaves_the_old_log(tmp_path: Path) -> None:
    shard = opened(tmp_path / "store")
    write(shard, 1, np.arange(600))
    write(shard, 2, np.arange(600, 1200))
    size, files = log_bytes(tmp_path / "store"), log_files(tmp_path / "store")
    with largest_file(size - 8000), pytest.raises(SchemaError, match=r"^no room on disk"):
        shard.compact()
    assert log_files(tmp_path / "store")[:2] == files
    assert not list((tmp_path / "store").glob("*.partial"))
    write(shard, 3, np.arange(10))
    assert state_after_kill(shard, tmp_path / "copy") == state_of(shard)
    shard.close()


def test_rewrite_is_cancelled_when_the_shard_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, closed = opened(tmp_path / "store"), list[Iterator[None]]()
    write(shard, 1, np.arange(10))
    write(shard, 1, np.arange(10), "users")
    before = state_of(shard)

    def close() -> None:
        if not closed:
            closed.append(iter(()))
            shard.close()

    between_records(monkeypatch, close)
    with pytest.raises(SchemaError, match=r"^store is closed"):
        shard.compact()
    again = Shard(tmp_path / "store", sync=False)
    again.load()
    assert state_of(again) == before
    again.close()


def test_log_of_a_run_without_checkpoints_is_rewritten_when_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "LONG_LOG_BYTES", 1 << 18)
    shard, sizes = opened(tmp_path / "store"), list[int]()
    for step in range(300):
        write(shard, step, np.arange(300))
        if shard._compacting is not None:  # pyright: ignore[reportPrivateUsage]
            shard._compacting.join()  # pyright: ignore[reportPrivateUsage]
        sizes.append(log_bytes(tmp_path / "store"))
    assert 1 << 17 < max(sizes) < 1 << 19
    assert state_after_kill(shard, tmp_path / "copy") == state_of(shard)
    shard.close()


def payloads_of(path: Path) -> list[bytes]:
    return [bytes(payload) for payload in read_records(path)]


def write_log(path: Path, payloads: list[bytes]) -> list[int]:
    """Append payloads and return where each record ends."""
    log, ends = RecordLog(path, sync=False), []
    for payload in payloads:
        log.append([payload[:3], b"", payload[3:]])
        ends.append(path.stat().st_size)
    log.close()
    return ends


@given(payloads=st.lists(st.binary(max_size=60), max_size=6), data=st.data())
def test_log_cut_anywhere_replays_its_whole_records_and_continues(
    payloads: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.bin"
    ends = write_log(path, payloads)
    written = path.read_bytes()
    cut = data.draw(st.integers(0, path.stat().st_size))
    with path.open("r+b") as file:
        file.truncate(cut)
        if data.draw(st.booleans()):  # a file system may have made room that was never filled
            file.seek(0, 2)
            file.write(bytes(data.draw(st.integers(0, 40))))
    left = path.read_bytes()  # a record that ends in zeros may be whole again
    whole = sum(left[:end] == written[:end] for end in ends)
    assert payloads_of(path) == payloads[:whole]
    assert path.stat().st_size == ([0, *ends][whole])
    write_log(path, [b"more"])
    assert payloads_of(path) == [*payloads[:whole], b"more"]


def test_log_damaged_before_a_good_record_is_refused_by_its_place(tmp_path: Path) -> None:
    for place in range(80):
        path = tmp_path / f"{place}.bin"
        ends = write_log(path, [b"first record", b"second record", b"third record"])
        data = bytearray(path.read_bytes())
        data[place] ^= 0x55
        path.write_bytes(data)
        if place >= ends[1]:
            assert payloads_of(path) == [b"first record", b"second record"]
            continue
        start = 0 if place < ends[0] else ends[0]
        message = (
            f"damaged record before an intact one in {path}:byte {start}; restore the file, or "
            "resume the run from its checkpoint with an empty directory"
        )
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            payloads_of(path)
        assert path.read_bytes() == data


def test_log_of_another_release_is_refused(tmp_path: Path) -> None:
    [text] = entry_to_buffers(ShardControl())
    write_log(tmp_path / "log.bin", [bytes(text).replace(b"newest_step", b"newest_stop")])
    with pytest.raises(
        SchemaError, match=r"^log was written by another version; start the store with an "
    ):
        list(read_entries([tmp_path / "log.bin"]))
