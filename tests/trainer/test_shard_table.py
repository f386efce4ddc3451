"""The rows of a store's table: of two records of a row the one of the later step holds."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.rows import initial_rows
from tests.trainer.stores import LAYOUT, group_over, record_of, running, start_store
from trainer.stores.api import BehindError, WriteBack
from trainer.stores.remote.shard import ShardTable

ROWS = np.arange(6)
WRITES = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.sampled_from(ROWS.tolist()), min_size=1, unique=True)),
    max_size=12,
)
LATER = "rows as of step 2 were replaced by those of step 3; go back to a checkpoint"


def first_record(row: int) -> list[float]:
    """Return the record of a row that was never written."""
    [values] = initial_rows(np.array([row]), table="items", seed=3, dim=4, dtype="float32")
    return [*values.tolist(), 0.0]


@given(WRITES)
def test_record_of_the_latest_step_holds_in_whatever_order_they_come(
    writes: list[tuple[int, list[int]]],
) -> None:
    table, latest, records = ShardTable(LAYOUT), {}, [first_record(int(row)) for row in ROWS]
    for number, (step, rows) in enumerate(writes):
        block = np.full((len(rows), 5), number, np.float32)
        for _ in range(2):  # every call may be repeated
            table.write(np.array(rows), step, block)
        for row in rows:
            if step >= latest.get(row, 0):
                latest[row], records[row] = step, [float(number)] * 5
        assert table.fetch(ROWS).tolist() == records
    rows, steps, block = table.records(ROWS)
    assert dict(zip(rows.tolist(), steps.tolist(), strict=True)) == latest
    assert block.tolist() == [records[row] for row in rows]
    assert table.newest_step == max(latest.values(), default=table.newest_step)


def test_rows_as_of_a_step_are_refused_once_a_later_one_has_written() -> None:
    table = ShardTable(LAYOUT)
    for step in range(3):
        table.write(ROWS, step, np.full((6, 5), step, np.float32))
        assert (table.fetch(ROWS, as_of=step) == step).all()
    table.write(ROWS[:1], 3, np.full((1, 5), 3, np.float32))
    with pytest.raises(BehindError, match=f"^{re.escape(LATER)}$"):
        table.fetch(ROWS, as_of=2)


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
