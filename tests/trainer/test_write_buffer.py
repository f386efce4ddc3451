"""Rows of a store's table, and those that wait at replicas until one writes them to the stores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import slot_of_row
from presage.schemas.rows import initial_rows
from presage.trainer.elastic.shared_rows import WriteBuffer
from presage.trainer.stores.remote.shard import Shard, ShardTable
from presage.trainer.stores.remote.wire import Request
from presage.trainer.stores.store import BehindError, WriteBack
from tests.trainer.stores import (
    LAYOUT,
    StoreProcess,
    control_of,
    group_over,
    one_store_map,
    record_of,
    running,
    start_store,
)

ROWS = np.arange(12)
sessions = iter(range(10**9))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with running(start_store(tmp_path_factory.mktemp("buffer") / "store")) as (process,):
        yield process


class TwoReplicas:
    """Two replicas that share a store, and the step that each row left last."""

    def __init__(self, process: StoreProcess, most_bytes: int) -> None:
        session = str(next(sessions))
        opened = [
            group_over(process.address, owner="same", session=session, joins=not first)
            for first in (True, False)
        ]
        stores = [found["items"].all_tables for found in opened]
        self.replicas = [WriteBuffer(store, most_bytes) for store in stores]
        self.history: dict[int, int] = {}
        self.step = 1  # a record of step 0 would look like none

    def leave(self, rows: list[int], *, late: bool) -> None:
        """Let rows leave after a step; the second replica may have been held since before."""
        chosen = np.array(sorted(rows), np.int64)
        back = WriteBack(chosen, record_of(self.step, len(chosen)))
        self.history |= dict.fromkeys(rows, self.step)
        for replica in self.replicas[: 1 if late else 2]:
            replica.write(self.step, {"items": back})
        self.step += 1

    def agree(self, writer: int) -> None:
        written = max(replica.written for replica in self.replicas)
        for number, replica in enumerate(self.replicas):
            replica.update_written(written, writes=number == writer)

    def found(self, replica: int, step: int) -> dict[int, int]:
        records = self.replicas[replica].fetch(step, {"items": ROWS})["items"]
        state = records.state[:, 0].astype(int)
        return {row: int(state[row]) for row in ROWS.tolist() if state[row]}

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [0, 70, 130, 1 << 20])
def test_every_replica_reads_what_left_last_whoever_writes(
    process: StoreProcess, most_bytes: int
) -> None:
    rng = np.random.default_rng(most_bytes)
    pair = TwoReplicas(process, most_bytes)
    pair.agree(0)
    for _ in range(150):
        if rng.random() < 0.5:
            pair.agree(int(rng.integers(2)))
        pair.leave(rng.choice(12, rng.integers(5), replace=False).tolist(), late=False)
        for replica in (0, 1):
            assert pair.found(replica, pair.step) == pair.history
    with pair.replicas[1].unbuffered():  # whoever writes at the end has all that is missing
        pass
    pair.agree(1)
    assert pair.found(0, pair.step) == pair.history
    pair.close()


def test_a_replica_that_was_held_reads_no_row_of_a_later_step(process: StoreProcess) -> None:
    pair = TwoReplicas(process, most_bytes=0)
    pair.agree(0)
    pair.leave([1, 2], late=False)
    at = pair.step
    pair.leave([2, 3], late=True)
    assert pair.found(0, pair.step) == {1: 1, 2: 2, 3: 2}
    with pytest.raises(
        BehindError, match=f"as of step {at - 1} were replaced by those of step {at}"
    ):
        pair.found(1, at)
    pair.close()


def test_rows_that_the_stores_refuse_do_not_count_as_written(
    process: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = TwoReplicas(process, most_bytes=0)
    pair.agree(0)

    def refuse(*_: object) -> None:
        raise SchemaError("no room on disk")

    monkeypatch.setattr(pair.replicas[0]._store, "write", refuse)
    with pytest.raises(SchemaError, match=r"^no room on disk$"):
        pair.leave([1, 2], late=False)
    assert pair.replicas[0].written == -1
    assert pair.found(0, 2) == {1: 1, 2: 1}
    pair.close()


SOME_ROWS = np.arange(6)
WRITES = st.lists(
    st.lists(st.sampled_from(SOME_ROWS.tolist()), min_size=1, unique=True), max_size=12
)
LATER = "rows as of step 2 were replaced by those of step 3; go back to a checkpoint"


def first_record(row: int) -> list[float]:
    """Return the record of a row that was never written."""
    [values] = initial_rows(np.array([row]), table="items", seed=3, dim=4, dtype="float32")
    return [*values.tolist(), 0.0]


@given(WRITES)
def test_last_record_holds(writes: list[list[int]]) -> None:
    table, records = ShardTable(LAYOUT), {int(row): first_record(int(row)) for row in SOME_ROWS}
    for number, rows in enumerate(writes):
        for _ in range(2):  # every call may be repeated
            table.write(np.array(rows), record_of(number, len(rows)))
        records |= {row: [float(number)] * 5 for row in rows}
        assert table.fetch(SOME_ROWS).block.tolist() == [records[int(row)] for row in SOME_ROWS]
    written = sorted({row for rows in writes for row in rows})
    rows, found = table.ascending(-1, 10)
    assert rows.tolist() == written
    assert found.block.tolist() == [records[row] for row in written]
    fewer = table.without(np.arange(4096) == slot_of_row(SOME_ROWS[:1])[0])
    assert fewer.rows.tolist() == [r for r in table.rows.tolist() if r != SOME_ROWS[0]]


def test_rows_of_a_step_are_neither_read_nor_written_once_a_later_one_has_written(
    tmp_path: Path,
) -> None:
    shard = Shard(tmp_path / "store", sync=False)
    shard.load()
    shard.open(control_of(one_store_map(((0, 4096),))))
    request, rows = Request(op="write", session="process"), {"items": SOME_ROWS}
    for step in range(4):
        for _ in range(2):  # the call is repeated
            shard.write(replace(request, train_step=step), rows, record_of(step, 6))
        fetched, _ = shard.fetch(replace(request, op="fetch", as_of=step), rows)
        assert (fetched.block == step).all()
    with pytest.raises(BehindError, match=f"^{re.escape(LATER)}$"):
        shard.fetch(replace(request, op="fetch", as_of=2), rows)
    message = "rows of step 2 come after those of step 3, which another process has written; "
    with pytest.raises(BehindError, match=f"^{re.escape(message)}"):
        shard.write(replace(request, train_step=2), rows, record_of(0, 6))
    assert (shard.fetch(replace(request, op="fetch"), rows)[0].block == 3).all()
    shard.close()


@pytest.mark.slow
def test_store_that_is_killed_still_refuses_rows_as_of_an_earlier_step(tmp_path: Path) -> None:
    rows, process = np.arange(50), start_store(tmp_path / "store")
    port = process.port
    with running(process):
        group = group_over(process.address)["items"].all_tables
        for step in range(4):
            group.write(step, {"items": WriteBack(rows[step:], record_of(step, 50 - step))})
        for kill in (False, True, True):
            if kill:
                process.kill()
                process.process = start_store(tmp_path / "store", "--port", port).process
            state = group.fetch(9, {"items": rows}, as_of=3)["items"].state[:, 0]
            assert state.tolist() == np.minimum(rows, 3).tolist()
            with pytest.raises(
                BehindError, match=r"^rows as of step 2 were replaced by those of step 3"
            ):
                group.fetch(9, {"items": rows}, as_of=2)
            group.notify_checkpoint(4)  # the new log has the steps, too
