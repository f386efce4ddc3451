"""Traces, tables and the command: parsing, skipped jobs, errors in one line."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.scheduler.__main__ import main
from presage.scheduler.simulator.command import POLICIES
from presage.scheduler.simulator.jobs import Knobs, read_tables, read_trace, synthetic_tables
from presage.schemas.errors import SchemaError
from tests.shared import error_of, json_of, output_of

HEAD = "job,submit_sec,duration_sec,num_replicas"
NUMBERS = {
    "jct_mean_sec",
    "jct_p50_sec",
    "jct_p95_sec",
    "completion_rate",
    "cpu_utilisation",
    "memory_utilisation",
    "deadline_miss_rate",
}


def write(path: Path, *lines: str, head: str = HEAD) -> Path:
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_read_trace_sorts_and_skips_and_counts_both(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "a,50,10,1",
        "b,20,10,2",
        "c,-1,10,1",
        "d,60,0,1",
        "e,70,5,0",
        "f,80,5,1",
    )
    found = read_trace(path)
    assert [job.name for job in found.jobs] == ["b", "a", "f"]
    assert (found.num_skipped, found.num_unsorted) == (3, 1)


def test_read_trace_of_parquet_is_that_of_csv(tmp_path: Path) -> None:
    head = f"{HEAD},cpus,memory_bytes,priority,deadline_sec,kind"
    path = write(tmp_path / "t.csv", "a,0,10,1,2.5,1e9,3,60,even", "b,5,10,2,,,,,", head=head)
    columns = {
        "job": ["a", "b"],
        "submit_sec": [0, 5],
        "duration_sec": [10.0, 10.0],
        "num_replicas": [1, 2],
        "cpus": [2.5, None],
        "memory_bytes": [1e9, None],
        "priority": [3, None],
        "deadline_sec": [60.0, None],
        "kind": ["even", None],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert read_trace(path) == read_trace(tmp_path / "t.parquet")


WRONG = {
    "no number": (
        (HEAD, "a,soon,10,1"),
        "submit_sec must be a number, got 'soon' in {path}:2; correct or remove the row",
    ),
    "not finite": (
        (HEAD, "a,0,inf,1"),
        "duration_sec must be a number, got 'inf' in {path}:2; correct or remove the row",
    ),
    "no cores": (
        (f"{HEAD},cpus", "a,0,10,1,0"),
        "cpus must be a positive number, got '0' in {path}:2; correct or remove the row",
    ),
    "twice": ((HEAD, "a,0,10,1", "a,1,10,1"), "job name occurs twice: 'a' in {path}:3; rename it"),
    "a column": (
        ("job,submit_sec,duration_sec", "a,0,10"),
        "trace has no column 'num_replicas' in {path}; add it (required: job, submit_sec, "
        "duration_sec, num_replicas)",
    ),
    "nothing left": (
        (HEAD, "a,-5,10,1"),
        "trace has no valid job, 1 were skipped in {path}; check its times",
    ),
}


@pytest.mark.parametrize(("lines", "message"), WRONG.values(), ids=WRONG.keys())
def test_read_trace_that_is_wrong_names_the_place(
    lines: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.csv", *lines[1:], head=lines[0])
    with pytest.raises(SchemaError, match=re.escape(message.format(path=path))):
        read_trace(path)


def test_made_tables_are_positive_where_sizes_can_be_had() -> None:
    for table in synthetic_tables().values():
        had = table.allowed
        assert had.any()
        assert (table.speed[had] > 0).all()
        assert (table.replica_busy[had] > 0).all()
        assert table.nearest(10**6, 10**6) == (16, 8)


def measurements(path: Path, sizes: list[tuple[int, int]]) -> Path:
    head = (
        "job,num_replicas,num_stores,batch_size,samples_per_sec,replica_busy_cpus,store_busy_cpus"
    )
    return write(path, *(f"k,{r},{s},64,{100.0 * r},{1.0},{0.5}" for r, s in sizes), head=head)


def test_read_tables_interpolates_between_measured_sizes_and_not_beyond(tmp_path: Path) -> None:
    path = measurements(tmp_path / "m.csv", [(1, 1), (4, 1), (1, 3), (4, 3)])
    table = read_tables(path)["k"]
    assert table.speed[1, 4] == pytest.approx(400.0)
    assert table.speed[2, 2] == pytest.approx(100.0 * np.exp(np.log(4.0) / 3.0))
    assert not table.allowed[0].any()
    assert table.speed.shape == (4, 5)


def test_read_tables_of_sizes_in_one_line_says_so(tmp_path: Path) -> None:
    path = measurements(tmp_path / "m.csv", [(1, 1), (2, 1), (4, 1)])
    message = "job 'k' has too few measured sizes to interpolate: 3; "
    with pytest.raises(SchemaError, match=re.escape(message)):
        read_tables(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(
        tmp_path / "t.csv", *(f"job-{i},{40 * i},{900 + 200 * i},{1 + i % 3}" for i in range(6))
    )


def test_main_simulate_json_prints_every_number_of_each_policy(path: Path) -> None:
    arguments = ["simulate", "--trace", str(path), "--policy", ",".join(POLICIES)]
    found = json_of(main, [*arguments, "--json"])
    assert list(found) == list(POLICIES)
    for numbers in found.values():
        assert numbers.keys() >= NUMBERS
        assert numbers["num_jobs"] == 6
        assert numbers["jct_mean_sec"] >= numbers["jct_bound_sec"]
        assert numbers["deadline_miss_rate"] is None
    assert output_of(main, arguments).count("\n") == len(POLICIES) + 1


def test_main_simulate_says_what_it_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,50,10,1", "b,20,10,2", "c,-1,10,1")
    words = ["simulate", "--trace", str(path), "--policy", "static"]
    assert error_of(main, words, 0) == (
        "skipped 1 jobs without a valid time or size\nsorted 1 jobs that were out of order\n"
    )


MISTAKES = {
    "a policy": (["--policy", "statik"], "policy is unknown: 'statik'; did you mean"),
    "twice": (["--policy", "static,static"], "policy is named twice: 'static'"),
    "cores": (["--policy", "static", "--cpus", "0.5"], "cluster is too small for the request of"),
    "a knob": (
        ["--policy", "static", "--oom", "2"],
        "oom must be a share of jobs, got 2.0; use 0 to 1",
    ),
    "a load": (["--policy", "static", "--load", "0"], "load must be positive, got 0.0; use 0.8"),
    "a seed": (["--policy", "static", "--seed", "-1"], "seed must not be negative, got -1; use 0"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_main_simulate_of_a_mistake_is_one_line(words: list[str], message: str, path: Path) -> None:
    error = error_of(main, ["simulate", "--trace", str(path), *words])
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("knob", ["over_request", "failures", "stragglers", "peak"])
def test_knobs_that_are_no_rates_are_refused(knob: str) -> None:
    with pytest.raises(ValueError, match=f"{knob} must"):
        Knobs(**{knob: -1.0})
