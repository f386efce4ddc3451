"""`presage.Dataset`: the samples of the expanded dataset, of selected days, splits and columns."""

import shutil
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import presage
from presage.pipelines.build import build
from presage.pipelines.table.delete import erase
from presage.pipelines.table.expand import content_hash, expand
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests import real_logs
from tests.fork_server import without_forking
from tests.object_store import Store
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed
from tests.pipelines.logs import SCHEMA, request, write_job, write_log
from tests.pipelines.test_rows import by_view
from tests.schemas.test_remote_files import copied
from tests.shared import make_once

pytestmark = pytest.mark.slow  # the dataset takes seconds to build

DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")


def _days(folder: Path) -> None:
    """Build three days, the last one with one more column, and erase the samples of some users."""
    dataset = folder / "dataset"
    job = write_job(folder / "job")
    newer = changed(
        folder / "newer",
        ("clicked AS label", "clicked AS label, 1.5::FLOAT AS price"),
        schema=SCHEMA + EXTRA + DEFAULT,
    )
    for seed, day in enumerate(DAYS):
        write_log(folder / day, num_rows=200, seed=seed)
        job_of_day = newer if day == DAYS[-1] else job
        new = request if day == DAYS[0] else addition
        build(new(job_of_day, folder / day, dataset, day=day))
    (folder / "ids").write_text("3\n17\n31\n")
    target = Location.parse(dataset)
    erase(target, folder / "ids", "user", datetime.now(UTC))


@pytest.fixture(scope="module")
def path() -> Path:
    """Three days, of which the last one has one more column; some samples are deleted."""
    return make_once(_days) / "dataset"


def expanded(dataset: Path, scratch: Path, *, model_inputs: bool = False) -> pa.Table:
    expand(dataset, scratch / "x.parquet", model_inputs=model_inputs)
    return pq.read_table(scratch / "x.parquet")


# Laws.


def check_rows(dataset: Path, scratch: Path) -> None:
    """Compare all rows with those of `expand`, in order, and with those of the SQL views."""
    found = presage.Dataset(dataset)
    rows = found.to_arrow()
    assert rows.to_pylist() == expanded(dataset, scratch).to_pylist()
    assert content_hash([rows]) == content_hash([by_view(dataset, "samples")])
    inputs = found.to_arrow(found.schema.values("name"))
    assert inputs.to_pylist() == expanded(dataset, scratch, model_inputs=True).to_pylist()
    assert len(found) == rows.num_rows == found.sizes.num_samples
    assert rows.schema.types == [c.type for c in found.schema if not c.derived]


def test_rows_are_those_of_expand_after_deletion_and_a_new_column(
    path: Path, tmp_path: Path
) -> None:
    check_rows(path, tmp_path)
    found = presage.Dataset(path)
    whole = sum(segment.manifest.num_samples for segment in found.opened.segments)
    assert 0 < len(found) < whole
    prices = found.to_arrow(["price"])["price"].to_pylist()
    assert set(prices) == {1.5, 2.5}  # the declared default in the days before


@pytest.mark.parametrize("name", ["mind", "ebnerd"])
def test_rows_of_real_logs_are_those_of_expand(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    dataset, _ = real_logs.built(name, shared_data)
    rows = presage.Dataset(dataset).to_arrow()
    assert rows.equals(expanded(dataset, tmp_path).cast(rows.schema))


def test_days_and_splits_divide_the_rows(path: Path) -> None:
    dataset = presage.Dataset(path)
    whole = content_hash([dataset.to_arrow()])
    parts = [
        dataset.select(days=[day], split=split) for day in DAYS for split in ("train", "evaluation")
    ]
    assert sum((content_hash([p.to_arrow()]) for p in parts), start=type(whole)()) == whole
    assert [len(part) for part in parts] == [part.to_arrow().num_rows for part in parts]
    assert all(len(part) for part in parts)


def test_random_selections_are_those_of_the_rows(path: Path) -> None:
    dataset = presage.Dataset(path)
    names, rng = dataset.schema.values("name"), np.random.default_rng(0)
    by_day = {day: dataset.select(days=[day]).to_arrow(names) for day in DAYS}
    for _ in range(20):
        columns = rng.permutation(names)[: rng.integers(1, len(names) + 1)].tolist()
        days = [day for day in DAYS if rng.random() < 0.5] or list(DAYS)
        found = dataset.select(days=days).to_arrow(columns)
        assert found.equals(pa.concat_tables([by_day[day].select(columns) for day in days]))


def test_batches_are_the_rows_in_pieces(path: Path) -> None:
    dataset = presage.Dataset(path)
    batches = list(dataset.batches(["history", "label"], max_samples=50))
    assert max(batch.num_rows for batch in batches) == 50
    assert pa.Table.from_batches(batches).equals(dataset.to_arrow(["history", "label"]))


def test_batches_that_are_not_read_to_the_end_read_no_further(path: Path) -> None:
    batches = presage.Dataset(path).batches(["label"], max_samples=1)
    assert next(batches).num_rows == 1
    batches.close()
    assert list(batches) == []


# Other libraries.


def test_duckdb_has_the_rows_as_a_table(path: Path, tmp_path: Path) -> None:
    dataset = presage.Dataset(path)
    relation = dataset.to_duckdb()
    assert content_hash([relation.to_arrow_table()]) == content_hash([dataset.to_arrow()])
    counted = relation.aggregate("label, count(*) AS n", "label").order("label").fetchall()
    labels = dataset.to_arrow(["label"])["label"].to_pylist()
    assert counted == [(label, labels.count(label)) for label in (0, 1)]
    with duckdb.connect(tmp_path / "samples.db") as connection:
        dataset.to_duckdb(["user"], connection=connection, table="users")
        [[number]] = connection.execute("SELECT count(*) FROM users").fetchall()
    assert number == len(dataset)


def test_polars_has_the_rows_as_a_frame(path: Path) -> None:
    dataset = presage.Dataset(path, days=[date(2026, 1, 2)])
    frame = dataset.to_polars(["user", "history", "time"])
    assert frame.equals(pl.DataFrame(dataset.to_arrow(["user", "history", "time"])))
    assert frame["history"].dtype == pl.List(pl.Int64)


@pytest.mark.parametrize("library", ["duckdb", "polars"])
def test_library_that_is_not_installed_is_named_with_the_command(
    library: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    dataset = presage.Dataset(path)
    convert = dataset.to_duckdb if library == "duckdb" else dataset.to_polars
    message = f"^{library} is not installed; run pip install {library}$"
    with pytest.raises(ModuleNotFoundError, match=message):
        convert()


# URLs.


def test_dataset_in_memory_has_the_rows_of_the_one_on_disk(path: Path) -> None:
    there = presage.Dataset(copied(path))
    assert there.to_arrow().equals(presage.Dataset(path).to_arrow())
    assert there.url.startswith("memory://")


def test_dataset_at_s3_has_the_rows_of_the_one_on_disk(
    path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    url = Location.parse(s3_store.new_url())
    for entry in Location.parse(path).entries():
        (url / entry.path).upload(path / entry.path)
    here, there = presage.Dataset(path, days=DAYS[1:]), presage.Dataset(str(url), days=DAYS[1:])
    assert there.to_arrow(["item", "price"]).equals(here.to_arrow(["item", "price"]))
    assert there.head(3).samples.equals(here.head(3).samples)


# What is in it.


def test_repr_has_sizes_days_roles_and_deduplication(path: Path) -> None:
    dataset = presage.Dataset(path)
    lines = repr(dataset).splitlines()
    assert lines[0] == f"Dataset {path}"
    assert lines[1].startswith(f"  {len(dataset):,} samples, ")
    assert lines[1].endswith(" sessions, 3 segments")
    assert lines[3] == "  3 days: 2026-01-01 to 2026-01-03"
    assert lines[4] == "  columns: 2 kept, 3 sparse, 1 label, 2 dense"
    assert lines[5].startswith("  samples per unique tuple: user ")
    part = presage.Dataset(path, split="train")
    assert repr(part).splitlines()[1].startswith(f"  {len(part):,} samples of split train, ")


def test_schema_segments_and_sizes_are_tables(path: Path) -> None:
    dataset = presage.Dataset(path)
    columns = {column.name: column for column in dataset.schema}
    history = columns["history"]
    assert (history.role, history.group, history.derived) == ("sparse", "user", False)
    assert history.type == pa.large_list(pa.int64())
    assert (columns["num_history"].derived, columns["item"].group) == (True, None)
    assert repr(dataset.schema).splitlines()[1].split() == ["session", "int64", "kept", "user"]
    assert [segment.day for segment in dataset.segments] == list(DAYS) == dataset.days
    assert sum(dataset.segments.values("num_samples")) == len(dataset)
    sizes = dataset.sizes
    stored = [p.stat().st_size for p in path.glob("segments/*/*/**/*.parquet")]
    assert 0 < sizes.dataset_bytes < sum(stored)
    [group] = sizes.groups
    samples = sum(s.manifest.num_samples for s in dataset.opened.segments)
    assert group.dedup_factor == pytest.approx(samples / group.num_unique, abs=1e-6)


def test_head_prints_samples_and_a_batch_with_its_shapes(path: Path) -> None:
    dataset = presage.Dataset(path)
    head = dataset.head(4)
    assert head.samples.equals(dataset.to_arrow(dataset.schema.values("name")).slice(0, 4))
    text = repr(head)
    assert "first 4 samples" in text
    assert "history      list<int64>" in text
    assert f"first batch of {head.batch.num_samples} samples" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"labels float32 ({head.batch.num_samples},)" in lines
    values = head.batch.sparse_features["history"].values()
    assert any(
        line.startswith(f"sparse_features: history values int64 ({len(values)},)") for line in lines
    )
    evaluation = dataset.select(split="evaluation").head(1).batch
    assert not torch.equal(evaluation.labels, head.batch.labels)


def test_loader_takes_selected_days(path: Path) -> None:
    day = presage.Dataset(path, days=[DAYS[1]])
    found = [
        time
        for split in ("train", "evaluation")
        for batch in presage.DataLoader(day, batch_samples=32, split=split, keep=["time"])
        for time in batch.kept["time"][batch.weights > 0].tolist()
    ]
    times = day.to_arrow(["time"])["time"].cast(pa.int64()).to_pylist()
    assert sorted(found) == sorted(times)


def test_head_without_torch_names_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "presage.loader", None)
    text = repr(presage.Dataset(path).head(2))
    assert "first 2 samples" in text
    assert "no batch: presage.loader is not installed; install Presage's extra trainer" in text


# Errors.


def test_names_that_do_not_exist_are_refused(path: Path, tmp_path: Path) -> None:
    dataset = presage.Dataset(path)
    with pytest.raises(SchemaError, match=r"no column 'labl' in .*; did you mean 'label'"):
        dataset.to_arrow(["labl"])
    with pytest.raises(SchemaError, match="columns must be distinct names"):
        dataset.to_arrow(["label", "label"])
    with pytest.raises(TypeError, match="columns must be a list, got 'label'"):
        dataset.to_arrow("label")
    with pytest.raises(SchemaError, match="dataset has no segment '2025-01-01'"):
        dataset.select(days=["2025-01-01"])
    with pytest.raises(SchemaError, match="split must be train or evaluation, got 'test'"):
        presage.Dataset(path, split="test")
    with pytest.raises(SchemaError, match="split must be train, got 'evaluation'"):
        dataset.select(split="train").select(split="evaluation")
    with pytest.raises(SchemaError, match=str(tmp_path / "none")):
        presage.Dataset(tmp_path / "none")


@pytest.mark.parametrize("read", ["to_arrow", "to_duckdb", "to_polars"])
def test_changed_byte_is_found(read: str, path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    file = min(copy.glob("segments/*/samples/*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises((SchemaError, duckdb.Error), match=r"restore|rebuild"):
        getattr(presage.Dataset(copy), read)()


def test_import_of_presage_imports_no_library(repository: Path) -> None:
    libraries = {"torch", "pyarrow", "duckdb", "apache_beam", "numpy"}
    program = f"import presage, sys; print({libraries} & sys.modules.keys())"
    with without_forking():
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=repository, capture_output=True, check=True
        )
    assert done.stdout == b"set()\n"
    assert "Dataset" in presage.__all__
    with pytest.raises(AttributeError, match="module 'presage' has no attribute 'Datset'"):
        presage.Datset  # noqa: B018
