"""A whole build on the local runner: nothing lost, nothing added, the same bytes every time."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table.expand import expand
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import find_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import MANIFESTS, Location
from tests.pipelines.appending import addition
from tests.pipelines.logs import (
    IN_PROCESS,
    built,
    bytes_of,
    copy_of,
    raw_rows,
    request,
    samples_of,
    stored_samples,
    stored_table,
    unnamed_places,
    vacuum_later,
    write_job,
    write_log,
)
from tests.shared import error_of, json_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of about 750 samples, not to be changed."""
    return built(tmp_path_factory.mktemp("built"))


def test_expand_of_a_build_returns_the_samples_of_the_log(dataset: Path, tmp_path: Path) -> None:
    expand(Location.parse(dataset), Location.parse(tmp_path / "x.parquet"))
    assert pq.read_table(tmp_path / "x.parquet") == stored_table(dataset)
    assert stored_samples(dataset) == samples_of(raw_rows(300, seed=0))


def test_expand_with_model_inputs_adds_the_transformed_columns(
    dataset: Path, tmp_path: Path
) -> None:
    main(["expand", str(dataset), "--output", str(tmp_path / "x.parquet"), "--model-inputs"])
    table = pq.read_table(tmp_path / "x.parquet")
    lengths = np.array([len(h) for h in table["history"].to_pylist()])
    np.testing.assert_allclose(table["num_history"].to_numpy(), np.log1p(lengths), rtol=1e-6)


def test_sessions_lie_together_in_time_order_within_a_split(dataset: Path) -> None:
    opened = open_dataset(dataset)
    blocks = opened.segments[0].blocks
    tables = list(read_samples(opened))
    start = 0
    for table, split in zip(tables, ["train", "evaluation"], strict=True):
        sessions, times = table["session"].to_pylist(), table["time"].to_pylist()
        changes = [i for i in range(1, len(sessions)) if sessions[i] != sessions[i - 1]]
        assert len(changes) + 1 == len(set(sessions))
        cuts = [0, *changes, len(sessions)]
        for a, b in pairwise(cuts):
            assert times[a:b] == sorted(times[a:b])
        held = [t.isoformat() >= "2026-01-01T00:08:00" for t in times]
        assert set(held) == {split == "evaluation"}
        start += table.num_rows
    assert start == sum(blocks["num_samples"].to_pylist())


def test_blocks_are_full_but_the_last_of_each_split(dataset: Path) -> None:
    blocks = open_dataset(dataset).segments[0].blocks
    for split in ("train", "evaluation"):
        sizes = [
            n
            for n, s in zip(
                blocks["num_samples"].to_pylist(), blocks["split"].to_pylist(), strict=True
            )
            if s == split
        ]
        assert set(sizes[:-1]) == {16}
        assert 1 <= sizes[-1] <= 16


@pytest.mark.slow
def test_small_windows_of_several_parts_share_row_groups_and_keep_every_sample(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 5_000)
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("  session:", "  window: {span: 1m}\n  session:", 1))
    write_log(tmp_path / "log")
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    segment = open_dataset(tmp_path / "dataset").segments[0]
    windows, places = (
        set(zip(*(segment.blocks[c].to_pylist() for c in ("split", "file", last)), strict=True))
        for last in ("window", "row_group")
    )
    assert len(windows) > 2 * len(places)
    assert len(places) == len({place[:2] for place in places}) > 2
    assert stored_samples(tmp_path / "dataset") == stored_samples(dataset)
    assert verify(tmp_path / "dataset")["problems"] == []


@pytest.mark.slow
def test_repeated_rows_in_many_parts_of_many_segments_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows repeated within a file, between files and between segments; items within a row."""
    job = write_job(tmp_path / "job")
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
    expected: list[tuple[object, ...]] = []
    for segment in range(3):
        rows = pa.concat_tables([raw_rows(60, seed=9), raw_rows(9, seed=segment)])
        items = [[5, 5, *row[:1]] for row in rows["items"].to_pylist()]
        rows = rows.set_column(4, rows.schema.field("items"), pa.array(items, pa.list_(pa.int64())))
        log = tmp_path / f"log-{segment}"
        log.mkdir()
        for name, part in {"a": [rows, rows.slice(0, 30)], "b": [rows.slice(20, 25)]}.items():
            table = pa.concat_tables(part)
            pq.write_table(table, log / f"{name}-{segment}.parquet", row_group_size=10)
            expected += samples_of(table)
        asked = addition if segment else request
        build(asked(job, log, tmp_path / "dataset"))
    opened = open_dataset(tmp_path / "dataset")
    assert [len(set(s.column("file").tolist())) > 2 for s in opened.segments] == [True] * 3
    assert stored_samples(tmp_path / "dataset") == sorted(expected)
    assert verify(tmp_path / "dataset")["problems"] == []


@pytest.mark.slow
def test_committed_files_are_synced_before_the_root_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut right after the commit leaves a root that names empty files."""
    synced: dict[tuple[int, int], int] = {}
    sync, create = os.fsync, Location.create
    lost: list[str] = []
    committed: list[Location] = []

    def record(file: int) -> None:
        sync(file)
        status = os.fstat(file)
        synced[status.st_dev, status.st_ino] = status.st_mtime_ns

    def create_synced(target: Location, data: bytes) -> bool:
        if target.parent.name == MANIFESTS and target.name.endswith(".json"):
            for path in (tmp_path / "dataset").rglob("*"):
                status = path.stat()
                is_synced = synced.get((status.st_dev, status.st_ino)) == status.st_mtime_ns
                if path.is_file() and not is_synced:
                    lost.append(str(path))
            committed.append(target)
        return create(target, data)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Location, "create", create_synced)
    dataset = built(tmp_path)
    assert lost == []
    assert committed == [Location.parse(dataset / MANIFESTS / "00000001.json")]


def test_build_into_a_finished_dataset_changes_nothing(dataset: Path, tmp_path: Path) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    write_log(tmp_path / "log")
    build(request(write_job(tmp_path / "job"), tmp_path / "log", copy))
    assert bytes_of(copy) == bytes_of(dataset)


def test_build_over_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    write_log(tmp_path / "log", seed=1)
    with pytest.raises(SchemaError, match="output has other segments"):
        build(request(write_job(tmp_path / "job"), tmp_path / "log", copy))
    assert bytes_of(copy) == bytes_of(dataset)


@pytest.mark.slow
def test_build_whose_commit_may_have_succeeded_can_be_run_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "presage.pipelines.table.root.commit_root", lambda *_: (_ for _ in ()).throw(OSError)
        )
        with pytest.raises(OSError, match=r"^$"):
            built(tmp_path)
    assert find_root(tmp_path / "dataset") is None
    job, target = tmp_path / "job" / "job.yaml", tmp_path / "dataset"
    build(request(job, tmp_path / "log", target, attempt="again"))
    assert bytes_of(tmp_path / "dataset") == bytes_of(dataset)
    vacuum_later(tmp_path / "dataset")
    assert unnamed_places(tmp_path / "dataset") == []


@pytest.mark.slow
def test_sessions_with_a_gap_are_counted_apart(tmp_path: Path) -> None:
    dataset = built(tmp_path, gap=", gap: 60s")
    rows = write_log(tmp_path / "again")
    times: dict[int, list[float]] = {}
    for row in rows.to_pylist():
        times.setdefault(row["session"], []).append(row["time"].timestamp())
    expected = sum(1 + sum(np.diff(sorted(t)) > 60) for t in times.values())
    assert open_dataset(dataset).segments[0].manifest.num_sessions == expected


@pytest.mark.slow
def test_json_of_build_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job")
    arguments = [
        "build",
        str(job),
        "--input",
        str(tmp_path / "log"),
        "--check-sql",
        "--json",
        IN_PROCESS,
    ]
    result = json_of(main, [*arguments, "--output", str(tmp_path / "dataset")])
    names = "num_samples num_sessions num_blocks num_rejects input_bytes dataset_bytes oracle_bytes"
    assert {
        *names.split(),
        "wall_sec",
        "startup_sec",
        "rows_per_sec",
        "groups",
        "segment",
        "built",
        "rejects",
    } == set(result)
    assert set(result["groups"]["user"]) == {"num_unique", "dedup_factor"}
    factor = result["num_samples"] / result["groups"]["user"]["num_unique"]
    assert result["groups"]["user"]["dedup_factor"] == pytest.approx(factor, rel=1e-6)


def test_unknown_option_is_named(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job")
    arguments = ["build", str(job), "--input", str(tmp_path / "log"), "--outptu", "x"]
    assert "unknown option: --outptu" in error_of(
        main, [*arguments, "--output", str(tmp_path / "dataset")]
    )


@pytest.mark.parametrize("option", [[], ["--check-sql"]], ids=["some rows", "all rows"])
@pytest.mark.parametrize(
    "sql", ["row_number() OVER () AS user", "count(*) OVER () AS user", "lag(user) OVER () AS user"]
)
def test_sql_that_depends_on_other_rows_ends_the_build(
    sql: str, option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.samples.validate._check_row_local", lambda *_: None)
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("user, history,", f"{sql}, history,"))
    arguments = ["build", str(job), "--input", str(tmp_path / "log"), *option, IN_PROCESS]
    message = "data.samples.map is not row-local: other samples of raw row"
    assert message in error_of(main, [*arguments, "--output", str(tmp_path / "dataset")])
