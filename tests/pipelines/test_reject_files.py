"""Files of rejects: the same bytes for any workers, counts by kind of reason."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.samples.statements import Steps
from presage.pipelines.sources.raw_rows import ORIGIN, folder_of
from presage.pipelines.sources.rejects import (
    MAX_KINDS,
    OTHERS,
    Reject,
    count_rejects,
    count_segment_rejects,
    merge_counts,
    range_keys,
    rejects_from_table,
    rejects_table,
    sort_key,
    sorted_rejects,
    summary_lines,
    write_rejects,
)
from presage.pipelines.stages import BuildContext, partition_samples
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import load_job
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError
from presage.schemas.features import load_features
from presage.schemas.layout import REJECTS_SCHEMA
from presage.schemas.storage.location import Location
from tests.pipelines.logs import bytes_of, raw_rows, request, write_job
from tests.shared import error_of, printed_by

LARGE, HALF = 200 << 20, 20 << 20
FILES = [("b/1.csv", 10), ("b/2.csv", LARGE), ("a.csv", 10), ("c.csv", HALF), ("d", HALF)]


def some_rejects(seed: int, count: int) -> list[Reject]:
    """Return rejects of several files and reasons, some of them twice."""
    rng = np.random.default_rng(seed)
    result = [
        Reject(
            FILES[rng.integers(len(FILES))][0],
            None if rng.random() < 0.1 else int(rng.integers(0, 600_000)),
            ("x must be int64, got 'a{}'", "line must have 6 fields, got {}", "y must not be null")[
                rng.integers(3)
            ].format(rng.integers(5)),
            f"{{'x': {rng.integers(3)}}}",
        )
        for _ in range(count)
    ]
    return [*result, *result[: count // 4]]


def listing() -> tuple[InputFile, ...]:
    return tuple(InputFile(source="log", path=p, num_bytes=n, sha256="") for p, n in FILES)


def written(root: Path, tables: Sequence[pa.Table]) -> None:
    """Write rejects as workers do."""
    places: dict[int, list[pa.Table]] = {}
    for table in tables:
        targets = range_keys(table, listing())
        for place in np.unique(targets).tolist():
            places.setdefault(place, []).append(table.filter(pa.array(targets == place)))
    for place, rows in [*places.items(), *places.items()]:  # the second time is a retry
        write_rejects(root, place, rows)


def test_sorted_rejects_are_those_of_plain_python() -> None:
    rejects = some_rejects(1, 500)
    table = sorted_rejects([rejects_table(rejects[:200]), rejects_table(rejects[200:])])
    assert list(rejects_from_table(table)) == sorted(set(rejects), key=sort_key)
    assert sorted_rejects([]).num_rows == 0


def test_files_are_the_same_however_rejects_are_found_and_hold_each_once(tmp_path: Path) -> None:
    rejects = some_rejects(2, 600)
    written(tmp_path / "one", [rejects_table(rejects)])
    shuffled = [rejects[i] for i in np.random.default_rng(0).permutation(len(rejects))]
    many = [rejects_table(shuffled[i : i + 7]) for i in range(0, len(shuffled), 7)]
    written(tmp_path / "many", many)
    files = bytes_of(tmp_path / "one")
    assert files == bytes_of(tmp_path / "many")
    names = (
        "00000-00000",
        "00001-00000",
        "00001-00001",
        "00001-00002",
        "00002-00000",
        "00003-00000",
    )
    assert list(files) == [f"rejects/{name}.parquet" for name in names]
    assert len(files) == 6  # two small ones together, three ranges of the large one, c, d
    rows = [pq.read_table(tmp_path / "one" / name) for name in files]
    assert list(rejects_from_table(pa.concat_tables(rows))) == sorted(set(rejects), key=sort_key)


def test_counts_by_kind_are_those_of_plain_python(tmp_path: Path) -> None:
    rejects = some_rejects(3, 400)
    written(tmp_path, [rejects_table(rejects)])
    counts, distinct = (
        count_segment_rejects(Location.parse(tmp_path)),
        sorted(set(rejects), key=sort_key),
    )
    assert counts.num_rejects == len(distinct)
    places = [(r.file, r.position) for r in distinct]
    unknown = sum(position is None for _, position in places)
    assert counts.num_rows == unknown + len({p for p in places if p[1] is not None})
    assert list(counts.first) == distinct[:3]
    kinds = {
        "x must be int64, got '...'": "x must",
        "line must have 6 fields, got N": "line must",
        "y must not be null": "y must",
    }
    for kind, begin in kinds.items():
        mine = [r for r in distinct if r.reason.startswith(begin)]
        assert counts.kinds[kind].count == len(mine)
        assert list(counts.kinds[kind].first) == mine[:3]
        assert counts.kinds[kind].reason == (mine[0].reason if begin == "y must" else None)


def test_kinds_without_end_are_counted_together() -> None:
    rejects = [Reject("f", i, f"column 'c{i}' must not be null") for i in range(300)]
    counts = merge_counts(count_rejects(rejects_table(rejects[start::2])) for start in (0, 1))
    assert len(counts.kinds) == MAX_KINDS + 1
    assert counts.num_rejects == sum(k.count for k in counts.kinds.values()) == 300
    assert counts.kinds[OTHERS].count > 150


def test_report_says_share_reasons_with_an_example_and_path() -> None:
    rows = [Reject("log.csv", i, f"x must be int64, got 'a{i}'", f"a{i}") for i in range(4)]
    rows += [Reject("log.csv", None, "file must end in a line end, got none")]
    counts = count_rejects(sorted_rejects([rejects_table(rows)]))
    assert list(summary_lines(counts, 95, "out/rejects")) == [
        "warning: rejected: 5 rows of 100 (5.00%); see out/rejects",
        "  4: x must be int64, got '...'; such as log.csv:0 a0",
        "  1: file must end in a line end, got none; such as log.csv",
    ]
    (first, *_) = summary_lines(counts, 5000, "out/rejects")
    assert first == "rejected: 5 rows of 5,005 (0.10%); see out/rejects"
    assert list(summary_lines(count_rejects(REJECTS_SCHEMA.empty_table()), 10, "")) == []


def test_rows_that_several_samples_come_from_count_once() -> None:
    rows = [Reject("a.csv", i // 3, "x must not be null", str(i)) for i in range(9)]
    rows += [Reject("b.csv", 2, "x must not be null"), Reject("b.csv", None, "y")]
    counts = count_rejects(sorted_rejects([rejects_table(rows)]))
    assert (counts.num_rejects, counts.num_rows, counts.share(15)) == (11, 5, 0.25)
    assert next(summary_lines(counts, 15, "x")).startswith(
        "warning: rejected: 11 samples of 5 rows of 20 (25"
    )


def bad_log(directory: Path, every: int) -> Path:
    """Write a log in which each `every`-th row has no session."""
    rows = raw_rows(120, seed=4)
    sessions = [None if i % every == 0 else v for i, v in enumerate(rows["session"].to_pylist())]
    directory.mkdir(parents=True)
    pq.write_table(rows.set_column(0, "session", pa.array(sessions, pa.int64())),
                   directory / "log.parquet", row_group_size=25)  # fmt: skip
    return directory


@pytest.mark.slow
def test_too_many_rejects_keep_the_segment_out_with_exit_code_3(tmp_path: Path) -> None:
    job, log = write_job(tmp_path / "job"), bad_log(tmp_path / "log", every=5)
    command = ["build", str(job), "--input", str(log), "--json", "--runner=InProcess", "--output"]
    command.append(str(tmp_path / "dataset"))
    errors = error_of(main, command, 3)
    assert re.search(
        r"segment: rejected rows must be at most 0.1 of the rows that samples are made from, got "
        r"0\.2 \(24 of 120\)",  # rows, though each gives a sample for every item
        errors,
    )
    assert "data.gate.max_reject_fraction" in errors
    (refused,) = (tmp_path / "dataset").rglob(".refused-*")
    counts = count_segment_rejects(Location.parse(refused))
    assert counts.num_rows == 24 < counts.num_rejects
    assert f"see {refused}/rejects" in errors
    job.write_text(job.read_text().replace("  on_error:", "  gate: {action: warn}\n  on_error:"))
    out, errors = printed_by(main, command, 0)
    (line,) = out.splitlines()
    result = json.loads(line)["rejects"]
    assert result["share"] > 0.1
    reason = "session key 'session' must not be null"
    assert [(r["reason"], r["file"], r["row"]) for r in result["reasons"]] == [
        (reason, "log.parquet", 0)]  # fmt: skip
    assert (tmp_path / "dataset" / result["path"]).is_dir()
    assert "warning: rejected: " in errors
    assert verify(tmp_path / "dataset")["problems"] == []


def test_null_keys_of_a_look_up_are_spread_over_all_partitions(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    sides = """    joins: [{side: shops, key: user}]
  sides: {shops: {files: "*.csv", format: csv, columns: {shop: int64, town: int64}, key: shop}}
  session: {key"""
    path.write_text(path.read_text().replace("  session: {key", sides))
    job = load_job(path)
    context = BuildContext(
        folder=folder_of(tmp_path), segment_root=Location.parse(tmp_path), listing=(),
        data=job.data,
        features=load_features(path.parent / "schema.pbtxt"), steps=Steps(None, None),
        num_parts=8, empty_rows={}, key_types={"shops": pa.int64()},
    )  # fmt: skip
    samples = pa.table({"user": pa.nulls(50_000, pa.int64()), ORIGIN: pa.array(range(50_000))})
    sizes = {part: rows.num_rows for part, rows in partition_samples(context, 0, samples)}
    assert sorted(sizes) == list(range(8))
    assert max(sizes.values()) < 1.2 * 50_000 / 8


def test_all_rows_bad_end_with_the_first_reason(tmp_path: Path) -> None:
    job, log = write_job(tmp_path / "job"), bad_log(tmp_path / "log", every=1)
    plain = request(job, log, tmp_path / "dataset")
    with pytest.raises(SchemaError, match=r"^the input yields no samples; .* in log.parquet:0$"):
        build(plain)
