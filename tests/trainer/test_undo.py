"""Rows as earlier steps left them, against a reference that keeps every version."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tests.trainer.stores import LAYOUT, group_over, record_of, running, start_store
from trainer.rows import initial_rows
from trainer.stores.entries import RowsEntry
from trainer.stores.shard_table import ShardTable
from trainer.stores.store import WriteBack

ROWS = np.arange(6)


class AllVersions:
    """Keeps every version of every row."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[int, bytes]] = {}
        self.committed = -(1 << 62)

    def write(self, rows: list[int], step: int, block: np.ndarray, committed: int) -> None:
        for row, record in zip(rows, block, strict=True):
            self.versions.setdefault(row, {})[step] = record.tobytes()
        self.committed = max(self.committed, committed)

    def fetch(self, row: int, as_of: int | None) -> bytes:
        found = {s: r for s, r in self.versions.get(row, {}).items() if as_of is None or s <= as_of}
        return found[max(found)] if found else first_values(row)


def first_values(row: int) -> bytes:
    one = initial_rows(np.array([row]), table="items", seed=3, dim=4, dtype="float32")
    return np.append(one, np.zeros((1, 1), np.float32)).astype(np.float32).tobytes()


WRITES = st.tuples(
    st.integers(-2, 2),  # the step, from the last committed one
    st.integers(0, 2),  # how many are committed with it
    st.lists(st.sampled_from(ROWS.tolist()), min_size=1, unique=True),
)


def assert_equal(table: ShardTable, reference: AllVersions) -> None:
    for as_of in (None, *range(reference.committed, reference.committed + 4)):
        block = table.fetch(ROWS, as_of)
        for row, record in zip(ROWS.tolist(), block, strict=True):
            assert record.tobytes() == reference.fetch(row, as_of), (row, as_of)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(WRITES, max_size=12))
def test_rows_as_of_a_step_are_those_of_a_reference_that_keeps_all_versions(
    writes: list[tuple[int, int, list[int]]],
) -> None:
    table, reference, value = ShardTable(LAYOUT), AllVersions(), 0.0
    reference.committed = 0
    for offset, forward, rows in writes:
        step = reference.committed + offset
        committed = max(reference.committed, step - 2) + forward
        value += 1
        block = np.full((len(rows), 5), value, np.float32)
        for _ in range(2):  # every call may be repeated
            table.write(np.array(rows), step, block, committed)
        reference.write(rows, step, block, committed)
        assert_equal(table, reference)


@settings(max_examples=40)
@given(st.lists(WRITES, max_size=8), st.randoms(use_true_random=False))
def test_versions_told_to_another_table_in_any_order_are_the_same(
    writes: list[tuple[int, int, list[int]]], random: object
) -> None:
    table, reference = ShardTable(LAYOUT), AllVersions()
    reference.committed = 0
    for number, (offset, forward, rows) in enumerate(writes):
        step = reference.committed + offset
        committed = max(reference.committed, step - 2) + forward
        block = np.full((len(rows), 5), number, np.float32)
        table.write(np.array(rows), step, block, committed)
        reference.write(rows, step, block, committed)
    parts = list(table.versions(table.rows.copy()))
    random.shuffle(parts)  # type: ignore[attr-defined]
    other = ShardTable(LAYOUT)
    other.committed = -(1 << 62)
    for rows, steps, block in parts:
        other.write(rows, steps, block, table.committed)
    reference.committed = max(reference.committed, table.committed)
    assert_equal(other, reference)
    assert other.num_versions == table.num_versions


def test_versions_are_given_up_when_their_steps_are_committed() -> None:
    table, rows = ShardTable(LAYOUT), np.arange(100)
    for step in range(20):
        table.write(rows, step, np.full((100, 5), step, np.float32), step - 2)
        assert table.num_versions <= 200
    table.commit(19)
    assert table.num_versions == 0
    for step in range(20, 40):  # a caller that commits at once keeps none
        table.write(rows, step, np.full((100, 5), step, np.float32))
        assert table.num_versions == 0
    message = (
        "as_of must be at least the last committed step, got 38 for 39; go back to a checkpoint"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        table.fetch(rows, 38)


@pytest.mark.slow
def test_store_killed_among_uncommitted_steps_still_has_the_versions_before(
    tmp_path: Path,
) -> None:
    rows, process = np.arange(50), start_store(tmp_path / "store")
    port = process.port
    with running(process):
        store = group_over(process.address)["items"]
        group = store.group
        for step in range(4):
            back = WriteBack(rows[step:], record_of(step, 50 - step))
            group.write(step, {"items": back}, committed=1 if step > 1 else step)
        for kill in (False, True, True):
            if kill:
                process.kill()
                process.process = start_store(tmp_path / "store", "--port", port).process
            for as_of in (None, 1, 2, 3):
                found = group.fetch(9, {"items": rows}, as_of=as_of)["items"].state[:, 0]
                assert found.tolist() == np.minimum(rows, 3 if as_of is None else as_of).tolist()
            group.checkpointed(4)  # the new log has them, too
        group.write(2, {"items": WriteBack(rows[:1], record_of(9, 1))}, committed=1)
        assert group.fetch(3, {"items": rows}, as_of=2)["items"].state[0, 0] == 9
        message = "train_step must be at most 2 after the last committed step, got 7 after 4 in"
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}"):
            group.write(7, {"items": WriteBack(rows, record_of(7, 50))}, committed=4)


def test_rows_entry_of_a_log_says_what_is_committed() -> None:
    entry = RowsEntry({"items": ROWS}, ROWS, np.zeros((6, 5), np.float32))
    assert b'"committed": null' in bytes(entry.parts()[0])
    assert b'"committed": 4' in bytes(replace(entry, committed=4).parts()[0])
