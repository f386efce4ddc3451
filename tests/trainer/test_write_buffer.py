"""Rows that wait at every replica until one of them has brought them to the stores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from schemas.errors import SchemaError
from tests.trainer.stores import StoreProcess, group_over, record_of, running, start_store
from trainer.elastic.shared_rows import WriteBuffer
from trainer.stores.api import BehindError, WriteBack

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
