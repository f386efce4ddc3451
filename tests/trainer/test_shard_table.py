"""The rows of a store's table, and the steps that may write them."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.hashing import slot_of_row
from schemas.rows import initial_rows
from tests.trainer.stores import (
    LAYOUT,
    control_of,
    group_over,
    one_store_map,
    record_of,
    running,
    start_store,
)
from trainer.stores.api import BehindError, WriteBack
from trainer.stores.remote.shard import Shard, ShardTable
from trainer.stores.remote.wire import Request

ROWS = np.arange(6)
WRITES = st.lists(st.lists(st.sampled_from(ROWS.tolist()), min_size=1, unique=True), max_size=12)
LATER = "rows as of step 2 were replaced by those of step 3; go back to a checkpoint"


def first_record(row: int) -> list[float]:
    """Return the record of a row that was never written."""
    [values] = initial_rows(np.array([row]), table="items", seed=3, dim=4, dtype="float32")
    return [*values.tolist(), 0.0]


@given(WRITES)
def test_last_record_holds(writes: list[list[int]]) -> None:
    table, records = ShardTable(LAYOUT), {int(row): first_record(int(row)) for row in ROWS}
    for number, rows in enumerate(writes):
        block = np.full((len(rows), 5), number, np.float32)
        for _ in range(2):  # every call may be repeated
            table.write_block(np.array(rows), block)
        records |= {row: [float(number)] * 5 for row in rows}
        assert table.fetch_block(ROWS).tolist() == [records[int(row)] for row in ROWS]
    written = sorted({row for rows in writes for row in rows})
    rows, block = table.ascending(-1, 10)
    assert rows.tolist() == written
    assert block.tolist() == [records[row] for row in written]
    fewer = table.without(np.arange(4096) == slot_of_row(ROWS[:1])[0])
    assert fewer.rows.tolist() == [r for r in table.rows.tolist() if r != ROWS[0]]


def test_rows_of_a_step_are_neither_read_nor_written_once_a_later_one_has_written(
    tmp_path: Path,
) -> None:
    shard = Shard(tmp_path / "store", sync=False)
    shard.load()
    shard.open(control_of(one_store_map(((0, 4096),))))
    request, rows = Request(op="write", session="process"), {"items": ROWS}
    for step in range(4):
        block = np.full((6, 5), step, np.float32)
        shard.write(replace(request, train_step=step), rows, block)
        shard.write(replace(request, train_step=step), rows, block)  # the call is repeated
        assert (shard.fetch(replace(request, op="fetch", as_of=step), rows)[0] == step).all()
    with pytest.raises(BehindError, match=f"^{re.escape(LATER)}$"):
        shard.fetch(replace(request, op="fetch", as_of=2), rows)
    message = "rows of step 2 come after those of step 3, which another process has written; "
    with pytest.raises(BehindError, match=f"^{re.escape(message)}"):
        shard.write(replace(request, train_step=2), rows, np.zeros((6, 5), np.float32))
    assert (shard.fetch(replace(request, op="fetch"), rows)[0] == 3).all()
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
