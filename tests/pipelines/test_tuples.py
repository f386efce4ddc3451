"""Tuples apart from samples: exact whatever the hash of the SQL engine does."""

import numpy as np
import pyarrow as pa

from pipelines.samples.sql import Connection, run
from pipelines.samples.tuples import concat_tuples, hash_column, separate_tuples, with_hashes

GROUPS = {"history": ("history",)}


def rows(lists: list[list[int] | None]) -> pa.Table:
    """Return samples with lists, hashed as a build does."""
    kind = pa.large_list(pa.int64())
    table = pa.table({"item": np.arange(len(lists)), "history": pa.array(lists, kind)})
    return run(Connection(), with_hashes("SELECT * FROM log", GROUPS), {"log": table})


def test_lists_of_one_hash_stay_apart_and_equal_ones_meet_across_chunks() -> None:
    chunks = [[[7], [0, 7], [7]], [[7], [7]], [[0, 7], [0, 7], [], None]]
    hashes = rows([[7], [0, 7]])[hash_column("history")].to_pylist()
    assert hashes[0] == hashes[1], "the case needs two lists with one hash"
    joined = concat_tuples([separate_tuples(rows(lists), GROUPS) for lists in chunks])
    expected = [row for lists in chunks for row in lists]
    assert joined.column("history").to_pylist() == expected
    assert joined.uniques["history"]["history"].to_pylist() == [[7], [0, 7], [], None]
