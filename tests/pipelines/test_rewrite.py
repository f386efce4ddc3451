"""Rewriting: every row of every type is there, in the order of sessions, or nothing is."""

import re
import signal
import subprocess
import sys
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.cli import main
from presage.pipelines.rewrite.input import check_microseconds, decoded, inspect_rows
from presage.pipelines.sources.formats import read_split
from presage.pipelines.sources.raw_rows import Folder
from presage.pipelines.table.expand import content_hash
from presage.pipelines.table.verify import verify
from presage.schemas.arrays import bytes_per_row
from presage.schemas.dataset.manifest import find_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.pipelines.appending import KILLED_AT
from tests.pipelines.logs import IN_PROCESS, bytes_of, stored_table
from tests.pipelines.test_rows import by_view
from tests.shared import error_of, json_of, printed_by

NUM = 600
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6)
RNG = np.random.default_rng(0)
SESSION = RNG.integers(0, 40, NUM)

HELD = {
    "session_id": pa.array([f"s{s}" for s in SESSION]),
    "time": pa.array(RNG.permutation(NUM) + 1_700_000_000),
    "user_id": pa.array(SESSION * 7, pa.uint64()),
    "small": pa.array([None if i % 7 == 0 else i % 100 for i in range(NUM)], pa.int8()),
    "score": pa.array([float("nan") if i % 5 == 0 else i / 3 for i in range(NUM)]),
    "price": pa.array([None if i % 3 == 0 else i for i in range(NUM)], pa.float32()),
    "flag": pa.array([True, False, None] * 200),
    "seen": pa.array([None if s % 3 == 0 else [int(s)] * (s % 4) for s in SESSION]),
    "weights": pa.array([[0.5, float("nan")]] * NUM, pa.list_(pa.float32())),
    "text": pa.array(["", None, "a \U0001f600"] * 200, pa.large_string()),
    "texts": pa.array([["a", "a", ""], [], None] * 200, pa.list_(pa.large_string())),
    "category": pa.array([f"c{s % 3}" for s in SESSION]).dictionary_encode(),
    "at": pa.array([MOMENT, None, MOMENT] * 200, pa.timestamp("ms")),
    "zoned": pa.array([MOMENT.replace(tzinfo=UTC)] * NUM, pa.timestamp("us", "Europe/Copenhagen")),
    "day": pa.array([date(1969, 1, 1), None, date(2026, 1, 1)] * 200),
    "select": pa.array(range(NUM)),
}
ODD = {
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": ""}] * 200),
    "map": pa.array([[("k", 1)], None, []] * 200, pa.map_(pa.string(), pa.int64())),
    "nested": pa.array([[[1], []], None, [[2, None]]] * 200),
    "structs": pa.array([[{"a": 1}], [], None] * 200),
    "doubles": pa.array([[0.1], [float("nan")], None] * 200),
    "bytes": pa.array([b"\xff\x00", None, b""] * 200),
    "fixed": pa.array([b"ab", None, b"cd"] * 200, pa.binary(2)),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-2.00")] * 200, pa.decimal128(20, 2)),
    "time_of_day": pa.array([time(1, 2, 3), None, time(0)] * 200),
    "large_ids": pa.array([[2**64 - 1], [0], None] * 200, pa.list_(pa.uint64())),
    "half": pa.array([0.5, None, -0.0] * 200, pa.float16()),
    "nothing": pa.nulls(NUM),
    "uuid": pa.array([b"0123456789abcdef", None, bytes(16)] * 200, pa.uuid()),
    "json": pa.array(['{"a": 1}', None, "[]"] * 200, pa.json_()),
    "view": pa.array(["a", None, ""] * 200, pa.string_view()),
}  # fmt: skip


def folder_of(directory: Path, columns: dict[str, pa.Array], num_files: int = 3) -> Path:
    table = pa.table(columns)
    (directory / "in" / "more").mkdir(parents=True)
    size = -(-table.num_rows // num_files)
    for i in range(num_files):
        path = directory / "in" / ("more" if i else ".") / f"part-{i}.parquet"
        pq.write_table(table.slice(i * size, size), path, row_group_size=70)
    return directory / "in"


def run(
    folder: Path | Location, output: Path | Location, *more: str, beam: bool = False
) -> dict[str, Any]:
    more = more if beam else (IN_PROCESS, *more)
    return json_of(main, ["rewrite", str(folder), "--output", str(output), *more, "--json"])


def refused(folder: Path, output: Path, *more: str, beam: bool = False) -> str:
    more = more if beam else (IN_PROCESS, *more)
    words = ["rewrite", str(folder), "--output", str(output), *more]
    printed, errors = printed_by(main, words, 1)
    assert printed == ""
    assert [path for path in output.rglob("*") if path.is_file()] == []
    assert not list(output.parent.glob(f".{output.name}.*"))
    return errors.splitlines()[-1]


def in_session_order(table: pa.Table, session: str, moment: str | None) -> bool:
    keys = table[session].to_pylist()
    changes = [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
    whole = len(changes) + 1 == len({str(k) for k in keys})
    if moment is None:
        return whole
    times = table[moment].to_pylist()
    cuts = [0, *changes, len(keys)]
    return whole and all(times[a:b] == sorted(times[a:b]) for a, b in pairwise(cuts))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder with rows, `star` and `flat`, and what the two rewrites printed."""
    folder, results = tmp_path_factory.mktemp("held"), dict[str, dict[str, Any]]()
    folder_of(folder, HELD)
    for layout in ("star", "flat"):
        results[layout] = run(folder / "in", folder / layout, "--layout", layout)
    return folder, results


@pytest.mark.slow
def test_star_keeps_every_value_of_the_types_it_holds(
    held: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, result = held[0] / "in", held[1]["star"]
    assert (result["session"], result["time"], result["num_rows"]) == ("session_id", "time", NUM)
    assert result["num_sessions"] == len(set(SESSION.tolist()))
    assert result["bytes_before"] == sum(f.stat().st_size for f in folder.rglob("*.parquet"))
    assert verify(held[0] / "star")["problems"] == []
    rows = stored_table(held[0] / "star")
    assert rows.column_names == list(HELD)
    assert in_session_order(rows, "session_id", "time")
    wide = pa.table(HELD | {name: HELD[name].cast(pa.timestamp("us")) for name in ("at", "day")})
    assert content_hash([rows]) == content_hash([wide])
    assert result["content_hash"] == str(content_hash([rows]))
    assert content_hash([by_view(held[0] / "star", "samples")]) == content_hash([rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "from_url", "to_url"),
    [("star", True, False), ("star", False, True), ("flat", True, True)],
)
def test_rewrite_at_a_url_is_that_on_disk(
    layout: str,
    from_url: bool,
    to_url: bool,
    held: tuple[Path, dict[str, dict[str, Any]]],
    tmp_path: Path,
) -> None:
    folder, expected = held[0] / "in", held[1][layout]
    bucket = Location.parse(f"memory://{uuid.uuid4().hex}")
    for entry in Location.parse(folder).entries():
        (bucket / "in" / entry.path).upload(folder / entry.path)
    source = bucket / "in" if from_url else Location.parse(folder)
    target = bucket / "out" if to_url else Location.parse(tmp_path / "out")
    assert run(source, target, "--layout", layout) == expected
    if layout == "flat":
        files = {entry.path: (target / entry.path).read_bytes() for entry in target.entries()}
        assert files == {"00000.parquet": (held[0] / "flat" / "00000.parquet").read_bytes()}
    else:
        assert verify(target)["problems"] == []
        assert str(content_hash([stored_table(target)])) == expected["content_hash"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["star", "flat"])
def test_rewrite_by_beam_workers_that_share_a_store_alone_is_that_on_disk(
    layout: str, held: tuple[Path, dict[str, dict[str, Any]]]
) -> None:
    bucket = Location.parse(f"memory://{uuid.uuid4().hex}")
    options = ("--layout", layout, "--runner=FnApiRunner", "--direct_num_workers=1")
    result = run(held[0] / "in", bucket / "out", *options, beam=True)
    assert result == held[1][layout]
    assert {entry.path.partition("/")[0] for entry in bucket.entries()} == {"out"}
    if layout == "flat":
        (file,) = (bucket / "out").entries()
        content = (held[0] / "flat" / file.path).read_bytes()
        assert (bucket / "out" / file.path).read_bytes() == content


def test_rewrite_at_a_url_is_refused_like_on_disk(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns(), num_files=1)
    bucket = Location.parse(f"memory://{uuid.uuid4().hex}")
    (bucket / "in" / "part-0.parquet").upload(folder / "part-0.parquet")

    def message(output: Location) -> str:
        return error_of(
            main, ["rewrite", str(bucket / "in"), "--output", str(output)]
        ).splitlines()[-1]

    inside = bucket / "in" / "out"
    assert message(inside) == (
        f"error: output must lie outside the input, got {inside} below {bucket / 'in'}; choose "
        "another --output"
    )
    (bucket / "out" / "mine").write_bytes(b"x")
    assert message(bucket / "out") == (
        f"error: output is a directory with files in {bucket / 'out'}; choose another --output"
    )
    (bucket / "in" / ".hoodie" / "hoodie.properties").write_bytes(b"")
    assert message(bucket / "other").startswith(
        "error: folder belongs to a table format (.hoodie), whose log"
    )
    (bucket / "in").remove([".hoodie/hoodie.properties"])
    data = bytearray((folder / "part-0.parquet").read_bytes())
    (bucket / "in" / "part-0.parquet").write_bytes(bytes(data[:-10]))
    assert "file cannot be read as Parquet" in message(bucket / "other")
    assert not (bucket / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("num_parts", "chunk_bytes"), [(1, 20_000), (5, 1 << 30)])
def test_flat_keeps_every_type_and_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr("presage.pipelines.clustering.star.CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("presage.pipelines.rewrite.flat.ORDER_SHARE", 1)  # clustered at any price
    folder = folder_of(tmp_path, HELD | ODD)
    size = sum(f.stat().st_size for f in folder.rglob("*.parquet"))
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", -(-size // num_parts))
    result = run(folder, tmp_path / "out", "--layout", "flat", beam=num_parts > 1)
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in files] == [f"{i:05d}.parquet" for i in range(num_parts)]
    assert (pq.ParquetFile(files[0]).num_row_groups > 1) == (chunk_bytes < 1 << 30)
    before = pq.read_schema(next(folder.rglob("*.parquet")))
    assert all(pq.read_schema(f).equals(before, check_metadata=True) for f in files)
    rows = pa.concat_tables([pq.ParquetFile(f).read() for f in files])
    assert in_session_order(rows, "session_id", "time")
    original = pa.concat_tables([pq.ParquetFile(f).read() for f in folder.rglob("*.parquet")])
    by_id = [("select", "ascending")]
    names = [n for n in rows.column_names if n not in ("score", "weights", "doubles")]  # NaN
    assert (
        decoded(rows.select(names)).sort_by(by_id).to_pylist()
        == decoded(original.select(names)).sort_by(by_id).to_pylist()
    )
    assert result["content_hash"] == str(content_hash([decoded(original)]))


@pytest.mark.parametrize("name", [n for n in HELD | ODD if n not in ("uuid", "json", "view")])
def test_bytes_of_a_row_do_not_depend_on_its_batch(name: str) -> None:
    column = (HELD | ODD)[name].slice(1, 50)
    alone = [np.sum(bytes_per_row(column.slice(i, 1))) for i in range(len(column))]
    assert np.broadcast_to(bytes_per_row(column), len(column)).tolist() == alone
    assert min(alone) > 0


@pytest.mark.parametrize(
    "kind", [pa.list_view(pa.int64()), pa.list_(pa.uuid()), pa.struct([("a", pa.uuid())])]
)
def test_flat_refuses_a_type_that_it_cannot_sort_before_any_work(
    kind: pa.DataType, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, columns(odd=pa.nulls(NUM, kind)), num_files=1)
    kind = pq.read_schema(folder / "part-0.parquet").field("odd").type
    assert refused(folder, tmp_path / "out", "--layout", "flat") == (
        f"error: column 'odd' has a type that cannot be rewritten, {kind}; cast it, or leave it out"
    )


@pytest.mark.parametrize("name", [n for n in ODD])
def test_star_refuses_a_type_that_it_cannot_hold_before_any_work(name: str, tmp_path: Path) -> None:
    columns = {k: HELD[k] for k in ("session_id", "time")} | {name: ODD[name]}
    folder = folder_of(tmp_path, columns, num_files=1)
    kind = pq.read_schema(folder / "part-0.parquet").field(name).type
    assert refused(folder, tmp_path / "out") == (
        f"error: column {name!r} must be a number, a text, a time or a list of texts or "
        f"of whole or 32-bit numbers for --layout star, got {kind}; --layout flat keeps every type"
    )


@pytest.mark.slow
def test_rows_without_a_key_or_a_time_are_kept_by_flat_and_named_by_star(tmp_path: Path) -> None:
    keys = pa.array([None if i == 17 else int(s) for i, s in enumerate(SESSION)])
    times = pa.array([None if i % 11 == 0 else i for i in range(NUM)])
    folder = folder_of(tmp_path, {"user_id": keys, "ts": times}, num_files=1)
    assert run(folder, tmp_path / "flat", "--layout", "flat")["num_rows"] == NUM
    line = refused(folder, tmp_path / "star")
    assert line.startswith("error: session ")
    assert "part-0.parquet" in line
    assert line.endswith("; repair the row, or use --layout flat, which keeps every row")


def test_times_that_a_star_cannot_hold_are_refused_by_column(tmp_path: Path) -> None:
    times = pa.array([1_000 * i for i in range(NUM)], pa.timestamp("ns"))
    folder = folder_of(tmp_path / "whole", {"session_id": HELD["session_id"], "ts": times})
    check_microseconds(inspect_rows(Folder(str(folder)), None, None))
    finer = pa.array([1_000 * i + (i == 500) for i in range(NUM)], pa.timestamp("ns"))
    folder = folder_of(tmp_path / "finer", {"session_id": HELD["session_id"], "ts": finer})
    assert refused(folder, tmp_path / "out") == (
        "error: column 'ts' contains times finer than a microsecond, which --layout star cannot "
        "keep "
        "in more/part-2.parquet; use --layout flat, which keeps every row"
    )


def test_rows_of_which_a_star_can_keep_none_are_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns(seen=pa.array([[1, None]] * NUM)))
    assert refused(folder, tmp_path / "out") == (
        "error: --layout star can keep none of the rows: the session key or the time is null, or "
        "lists hold nulls; use --layout flat, which keeps every row"
    )


@pytest.mark.slow
def test_rows_without_time_keep_their_order_in_a_session(tmp_path: Path) -> None:
    columns = {"visit": HELD["session_id"], "n": pa.array([float(i) for i in range(NUM)])}
    folder = folder_of(tmp_path, columns, num_files=1)
    for layout in ("star", "flat"):
        result = run(folder, tmp_path / layout, "--layout", layout, "--session", "visit")
        assert result["time"] is None
    star = stored_table(tmp_path / "star")
    assert star.column_names == ["visit", "n", "row_time"]
    assert in_session_order(star, "visit", "n")
    flat = pq.read_table(tmp_path / "flat")
    assert flat.column_names == ["visit", "n"]
    rows = list(zip(map(str, flat["visit"].to_pylist()), flat["n"].to_pylist(), strict=True))
    assert sorted(rows, key=lambda row: row[0]) == sorted(rows)


@pytest.mark.slow
def test_a_label_makes_a_star_that_can_be_trained_on(tmp_path: Path) -> None:
    clicked = pa.array((RNG.random(NUM) < 0.3).astype(np.int8))
    folder = folder_of(tmp_path, HELD | {"clicked": clicked})
    run(folder, tmp_path / "out", "--label", "clicked")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.features.label == "clicked"
    assert set(dataset.features.with_role("sparse")) == {"small", "seen", "select"}
    assert set(dataset.job.data.table_of_feature) == {"small", "seen", "select"}


def columns(**more: pa.Array) -> dict[str, pa.Array]:
    return {"session_id": HELD["session_id"], "time": HELD["time"], **more}


REFUSED = {
    "no session key of a usual name": (
        {"a": HELD["select"], "b": HELD["text"], "c": HELD["score"]}, (),
        "error: no column has a usual name of a session key; use --session with one of a, b",
    ),
    "no column that could be a key": (
        {"c": HELD["score"]}, (),
        "error: no column has a usual name of a session key; use --session with one of none: "
        "no column is a number or a text",
    ),
    "a session key that is not there": (
        columns(), ("--session", "sesion_id"),
        "error: --session must name a column, got 'sesion_id'; did you mean 'session_id'?",
    ),
    "a session key of another type": (
        columns(score=HELD["score"]), ("--session", "score"),
        "error: --session must be a number or a text, got double for 'score'; use one of "
        "session_id, time",
    ),
    "several times": (
        {"session_id": HELD["session_id"], "x": HELD["at"], "y": HELD["at"]}, (),
        "error: several columns are times; use --time with one of x, y",
    ),
    "a time that is a text": (
        columns(text=HELD["text"]), ("--time", "text"),
        "error: --time must be a time, a date or a whole number below 2**63, got large_string for "
        "'text'; use one of time",
    ),
    "a label that is not there": (
        columns(), ("--label", "clik"),
        "error: --label must name a column, got 'clik'; use one of session_id, time",
    ),
    "a label in a flat file": (
        columns(), ("--layout", "flat", "--label", "clicked"),
        "error: --label needs --layout star, not 'flat'; leave it out: a flat "
        "file keeps every column as it is",
    ),
    "an unknown option": (
        columns(), ("--sesion", "x"),
        "error: unknown option: --sesion; see --help, and --runner for those of Beam",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rewrite_is_refused_with(name: str, tmp_path: Path) -> None:
    table, more, message = REFUSED[name]
    assert refused(folder_of(tmp_path, table), tmp_path / "out", *more, beam=True) == message


def test_files_of_two_kinds_are_refused_by_column(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns())
    changed = pa.table(columns()).set_column(1, "time", HELD["time"].cast(pa.int32()))
    pq.write_table(changed, folder / "z.parquet")
    assert refused(folder, tmp_path / "out") == (
        "error: column 'time' must be int64 as in more/part-1.parquet, got int32 in z.parquet; "
        "rewrite files of different schemas separately"
    )


def hive(directory: Path, **more: pa.Array) -> Path:
    for index, folder in enumerate(("day=2026-03-01/city=A%2FB", "day=2026-03-02/city=C")):
        path = directory / "in" / folder / "part-0.parquet"
        path.parent.mkdir(parents=True)
        table = pa.table(columns(**more)).slice(index * 300, 300)
        pq.write_table(table, path)
    return directory / "in"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["star", "flat"])
def test_columns_of_folder_names_become_columns_of_the_rows(layout: str, tmp_path: Path) -> None:
    folder = hive(tmp_path, n=pa.array(range(NUM)))
    command = ["rewrite", str(folder), "--output", str(tmp_path / "out"), "--layout", layout]
    message = "columns from folder names: day (date), city (string)\n"
    assert message in error_of(main, [*command, IN_PROCESS], 0)
    rows = by_view(tmp_path / "out", "samples") if layout == "star" else None
    rows = pq.read_table(tmp_path / "out") if rows is None else rows
    day = pa.timestamp("us") if layout == "star" else pa.date32()
    assert rows.schema.field("day").type == day
    assert rows.column_names == ["session_id", "time", "n", "day", "city"]
    read = duckdb.sql(f"SELECT n, day, city FROM read_parquet('{folder}/*/*/*.parquet') ORDER BY n")
    assert read is not None, "a SELECT has a result"
    assert (
        rows.sort_by("n")
        .select(["n", "day", "city"])
        .cast(pa.schema([("n", pa.int64()), ("day", pa.date32()), ("city", pa.string())]))
        .to_pylist()
        == read.to_arrow_table().to_pylist()
    )


def test_a_column_of_folder_names_that_the_files_have_must_agree(tmp_path: Path) -> None:
    days = pa.array([date(2026, 3, 1)] * 300 + [date(2026, 3, 2)] * 300)
    folder = hive(tmp_path / "same", day=days)
    run(folder, tmp_path / "flat", "--layout", "flat")
    rows = pq.read_table(tmp_path / "flat")
    assert rows.column_names == ["session_id", "time", "day", "city"]
    other = hive(tmp_path / "other", day=pa.array([None, *days.to_pylist()[1:]]))
    assert refused(other, tmp_path / "out") == (
        "error: column 'day' contains None, but the folder is day=2026-03-01 in "
        "day=2026-03-01/city=A%2FB/part-0.parquet; rename the folder or the column, or repair the "
        "rows"
    )


NOT_ONLY_PARQUET = {
    "Parquet of another name": (
        "000000_0",
        "error: file is Parquet, but its name does not contain `.parquet` in 000000_0; rename "
        "it, or move it away if it is not part of the dataset",
    ),
    "what an unfinished job left": (
        "_temporary/0/part-0.parquet",
        "error: files in a folder whose name begins with `_` belong to unfinished jobs in "
        "_temporary/0/part-0.parquet; remove or rename the folder",
    ),
    "a Delta table": (
        "_delta_log/00000.json",
        "error: folder belongs to a table format (_delta_log), whose log determines the files of "
        "the table in {folder}; write the table to plain Parquet first",
    ),
    "an Iceberg table": (
        "metadata/v1.metadata.json",
        "error: folder belongs to a table format (Iceberg metadata), whose log determines the "
        "files of the table in {folder}; write the table to plain Parquet first",
    ),
}


@pytest.mark.parametrize("name", NOT_ONLY_PARQUET)
def test_a_folder_with_rows_that_would_be_left_out_or_doubled_is_refused(
    name: str, tmp_path: Path
) -> None:
    path, message = NOT_ONLY_PARQUET[name]
    folder = folder_of(tmp_path, columns(), num_files=1)
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes((folder / "part-0.parquet").read_bytes())
    assert refused(folder, tmp_path / "out") == message.format(folder=folder)


@pytest.mark.slow
def test_files_that_are_not_parquet_are_counted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns(), num_files=1)
    for name in ("_SUCCESS", "_metadata", "notes.txt", ".part-0.parquet.crc"):
        (folder / name).write_bytes(b"PAR1" if name == "_metadata" else b"")
    line = "files that are not Parquet, not read: 3, such as _SUCCESS\n"
    words = ["rewrite", str(folder), "--output", str(tmp_path / "out"), IN_PROCESS]
    assert line in error_of(main, words, 0)


@pytest.mark.slow
def test_output_appears_only_after_the_rows_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, columns(), num_files=1)

    def compare(*_: object) -> None:
        assert find_root(tmp_path / "out") is None
        assert not list((tmp_path / "out").glob("*.parquet"))
        raise SchemaError("compared")

    monkeypatch.setattr("presage.pipelines.rewrite.rewrite._check_equal", compare)
    for layout in ("star", "flat"):
        assert refused(folder, tmp_path / "out", "--layout", layout) == "error: compared"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["star", "flat"])
def test_a_damaged_file_is_named_and_nothing_is_left(layout: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns(text=HELD["text"]))
    path = folder / "part-0.parquet"
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    line = refused(folder, tmp_path / "out", "--layout", layout, beam=layout == "flat")
    assert "part-0.parquet" in line


def test_a_cut_file_an_empty_folder_and_a_full_output_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns())
    (tmp_path / "empty").mkdir()
    assert "no file of source" in refused(tmp_path / "empty", tmp_path / "out")
    for layout in ("star", "flat"):
        none = folder_of(tmp_path / layout, {n: c.slice(0, 0) for n, c in columns().items()})
        args = (none, tmp_path / "out", "--layout", layout)
        assert f"input must have rows, got none in {none}" in refused(*args)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    assert "output is a directory with files" in error_of(
        main, ["rewrite", str(folder), "--output", str(tmp_path / "full")]
    )
    assert (tmp_path / "full" / "mine").read_text() == "x"
    inside = folder / "out"
    assert "output must lie outside the input" in refused(folder, inside)
    cut = folder / "part-0.parquet"
    cut.write_bytes(cut.read_bytes()[:-10])
    assert re.search(
        r"cannot be read as Parquet: .* in part-0", refused(folder, inside.parent.parent / "o")
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["star", "flat"])
def test_a_row_that_changes_on_the_way_is_noticed_and_nothing_is_left(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, columns())
    read = read_split

    def lossy(*arguments: object) -> object:
        for rows in read(*arguments):  # type: ignore[arg-type]
            yield type(rows)(rows.table.slice(1) if rows.table is not None else None, rows.rejects)

    monkeypatch.setattr("presage.pipelines.stages.read_split", lossy)
    line = refused(folder, tmp_path / "out", "--layout", layout)
    assert line.startswith("error: rewritten rows have content hash ")


@pytest.mark.nightly
def test_rewrite_of_real_sessions(tmp_path: Path, shared_data: Path) -> None:
    folder = shared_data / "30music_sample10"
    sizes = {
        layout: run(folder, tmp_path / layout, "--layout", layout) for layout in ("star", "flat")
    }
    hashes = {str(r["content_hash"]) for r in sizes.values()}
    assert len(hashes) == 1
    assert hashes.pop().endswith("-343183")
    assert sizes["star"]["bytes_after"] < sizes["flat"]["bytes_after"] < 3_680_017


KILLED = {
    "star": [
        ("presage.pipelines.table.root", "commit_root"),
        ("presage.pipelines.rewrite.rewrite", "_result"),
    ],
    "flat": [
        ("presage.pipelines.rewrite.rewrite", "_check_equal"),
        ("presage.pipelines.rewrite.rewrite", "_result"),
    ],
}
"""By layout, calls at which a rewrite is killed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "module", "function"), [(k, *call) for k, calls in KILLED.items() for call in calls]
)
def test_rewrite_that_was_killed_can_be_run_again(
    layout: str, module: str, function: str, tmp_path: Path
) -> None:
    folder, output = folder_of(tmp_path, columns(text=HELD["text"])), tmp_path / "out"
    expected = run(folder, tmp_path / "expected", "--layout", layout)
    (tmp_path / "beside").write_text("mine")
    arguments = ["rewrite", str(folder), "--output", str(output), "--layout", layout, IN_PROCESS]
    driver = KILLED_AT.format(module=module, function=function, before=0)
    done = subprocess.run([sys.executable, "-c", driver, *arguments], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert run(folder, output, "--layout", layout) == expected
    assert bytes_of(output) == bytes_of(tmp_path / "expected")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in", "expected", "beside", "out"}
    if layout == "star":
        assert len(list((output / "segments").iterdir())) == 1
    else:
        (path,) = output.iterdir()
        path.write_bytes(b"mine")
        message = "output is a directory with files"
        assert message in error_of(main, arguments)
        assert path.read_bytes() == b"mine"
