"""The formulas of `schemas/formats/`, implemented from its text alone."""

import hashlib
import re
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.schemas import layout
from presage.schemas.arrays import comparable, hash_keys
from presage.schemas.dataset.manifest import DatasetManifest, IndexManifest, SegmentManifest
from presage.schemas.hashing import hash_rows, slot_of_row
from tests.schemas.tiny import write_dataset

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64 in plain integers."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    return "\n".join(
        path.read_text() for path in sorted((repository / "schemas" / "formats").glob("*.md"))
    )


def test_rows_follow_the_formula() -> None:
    salt = int.from_bytes(hashlib.sha256(b"items").digest()[:8], "little")
    ids = [0, 1, -1, 7, 2**63 - 1, -(2**63)]
    found = hash_rows(np.array(ids), "items", 1000)
    assert [mix(i & MASK ^ salt) % 2**63 % 1000 for i in ids] == found.tolist()
    assert slot_of_row(np.array([0, 5, 1000])).tolist() == [mix(row) >> 52 for row in (0, 5, 1000)]


def test_hash_of_session_keys_follows_the_formula() -> None:
    salt = mix(0)
    numbers = [0, 1, -1, 123456789, 2**63 - 1]
    expected = [mix(mix(n & MASK ^ salt) ^ salt) for n in numbers]
    assert hash_keys(comparable(pa.array(numbers))).tolist() == expected
    small = [mix(mix(n & 0xFFFFFFFF ^ salt) ^ salt) for n in (0, -1)]
    assert hash_keys(comparable(pa.array([0, -1], pa.int32()))).tolist() == small
    texts = ["", "a", "session-7", "\N{SNOWMAN}"]
    sums = [sum(mix(b + mix(i) + salt & MASK) for i, b in enumerate(t.encode())) for t in texts]
    lengths = [len(t.encode()) for t in texts]
    expected = [mix(mix(s + n & MASK) ^ salt) for s, n in zip(sums, lengths, strict=True)]
    assert hash_keys(comparable(pa.array(texts))).tolist() == expected


MANIFESTS = {"root": DatasetManifest, "segment": SegmentManifest, "index": IndexManifest}


@pytest.mark.parametrize("kind", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_format_names_every_manifest_key(text: str, kind: type) -> None:
    keys = kind.__dataclass_fields__
    assert [key for key in keys if f"`{key}`" not in text] == []


SCHEMAS = {
    "blocks": layout.blocks_schema([]),
    "files": layout.FILES_SCHEMA,
    "edges": layout.EDGES_SCHEMA,
    "access": layout.access_schema(),
    "index": layout.index_schema(),
    "rejects": layout.REJECTS_SCHEMA,
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_format_names_every_column_with_its_type(text: str, schema: pa.Schema) -> None:
    plain = text.replace("&lt;", "<").replace("&gt;", ">")
    for field in schema:
        kind = re.sub(r"<\w+: ", "<", str(field.type))
        after = [
            line.split(f"`{field.name}`", 1)[1]
            for line in plain.splitlines()
            if f"`{field.name}`" in line
        ]
        assert any(kind in rest for rest in after), f"{field.name} {kind}"


def test_regions_follow_the_description(tmp_path: Path) -> None:
    write_dataset(tmp_path / "tiny", num_segments=1)
    directory = tmp_path / "tiny" / "segments" / "00000-tiny"
    for entry in pq.read_table(directory / "files.parquet").to_pylist():
        data = (directory / entry["path"]).read_bytes()
        ends = [len(data)]
        if entry["path"].endswith(".parquet"):
            metadata = pq.ParquetFile(directory / entry["path"]).metadata
            chunks = [
                [metadata.row_group(g).column(c) for c in range(metadata.num_columns)]
                for g in range(metadata.num_row_groups)
            ]
            starts = [
                [c.dictionary_page_offset or c.data_page_offset for c in row] for row in chunks
            ]
            sizes = [[c.total_compressed_size for c in row] for row in chunks]
            ends = [
                *(
                    max(a + b for a, b in zip(*pair, strict=True))
                    for pair in zip(starts, sizes, strict=True)
                ),
                len(data),
            ]
        offsets = [0, *ends]
        assert entry["region_offsets"] == offsets
        assert entry["region_crc32"] == [zlib.crc32(data[a:b]) for a, b in pairwise(offsets)]
