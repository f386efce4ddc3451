"""Manifests: read back equal, equal bytes for equal values, unknown keys refused."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    GroupCounts,
    IndexManifest,
    InputFile,
    Reference,
    SegmentManifest,
    TableCounts,
    canonical_json,
    commit_root,
    encode_manifest,
    hash_of,
    new_index,
    read_dataset,
    read_index,
    read_segment,
    write_manifest,
)
from presage.schemas.errors import SchemaError

SEGMENT = SegmentManifest(
    num_samples=3,
    num_sessions=2,
    num_rejects=1,
    input_bytes=100,
    dataset_bytes=90,
    oracle_bytes=10,
    splits={"train": (0, 2), "evaluation": (2, 1)},
    groups={"user": GroupCounts(num_unique=2, dedup_factor=1.5, num_values=6, num_values_dedup=4)},
    tables={"items": TableCounts(num_lookups=9, num_lookups_dedup=6, num_unique_rows=5)},
    listing=(InputFile(source="log", path="a/\N{SNOWMAN}.parquet", num_bytes=100, sha256="0f"),),
    job_sha256="1",
    schema_sha256="2",
    blocks_sha256="3",
    files_sha256="4",
    directories=("samples", "tuples/user"),
    partition_key="session_id",
    num_parts=1,
)
INDEX = IndexManifest(
    segment_sha256="6",
    shuffle_key=2**64 - 1,
    batch_samples=32,
    epochs=2,
    shuffle="blocks",
    seed=7,
    num_steps=4,
    num_accesses={"items": (11, 12)},
    oracle_bytes=12,
    files_sha256="5",
)
DATASET = DatasetManifest(
    writer="one",
    name="tiny",
    job_sha256="1",
    schema_sha256="2",
    segments=(Reference(id="00000-abc", manifest_sha256="6"),),
    indexes=(
        replace(
            new_index(32, 2, "blocks", 7),
            parts={"00000-abc": Reference(id="00000-abc", manifest_sha256="7")},
        ),
    ),
    lineage={"log": "8"},
)
READERS = {
    "segment": (SEGMENT, read_segment),
    "index": (INDEX, read_index),
    "dataset": (DATASET, read_dataset),
}
CASES = pytest.mark.parametrize(("manifest", "read"), READERS.values(), ids=READERS.keys())


def path_of(directory: Path, manifest: object) -> Path:
    """Return the file of a manifest: of the root, its first version."""
    is_root = isinstance(manifest, DatasetManifest)
    return directory / ("_manifests/00000001.json" if is_root else "MANIFEST.json")


def write(directory: Path, manifest: object) -> bytes:
    """Write a manifest as it is; returns its content."""
    data = encode_manifest(manifest, indent=1)
    path_of(directory, manifest).parent.mkdir(exist_ok=True)
    path_of(directory, manifest).write_bytes(data)
    return data


@CASES
def test_manifest_is_read_back_equal(tmp_path: Path, manifest, read) -> None:
    data = write(tmp_path, manifest)
    assert read(tmp_path) == manifest
    assert write(tmp_path, read(tmp_path)) == data


def test_manifest_of_a_directory_is_written_with_its_hash(tmp_path: Path) -> None:
    for manifest in (SEGMENT, INDEX):
        sha256 = write_manifest(tmp_path, manifest)
        data = (tmp_path / "MANIFEST.json").read_bytes()
        assert data == write(tmp_path, manifest)
        assert sha256 == hashlib.sha256(data).hexdigest()
        assert [path.name for path in tmp_path.iterdir()] == ["MANIFEST.json"]


def test_committed_root_names_its_writer_and_its_parent(tmp_path: Path) -> None:
    first = commit_root(tmp_path, None, DATASET)
    assert first is not None
    data = (tmp_path / "_manifests/00000001.json").read_bytes()
    assert read_dataset(tmp_path) == replace(DATASET, writer=first.manifest.writer)
    assert commit_root(tmp_path, None, DATASET) is None
    second = commit_root(tmp_path, first, replace(DATASET, sealed=True))
    assert second is not None
    assert second.manifest.parent_sha256 == hashlib.sha256(data).hexdigest()
    assert read_dataset(tmp_path) == second.manifest


def test_num_blocks_counts_all_splits() -> None:
    assert SEGMENT.num_blocks == 3


def write_body(directory: Path, manifest: object, body: dict[str, object]) -> Path:
    """Write values with the right checksum, as another release would."""
    body = {**body, "checksum": hash_of(body)}
    path = path_of(directory, manifest)
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return path


def body_of(directory: Path, manifest: object) -> dict[str, object]:
    body = json.loads(write(directory, manifest))
    del body["checksum"]
    return body


OTHER_FORMAT = "{} in {}; use the release that wrote the file or rebuild the dataset"
CHANGES = {
    "another format": (lambda body: {**body, "format": 3}, "format must be 1, got 3"),
    "no format": (
        lambda body: {key: value for key, value in body.items() if key != "format"},
        "format must be 1, got None",
    ),
    "unknown key": (lambda body: {**body, "zebra": 1}, "unknown key: zebra"),
}


@CASES
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_manifest_of_another_format_is_refused_by_name(
    tmp_path: Path, manifest, read, change, message: str
) -> None:
    path = write_body(tmp_path, manifest, change(body_of(tmp_path, manifest)))
    with pytest.raises(SchemaError, match=f"^{re.escape(OTHER_FORMAT.format(message, path))}$"):
        read(tmp_path)


@CASES
def test_manifest_without_a_key_is_refused_by_name(tmp_path: Path, manifest, read) -> None:
    body = body_of(tmp_path, manifest)
    for key in sorted(body.keys() - {"format", "shuffle_key", "parent_sha256"}):
        path = write_body(tmp_path, manifest, {k: v for k, v in body.items() if k != key})
        pattern = re.escape(OTHER_FORMAT.format(f"missing key: {key}", path))
        with pytest.raises(SchemaError, match=pattern):
            read(tmp_path)


def test_nested_key_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    body = body_of(tmp_path, SEGMENT)
    body["groups"]["user"]["mode"] = "fast"  # type: ignore[index]
    path = write_body(tmp_path, SEGMENT, body)
    message = OTHER_FORMAT.format("unknown key: groups.user.mode", path)
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_segment(tmp_path)


def test_read_segment_compares_with_what_the_root_says(tmp_path: Path) -> None:
    sha256 = write_manifest(tmp_path, SEGMENT)
    wanted = Reference(id="00000-abc", manifest_sha256=sha256)
    assert read_segment(tmp_path, wanted) == SEGMENT
    other = write_manifest(tmp_path, replace(SEGMENT, num_rejects=2))
    message = (
        f"manifest must have sha256 {sha256[:12]}, got {other[:12]} in "
        f"{tmp_path / 'MANIFEST.json'}; restore it or rebuild the dataset"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_segment(tmp_path, wanted)


NO_MANIFESTS = {
    "no JSON": b"{",
    "no object": b"[]\n",
    "no checksum": b"{}\n",
    "no UTF-8": b'{"checksum": "\xff"}',
    "a number that JSON has not": b'{"checksum": "", "a": NaN}',
    "half a character": b'{"checksum": "", "a": "\\ud800"}',
}


@pytest.mark.parametrize("data", NO_MANIFESTS.values(), ids=NO_MANIFESTS.keys())
def test_file_that_is_no_manifest_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    for manifest, read in READERS.values():
        path = path_of(tmp_path, manifest)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        with pytest.raises(SchemaError, match=f"^manifest .* in {re.escape(str(path))}; restore"):
            read(tmp_path)


def test_missing_manifest_is_refused_by_name(tmp_path: Path) -> None:
    message = (
        f"manifest is missing in {tmp_path / 'MANIFEST.json'}; the build did not finish, or this "
        "is not a dataset"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_segment(tmp_path)


def test_canonical_json_sorts_keys_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "\N{SNOWMAN}"]}) == '{"a":[1.5,"\\u2603"],"b":1}'
    assert hash_of({"b": 1, "a": 2}) == hash_of({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical_json(float("nan"))


def test_replace_bytes_that_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_bytes(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("presage.schemas.dataset.files.os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        replace_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_ids_and_paths_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    elsewhere = "00000-/../../x"
    write_manifest(tmp_path, replace(SEGMENT, fitted={"../x": "0f"}))
    with pytest.raises(SchemaError, match="path leads out of the dataset"):
        read_segment(tmp_path)
    named = Reference(id=elsewhere, manifest_sha256="0f")
    index = new_index(32, 1, "none", 0)
    for part in (
        {"segments": (named,)},
        {"segments": (replace(named, id="00000-abc", path=elsewhere),)},
        {"indexes": (replace(index, id=elsewhere),)},
        {"indexes": (replace(index, parts={"00000-abc": named}),)},
    ):
        write(tmp_path, replace(DATASET, **part))
        with pytest.raises(SchemaError, match="id must consist of at most 200 letters"):
            read_dataset(tmp_path)
