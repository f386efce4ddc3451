"""What changed between two checkpoints of a run, as published for those who serve its model.

MANIFEST.json              from which model to which: the newer one's manifest, and files
program.pt2, job.yaml, schema.pbtxt     those of the newer model
rows/<table>.parquet       row: int64, vector: its new values; rows ascending
dropped/<table>.parquet    row: int64; these have their first values again
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.checked import sha256_of
from schemas.columns import numpy_of
from schemas.errors import SchemaError
from schemas.jagged import Array
from schemas.layout import MANIFEST
from schemas.manifest import canonical_json, hash_of, replace_bytes

CHANGES_FORMAT = 1
ROW, VECTOR = "row", "vector"
_CHECKSUM = "checksum"
_ADVICE = "publish the rows again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesManifest:
    """What a folder of changed rows holds."""

    since_step: int
    """Steps that were trained before the older checkpoint."""
    since_sha256: str
    """Hash of the older checkpoint's manifest."""
    model: Mapping[str, Any]
    """The manifest of the newer model, but for its parts."""
    files: Mapping[str, str]
    """Every file to its sha256."""
    num_changed: Mapping[str, int]
    """Changed and new rows by table."""
    num_dropped: Mapping[str, int]
    """Dropped rows by table."""
    format: int = CHANGES_FORMAT
    """Version of this format."""


def changed_path(table: str) -> str:
    """Return the file with the changed rows of a table."""
    return f"rows/{table}.parquet"


def dropped_path(table: str) -> str:
    """Return the file with the dropped rows of a table."""
    return f"dropped/{table}.parquet"


def changed_schema(dim: int, dtype: str) -> pa.Schema:
    """Return the columns of changed rows."""
    number = pa.float32() if dtype == "float32" else pa.float64()
    return pa.schema([pa.field(ROW, pa.int64()), pa.field(VECTOR, pa.list_(number, dim))])


def dropped_schema() -> pa.Schema:
    """Return the column of dropped rows."""
    return pa.schema([pa.field(ROW, pa.int64())])


def changed_batch(rows: NDArray[np.int64], values: Array, schema: pa.Schema) -> pa.RecordBatch:
    """Return changed rows as a record batch of `changed_schema`."""
    kind = schema.field(VECTOR).type
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
    return pa.record_batch([pa.array(rows), vectors], schema)


def read_changed(path: Path) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Yield changed rows, ascending, and their vectors, (num_rows, dim)."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            vectors = batch[VECTOR]
            flat = numpy_of(vectors.flatten())
            yield numpy_of(batch[ROW]), flat.reshape(batch.num_rows, vectors.type.list_size)


def read_dropped(path: Path) -> NDArray[np.int64]:
    """Return the dropped rows, ascending."""
    return numpy_of(pq.read_table(path)[ROW])


def write_changes_manifest(folder: Path, manifest: ChangesManifest) -> None:
    """Write the manifest, with a checksum of itself; the folder is complete then."""
    body = json.loads(canonical_json(asdict(manifest)))
    text = canonical_json({**body, _CHECKSUM: hash_of(body)})
    replace_bytes(folder / MANIFEST, text.encode())


def open_changes(folder: Path) -> ChangesManifest:
    """Return the manifest of a folder of which every byte has been verified.

    Raises:
        SchemaError: a file is missing or changed, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        checksum = body.pop(_CHECKSUM)
        manifest = ChangesManifest(**body)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            f"folder must hold published rows, got {type(error).__name__}; {_ADVICE}",
            file=str(path),
        ) from error
    if manifest.format != CHANGES_FORMAT or checksum != hash_of(body):
        raise SchemaError(
            f"manifest must have format {CHANGES_FORMAT} and its checksum, got format "
            f"{manifest.format} and {hash_of(body)[:12]} for {str(checksum)[:12]}; {_ADVICE}",
            file=str(path),
        )
    for name, sha256 in manifest.files.items():
        found = sha256_of(folder / name) if (folder / name).is_file() else "none"
        if found != sha256:
            raise SchemaError(
                f"file must have sha256 {sha256[:12]}, got {found[:12]}; {_ADVICE}",
                file=str(folder / name),
            )
    return manifest
