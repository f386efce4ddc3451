"""Exchange of a local build: elements as bytes, in memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.exchange import Exchange, ReadElements, TaskResult, Worker
from presage.pipelines.prepare import SMALL_PARTS, count_parts, holds_in_memory
from presage.pipelines.runner_options import LocalOptions, local_options
from presage.pipelines.samples.tuples import Tuples, separate_tuples
from presage.pipelines.shuffle import from_ipc, to_ipc
from presage.schemas.errors import SchemaError

LISTS = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=8)


@given(LISTS, st.data())
def test_elements_are_decoded_as_they_were_encoded(lists: list[list[int]], data: Any) -> None:
    table = pa.table(
        {
            "user": pa.array([len(each) for each in lists]),
            "history": pa.array(lists, pa.large_list(pa.int64())),
            "label": pa.array([None if len(each) == 1 else "é" for each in lists]),
        }
    )
    start = data.draw(st.integers(0, len(lists) - 1))
    table = table.slice(start)  # offsets of Arrow arrays
    name, rows = cast(tuple[str, pa.Table], from_ipc(to_ipc(("a\nb", table))))
    assert (name, rows) == ("a\nb", table)
    assert from_ipc(to_ipc(table.replace_schema_metadata({"a": "b"}))).equals(
        table.replace_schema_metadata({"a": "b"}), check_metadata=True
    )
    samples = separate_tuples(table, {"user": ("user", "history")})
    decoded = cast(Tuples, from_ipc(to_ipc(samples)))
    assert decoded.samples == samples.samples
    assert decoded.uniques == samples.uniques
    assert decoded.references["user"].tolist() == samples.references["user"].tolist()


def _send(_worker: Worker, number: int) -> TaskResult:
    result = TaskResult(number * 10)
    for partition in range(number):
        rows = pa.table({"x": np.arange(number)})
        result.send("rows", partition, (f"task {number}", rows))
    return result


def run(scratch: Path | None) -> tuple[list[Any], dict[int, Any]]:
    with Exchange(cast(Any, None), 2, scratch) as exchange:
        values = exchange.run("send", _send, range(4))
        sent = {part: list(ReadElements(refs)) for part, refs in exchange.take("rows").items()}
        assert exchange.take("rows") == {}
    return values, sent


def test_files_hold_what_memory_holds(tmp_path: Path) -> None:
    expected = run(None)
    assert expected[0] == [0, 10, 20, 30]
    assert list(expected[1]) == [0, 1, 2]
    assert [name for name, _ in expected[1][1]] == ["task 2", "task 3"]
    assert run(tmp_path / "scratch") == expected


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], LocalOptions()),
        (["--runner=InProcess"], LocalOptions(in_memory=True)),
        (["--runner", "InProcess"], LocalOptions(in_memory=True)),
        (["--direct_num_workers", "3"], LocalOptions(3)),
        (["--direct_running_mode=multi_threading"], LocalOptions()),
        (["--direct_running_mode=multi_processing"], LocalOptions(in_memory=False)),
        (["--runner=FlinkRunner", "--direct_num_workers=2"], None),
    ],
)
def test_options_decide_how_a_command_runs(words: list[str], options: LocalOptions | None) -> None:
    assert local_options(words) == options


@pytest.mark.parametrize("count", ["-1", "two"])
def test_a_number_of_workers_that_is_none_is_refused(count: str) -> None:
    with pytest.raises(SchemaError, match=f"direct_num_workers.*{count}"):
        local_options([f"--direct_num_workers={count}"])


def test_sizes_decide_about_memory_and_parts() -> None:
    assert holds_in_memory(LocalOptions(), 100 << 20)
    assert not holds_in_memory(LocalOptions(), 300 << 20)
    assert not holds_in_memory(LocalOptions(in_memory=False), 1)
    assert holds_in_memory(LocalOptions(in_memory=True), 1 << 40)
    counts = [count_parts(mebibytes << 20) for mebibytes in range(0, 20_000, 7)]
    assert counts == sorted(counts)
    assert [count_parts(n << 20) for n in (0, 28, 29, 64 * 28, 64 * 64, 64 * 64 + 1)] == [
        *(1, 1, 2, SMALL_PARTS, SMALL_PARTS, SMALL_PARTS + 1)
    ]
