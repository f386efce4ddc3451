"""Samples as rows: selected columns alone are read, and equal those of the whole rows."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from presage.pipelines.build import build
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.samples import column_names, read_columns, read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVALUATION, TRAIN, inverse_column
from presage.schemas.storage.location import Location
from tests.pipelines.logs import SCHEMA, built, request
from tests.pipelines.shifting import JOB, STORAGES, shifting_log, stored_as
from tests.schemas.test_remote_files import copied
from tests.shared import make_once


def _shifting(folder: Path, name: str) -> None:
    shifting_log(folder / "log", 1000)
    (folder / "job.yaml").write_text(JOB)
    (folder / "schema.pbtxt").write_text(SCHEMA)
    with stored_as(STORAGES[name]):
        build(request(folder / "job.yaml", folder / "log", folder / "dataset"))


def _shop(folder: Path) -> None:
    built(folder)


@pytest.fixture
def shop() -> Path:
    """A dataset with one group and an evaluation split."""
    return make_once(_shop) / "dataset"


def whole(dataset: OpenDataset) -> pa.Table:
    return pa.concat_tables(read_samples(dataset, model_inputs=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_each_column_of_each_layout_is_that_of_the_rows(name: str) -> None:
    dataset = open_dataset(make_once(_shifting, name) / "dataset")
    expected = whole(dataset)
    names = column_names(dataset, model_inputs=True)
    assert pa.concat_tables(read_columns(dataset, names)).equals(expected)
    for column in names:
        found = pa.concat_tables(read_columns(dataset, [column]))
        assert found.equals(expected.select([column]))


def test_splits_divide_the_samples(shop: Path) -> None:
    dataset = open_dataset(shop)
    time = whole(dataset)["time"]
    train, evaluation = (
        pa.concat_tables(read_columns(dataset, ["time"], split))["time"].to_pylist()
        for split in (TRAIN, EVALUATION)
    )
    assert sorted(time.to_pylist()) == sorted(train + evaluation)
    assert max(train) < min(evaluation)


def test_column_that_does_not_exist_is_named(shop: Path) -> None:
    with pytest.raises(
        SchemaError, match=r"dataset has no column 'labl' in .*; did you mean 'label'"
    ):
        next(read_columns(open_dataset(shop), ["labl"]))


def chunks(file: CheckedFile, selected: set[str]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the column chunks of other columns than the selected ones."""
    for group in (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            if column.path_in_schema.split(".")[0] not in selected:
                start = column.dictionary_page_offset or column.data_page_offset
                yield start, start + column.total_compressed_size


def overwrite(dataset: OpenDataset, path: str, ranges: list[tuple[int, int]]) -> None:
    """Replace bytes of a file of each segment by others."""
    for segment in dataset.segments:
        local = Path(segment.directory / path)
        data = bytearray(local.read_bytes())
        for start, end in ranges:
            data[start:end] = bytes(byte ^ 0xFF for byte in data[start:end])
        local.unlink()
        local.write_bytes(data)


def test_bytes_of_other_columns_are_not_used(shop: Path, tmp_path: Path) -> None:
    """Every other chunk is overwritten: the columns are read all the same, the rows are not."""
    dataset = open_dataset(shutil.copytree(shop, tmp_path / "copy"))
    expected = whole(dataset).select(["user", "label"])
    [segment] = dataset.segments
    selected = {"samples": {"label", inverse_column("user")}, "groups": {"user", "tuple_index"}}
    for path in (p for p in segment.files if p.split("/")[0] in selected):
        file = segment.file(path)
        overwrite(dataset, path, list(chunks(file, selected[path.split("/")[0]])))
        file.close()
    assert pa.concat_tables(read_columns(dataset, ["user", "label"])).equals(expected)
    with pytest.raises(SchemaError, match="must have crc32"):
        whole(dataset)
    with pytest.raises(SchemaError, match="a page of item in row group 0 has changed"):
        list(read_columns(dataset, ["item"]))


def test_ranges_of_the_columns_alone_are_requested(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(copied(shop))
    requested: dict[str, int] = {}
    read_ranges = Location.read_ranges

    def counted(self: Location, ranges: list[tuple[int, int]]) -> list[memoryview]:
        kind = self.url.split("/")[-2]
        requested[kind] = requested.get(kind, 0) + sum(end - start for start, end in ranges)
        return read_ranges(self, ranges)

    monkeypatch.setattr(Location, "read_ranges", counted)
    monkeypatch.setattr(
        "presage.schemas.dataset.checked_files._WHOLE_BYTES", 0
    )  # else a small file is one request
    expected = whole(open_dataset(shop)).select(["label"])
    assert pa.concat_tables(read_columns(dataset, ["label"])).equals(expected)
    monkeypatch.undo()
    [segment] = dataset.segments
    file = segment.file("samples/00000.parquet")
    others = {*file.schema.names} - {"label"}
    start, end = segment.files["samples/00000.parquet"].region_offsets[-2:]
    assert requested == {"samples": end - start + sum(b - a for a, b in chunks(file, others))}


def test_no_changed_bit_of_a_column_passes_unseen(shop: Path, tmp_path: Path) -> None:
    """The checksum of a page leaves out its header; a changed header does not change a value."""
    dataset = open_dataset(shutil.copytree(shop, tmp_path / "copy"))
    [segment] = dataset.segments
    path = "samples/00000.parquet"
    local = Path(segment.directory / path)
    data = local.read_bytes()
    file = segment.file(path)
    expected = file.read_row_group(0, ["label", "item"])
    others = {*file.schema.names} - {"label", "item"}
    positions = [p for start, end in chunks(file, others) for p in range(start, end)]
    file.close()
    seen = 0
    for position in random.Random(0).sample(positions, min(len(positions), 400)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        local.unlink()
        local.write_bytes(damaged)
        try:
            found = segment.file(path, by_column=True).read_row_group(0, ["label", "item"])
        except SchemaError:
            seen += 1
        else:
            assert found.equals(expected)
    assert seen > 0
