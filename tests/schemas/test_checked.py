"""Checksums cover every byte of a dataset; a changed byte is refused with the name of its file."""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.clustering.storage_layout import open_writer
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.files import describe_file, find_damaged_files, parse_files
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.dataset.opened import (
    IndexPart,
    Segment,
    committed_segment,
    open_dataset,
    version_name,
)
from presage.schemas.errors import SchemaError
from tests.schemas.tiny import JOB, SCHEMA, write_dataset

SEGMENT = "segments/00000-tiny"
# Verified when the dataset and its index are opened.
OPENED = (
    "_manifests/00000001.json",
    version_name("job.yaml", hashlib.sha256(JOB.encode()).hexdigest()),
    version_name("schema.pbtxt", hashlib.sha256(SCHEMA.encode()).hexdigest()),
    f"{SEGMENT}/MANIFEST.json",
    f"{SEGMENT}/blocks.parquet",
    f"{SEGMENT}/files.parquet",
    "index-tiny/00000-tiny/MANIFEST.json",
    "index-tiny/00000-tiny/files.parquet",
)
# Verified as they are read.
READ = (
    "samples/00000.parquet",
    "samples/00001.parquet",
    "groups/user/00000.parquet",
    "groups/histories/00001.parquet",
    "access/items/00000.parquet",
    "edges/users/00000.parquet",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "tiny"
    write_dataset(path, num_segments=1)
    return path


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of a dataset, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def open_with_index(root: Path) -> list[Segment | IndexPart]:
    """Return segment and part of the index, with the tables of their files."""
    committed_segment.cache_clear()  # manifests of committed segments are read once per process
    dataset = open_dataset(root)
    index = dataset.open_index(dataset.manifest.indexes[0])
    assert all(segment.blocks.num_rows for segment in dataset.segments)
    parts = [*dataset.segments, *index.parts]
    assert all(part.files for part in parts)
    return parts


def changed(data: bytes, seed: int, count: int) -> list[bytes]:
    """The same bytes with one of them changed: at both ends, and at `count` places between."""
    rng = np.random.default_rng(seed)
    places = {0, len(data) - 1, *rng.integers(0, len(data), count).tolist()}
    copies = []
    for place in sorted(places):
        copy = bytearray(data)
        copy[place] ^= int(rng.integers(1, 256))
        copies.append(bytes(copy))
    return copies


@pytest.mark.parametrize("encoding", ["DICTIONARY", "PLAIN", "DELTA_BYTE_ARRAY"])
def test_texts_are_read_as_codes_where_their_encoding_allows_it(
    encoding: str, tmp_path: Path
) -> None:
    rows = pa.table({"a": ["x", "y", None, "x"], "b": [["x", ""], [], None, ["x"]], "c": range(4)})
    encodings = dict.fromkeys(["a", "b.list.element"], encoding) | {"c": "PLAIN"}
    with open_writer(str(tmp_path / "x.parquet"), rows.schema, encodings) as writer:
        writer.write_table(rows, row_group_size=2)
    entry = describe_file(tmp_path / "x.parquet", "x.parquet")
    file = CheckedFile(tmp_path, entry, texts_as_codes=True)
    assert pa.types.is_dictionary(file.schema.field("a").type) == (encoding[:5] != "DELTA")
    assert [file.read_row_group(i).to_pylist() for i in (0, 1)] == [
        rows.slice(2 * i, 2).to_pylist() for i in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPENED)
def test_open_dataset_refuses_any_changed_byte_by_name(root: Path, name: str) -> None:
    path = root / name
    good = path.read_bytes()
    for bad in changed(good, 1, 60):
        path.write_bytes(bad)
        with pytest.raises(SchemaError) as caught:
            open_with_index(root)
        assert caught.value.file == str(path)
        assert "; " in str(caught.value)
    path.write_bytes(good)
    open_with_index(root)


def test_open_dataset_refuses_a_changed_space_of_the_root_manifest(root: Path) -> None:
    path = root / "_manifests/00000001.json"
    good = path.read_bytes()
    spaces = [place for place, byte in enumerate(good) if chr(byte).isspace()]
    message = f"manifest does not match its checksum in {path}; restore it or rebuild the dataset"
    for place in spaces:
        path.write_bytes(good[:place] + b"\t" + good[place + 1 :])
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            open_dataset(root)


@pytest.mark.parametrize("name", READ)
def test_read_refuses_any_changed_byte_by_name(root: Path, name: str) -> None:
    segment = open_dataset(root).segments[0]
    path = root / SEGMENT / name
    good = path.read_bytes()
    for bad in changed(good, 2, 60):
        path.write_bytes(bad)
        with pytest.raises(SchemaError) as caught:
            segment.file(name).read()
        assert caught.value.file == str(path)
    path.write_bytes(good)
    segment.file(name).read()


def test_read_row_group_refuses_its_own_region_and_the_footer_only(root: Path) -> None:
    segment = open_dataset(root).segments[0]
    name = "samples/00000.parquet"
    path, entry = root / SEGMENT / name, segment.files[name]
    good = path.read_bytes()
    assert len(entry.region_crc32) == segment.file(name).metadata.num_row_groups + 1 == 3
    for region in range(3):
        start, end = entry.region_offsets[region : region + 2]
        middle = (start + end) // 2
        path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        for row_group in range(2):
            if region in (row_group, 2):
                pattern = (
                    rf"^bytes {start} to {end} must have crc32 {entry.region_crc32[region]}, "
                    rf"got \d+ in {re.escape(str(path))}; restore the file or rebuild the dataset$"
                )
                with pytest.raises(SchemaError, match=pattern):
                    segment.file(name).read_row_group(row_group)
            else:
                segment.file(name).read_row_group(row_group)


@pytest.mark.parametrize("name", OPENED)
def test_open_dataset_without_a_file_raises(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(SchemaError) as caught:
        open_with_index(root)
    assert caught.value.file == str(root / name)


FAULTS = {
    "cut": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "file must have {size} bytes, got {less} in {path}; restore it or rebuild the dataset",
    ),
    "gone": (
        lambda path: path.unlink(),
        "file is missing in {path}; restore it or rebuild the dataset",
    ),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_read_of_a_cut_or_missing_file_raises(root: Path, fault, message: str) -> None:
    segment = open_dataset(root).segments[0]
    path = root / SEGMENT / "samples/00000.parquet"
    size = path.stat().st_size
    fault(path)
    whole = message.format(path=path, size=size, less=size - 1)
    with pytest.raises(SchemaError, match=f"^{re.escape(whole)}$"):
        segment.file("samples/00000.parquet").read()


def test_regions_cover_each_file_without_a_gap(root: Path) -> None:
    for part in open_with_index(root):
        for entry in part.files.values():
            assert entry.region_offsets[0] == 0
            assert entry.region_offsets[-1] == entry.num_bytes
            assert list(entry.region_offsets) == sorted(entry.region_offsets)
            assert len(entry.region_offsets) == len(entry.region_crc32) + 1


def test_read_files_gives_back_what_was_described(root: Path) -> None:
    directory = root / SEGMENT
    path = directory / "files.parquet"
    found = parse_files(path.read_bytes(), path)
    listed = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert set(found) == listed - {"MANIFEST.json", "files.parquet", "blocks.parquet"}
    assert list(found) == sorted(found)
    for name, entry in found.items():
        assert entry == describe_file(directory / name, name)


def test_verify_whole_names_each_problem(root: Path) -> None:
    segment = open_dataset(root).segments[0]
    assert find_damaged_files(segment.directory, segment.files) == []
    cut, gone, other = (root / SEGMENT / name for name in READ[:3])
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    data = bytearray(other.read_bytes())
    data[100] ^= 1
    other.write_bytes(bytes(data))
    size = segment.files[READ[0]].num_bytes
    assert sorted(find_damaged_files(segment.directory, segment.files)) == sorted(
        [
            f"{READ[0]}: {size - 1} bytes instead of {size}",
            f"{READ[1]}: missing",
            f"{READ[2]}: content has changed",
        ]
    )


def test_two_writings_of_a_dataset_have_the_same_bytes(root: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_dataset(again, num_segments=1)
    names = [name for name in OPENED if not name.startswith("_manifests")]
    assert [(again / n).read_bytes() for n in names] == [(root / n).read_bytes() for n in names]
    assert read_dataset(again).segments == read_dataset(root).segments


def test_dataset_can_be_moved(root: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(root, moved)
    shutil.rmtree(root)
    assert len(open_dataset(moved).segments[0].file("samples/00000.parquet").read()) == 48
