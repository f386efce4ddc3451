"""Small files that expand without end are refused in one line; logs of equal rows are read."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.sources import limits
from presage.pipelines.sources.avro import avro_columns, copy_avro_rows
from presage.pipelines.sources.avro_blocks import HEADER, MAGIC, decompress, read_header
from presage.pipelines.sources.formats import empty_rows, input_splits, read_split
from presage.pipelines.sources.raw_rows import InputSplit, folder_of
from presage.schemas.config.sources import SourceConfig
from presage.schemas.config.train import ModelConfig, TrainConfig
from presage.schemas.errors import SchemaError
from presage.schemas.features import parse_features

SCHEMA = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "string"}]}


def rows_of(directory: Path, name: str, kind: str) -> tuple[int, list[str]]:
    """Return the number of rows of a file, and the reasons of its rejects."""
    columns = {"a": "int64"} if kind in ("csv", "jsonl") else None
    config = SourceConfig(files="*", format=kind, columns=columns)  # type: ignore[arg-type]
    folder = folder_of(str(directory))
    schema = empty_rows(folder, "log", config, [name]).schema
    count, reasons = 0, list[str]()
    for split in input_splits(folder, InputSplit("log", name, 0), config)[0]:
        for rows in read_split(folder, split, config, schema):
            count += rows.table.num_rows if rows.table is not None else 0
            reasons += [reject.reason for reject in rows.rejects]
    return count, reasons


def texts(kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield texts of which no row ends within the limit, by what they are made of."""
    head = b"a\n" if kind == "csv" else b""
    yield "empty lines", head + b"\n" * (3 << 20)
    yield "one line", head + b"x" * (3 << 20)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("content", ["empty lines", "one line"])
def test_text_without_rows_is_read_up_to_a_limit(
    kind: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BARREN_BYTES", 2 << 20)
    monkeypatch.setattr(limits, "MAX_ROW_BYTES", 1 << 20)
    (tmp_path / "log.gz").write_bytes(gzip.compress(dict(texts(kind))[content]))
    count, reasons = rows_of(tmp_path, "log.gz", kind)
    assert not count
    assert "2 MiB without the end of a row; remove long and empty lines" in reasons[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "avro"])
def test_equal_rows_that_shrink_a_thousandfold_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BARREN_BYTES", 20 << 20)
    num_rows, path = 2_500_000, tmp_path / "log"
    if kind == "parquet":
        pq.write_table(pa.table({"a": np.zeros(num_rows, np.int64)}), path, compression="zstd")
    elif kind == "avro":
        schema = {**SCHEMA, "fields": [{"name": "a", "type": "long"}]}
        num_rows = 100_000
        with path.open("wb") as file:
            fastavro.writer(file, schema, [{"a": 0}] * num_rows, codec="deflate")
    else:
        head, row = (b"a\n", b"1000000\n") if kind == "csv" else (b"", b'{"a": 1}\n')
        path.write_bytes(gzip.compress(head + row * num_rows))
    assert rows_of(tmp_path, "log", kind) == (num_rows, [])


def test_header_after_many_empty_lines_is_found(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\n" * (3 << 20) + b"a\n7\n")
    assert rows_of(tmp_path, "log", "csv") == (1, [])


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": lambda data: data,
    "deflate": lambda data: zlib.compress(data)[2:-4],
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstandard": lambda data: pa.compress(data, "zstd", asbytes=True),
    "snappy": lambda data: (
        pa.compress(data, "snappy", asbytes=True) + zlib.crc32(data).to_bytes(4, "big")
    ),
}


@pytest.mark.parametrize("codec", CODECS)
def test_block_of_avro_expands_to_a_limit(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCK_BYTES", 1 << 20)
    whole = bytes(1 << 20)
    assert decompress(codec, CODECS[codec](whole)) == whole
    with pytest.raises(ValueError, match=r"1 MiB is the limit: write the file with smaller bl"):
        decompress(codec, CODECS[codec](whole + b"0"))


@pytest.mark.slow
def test_large_block_of_avro_is_copied_without_decompression(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        fastavro.writer(file, SCHEMA, [{"a": "x" * limits.MAX_BLOCK_BYTES}], codec="deflate")
    (reason,) = rows_of(tmp_path, "log", "avro")[1]
    assert "64 MiB is the limit" in reason
    config = SourceConfig(files="*", format="avro")
    copy = tmp_path / "copy"
    assert copy_avro_rows(folder_of(str(tmp_path)), "log", config, copy, 9) == (1, True)
    assert copy.read_bytes() == (tmp_path / "log").read_bytes()


def test_cut_block_of_deflate_is_refused() -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = compressor.compress(np.random.default_rng(0).bytes(1000)) + compressor.flush()
    assert len(decompress("deflate", data)) == 1000
    with pytest.raises(ValueError, match="incomplete"):
        decompress("deflate", data[:-10])


def test_values_of_no_bytes_are_refused() -> None:
    empty = {"type": "record", "name": "e", "fields": [{"name": "n", "type": "null"}]}
    for items in ("null", {"type": "fixed", "name": "f", "size": 0}, empty):
        fields = [{"name": "a", "type": {"type": "array", "items": items}}]
        with pytest.raises(ValueError, match=r"^items of 'a' have no bytes"):
            avro_columns({"type": "record", "name": "r", "fields": fields})


@pytest.mark.parametrize(("depth", "count"), [(100, 1), (900, 1), (1, 50_000)])
def test_schema_of_avro_has_limits(depth: int, count: int, tmp_path: Path) -> None:
    kind = '"long"'
    for level in range(depth):
        fields = ",".join(f'{{"name":"f{i}","type":{kind}}}' for i in range(count))
        kind = f'{{"type":"record","name":"r{level}","fields":[{fields}]}}'
    meta = {"avro.schema": kind.encode()}
    with (tmp_path / "log").open("wb") as file:
        fastavro.schemaless_writer(file, HEADER, {"magic": MAGIC, "meta": meta, "sync": bytes(16)})
    message = r"nested at most 64|must have at most 10,000 columns|nested too deeply"
    with (tmp_path / "log").open("rb") as file, pytest.raises(ValueError, match=message):
        read_header(file)


@pytest.mark.slow
def test_schema_of_a_job_has_limits() -> None:
    feature = 'feature { name: "f%d" type: INT annotation { tag: "kept" } }\n'
    for count, what in ((10_001, "features"), (100_000, "characters")):
        text = "".join(feature % number for number in range(count))
        with pytest.raises(SchemaError, match=rf"^schema must have at most [\d,]+ {what}, got "):
            parse_features(text, "schema.pbtxt")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TrainConfig, "embedding_dim", 10**6),
        (TrainConfig, "embedding_dim", 2**40),
        (TrainConfig, "num_threads", 2**40),
        (ModelConfig, "top_layers", (16, 2**40)),
        (ModelConfig, "cross_rank", 2**40),
        (ModelConfig, "cross_layers", 2**40),
    ],
)
def test_widths_of_a_model_have_limits(kind: type, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at most \d+, got \d+; lower it$"):
        kind(**{name: value})
