"""An exported model in one file, and the rows that changed between two checkpoints.

A model file is a zip archive with uncompressed members, so that rows are memory-mapped:

    MANIFEST.json              sizes and hashes of the other members; written last
    job.yaml, schema.pbtxt     of the run
    program.pt2                `torch.export`: arrays of `presage.schemas.run.model_inputs` to
                               logits
    dense.safetensors          instead of the program, where no job has the model: parameters and
                               buffers by their name in it
    rows/<table>/rows.npy      (num_rows,) int64, ascending: the trained rows
    rows/<table>/values.npy    (num_rows, dim)

Other rows have their initial values, see `presage.schemas.rows`. The file holds no pickles, and
`check_program` refuses programs that would unpickle or evaluate something when loaded.

A folder of changed rows updates a model to that of a newer checkpoint:

    MANIFEST.json                          hash of the older checkpoint, manifest of the newer model
    program.pt2 or dense.safetensors, job.yaml, schema.pbtxt    of the newer model
    rows/<table>.parquet                   row: int64, ascending; vector: its new values
    dropped/<table>.parquet                row: int64; rows that have their initial values again
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import re
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.arrays import Array, find_sorted, numpy_of
from presage.schemas.dataset.files import replace_bytes, sha256_of
from presage.schemas.dataset.manifest import decode_manifest, encode_manifest
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB, MANIFEST, SCHEMA
from presage.schemas.rows import TORCHREC_SUFFIX, initial_rows
from presage.schemas.run.model_inputs import ModelInputs, build_inputs
from presage.schemas.storage.location import Location, local_copy

# Safe loading of programs. `torch.export.load` unpickles custom objects, example inputs and tensors
# that are not stored as plain bytes, and evaluates symbolic sizes. A program with any of the
# former, or with sizes other than arithmetic of symbols, is refused before it is loaded.

_MEMBERS = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|version|\.data/\w+"
    r"|\.format_version|\.storage_alignment"
    r"|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt)"
)
_NAMES = "Add|Mul|Integer|Max|Min|Eq|Ne|Gt|Ge|Lt|Le|FloorDiv|Mod"
_SYMBOL = r"Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)"
_EXPRESSION = re.compile(rf"(?:{_SYMBOL}|[su]\d+|\d+|{_NAMES}|[-+*/(), <>])*")
_TARGET = re.compile(r"torch\.ops\.aten\.\w+\.\w+|_operator\.\w+|torch\.sym_\w+|math\.\w+")


def check_program(data: bytes, *, file: str) -> None:
    """Raise SchemaError if loading a program would unpickle or evaluate something."""
    try:
        problem = _problem(data)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise SchemaError(
            f"program holds more than plain tensors and torch's own operators: {problem}; export "
            "the run again",
            file=file,
        )


def _problem(data: bytes) -> str | None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if _MEMBERS.fullmatch(info.filename) is None:
                return f"member {info.filename!r}"
            if info.filename.endswith("sample_inputs/model.pt") and info.file_size:
                return "example inputs"
        for name in (n for n in archive.namelist() if n.endswith("_config.json")):
            payloads = json.loads(archive.read(name))["config"].values()
            if any(payload["use_pickle"] is not False for payload in payloads):
                return f"a pickle in {name!r}"
        [graph] = [n for n in archive.namelist() if n.endswith("/models/model.json")]
        return _graph_problem(json.loads(archive.read(graph)))


def _graph_problem(graph: Any) -> str | None:
    for key, value in _pairs(graph):
        if key == "expr_str" and _EXPRESSION.fullmatch(str(value)) is None:
            return f"size {str(value)[:60]!r}"
        if key == "target" and isinstance(value, str) and _TARGET.fullmatch(value) is None:
            return f"operator {value[:60]!r}"
    return None


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield key, inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _pairs(inner)


# The model file.

MODEL_FORMAT = 1
PROGRAM, PARAMETERS = "program.pt2", "dense.safetensors"
TEXTS = (JOB, SCHEMA)
"""Members copied from the run."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 1 << 20
_ADVICE = "export the run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMember:
    """Size and hash of a member."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Origin of a model."""

    run: str
    """Name of the run's folder."""
    train_step: int
    """Trained steps of its checkpoint."""
    checkpoint_sha256: str
    """Hash of the checkpoint's manifest."""
    segments_sha256: tuple[str, ...]
    """Hashes of the manifests of the dataset's segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """Manifest of an exported model."""

    name: str
    model: str
    """`train.model.name` of its job, or `PlannedSlots`."""
    inputs: ModelInputs
    label: str
    """Column of the label; not an input."""
    dim: int
    """Width of a row."""
    seed: int
    """Seed of the initial values of rows."""
    batch_samples: int
    """Samples of a training batch."""
    lineage: Lineage
    parts: Mapping[str, ModelMember]
    """Other members, by name."""
    format: int = MODEL_FORMAT


def rows_paths(table: str) -> tuple[str, str]:
    """Return the names of the members with a table's rows and values."""
    return f"rows/{table}/rows.npy", f"rows/{table}/values.npy"


def write_model(
    path: Location, manifest: ModelManifest, members: Mapping[str, Path | bytes]
) -> None:
    """Write a model file atomically; `parts` of the manifest is computed from the other members."""
    parts: dict[str, ModelMember] = {}
    with path.new_file() as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(members.items()):
            parts[name] = _add(archive, name, content)
        _add(archive, MANIFEST, encode_manifest(replace(manifest, parts=parts)))


def _add(archive: zipfile.ZipFile, name: str, content: Path | bytes) -> ModelMember:
    digest, count = hashlib.sha256(), 0
    source: IO[bytes] = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
    info = zipfile.ZipInfo(name, _EPOCH)
    with source, archive.open(info, "w", force_zip64=True) as target:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            count += target.write(chunk)
    return ModelMember(num_bytes=count, sha256=digest.hexdigest())


class ModelFile:
    """An exported model whose bytes have been verified; see `open_model`."""

    def __init__(
        self, path: Path, manifest: ModelManifest, offsets: Mapping[str, int], copy: ExitStack
    ) -> None:
        self.path, self.manifest = path, manifest
        self._offsets = offsets
        weakref.finalize(self, copy.close)
        self._rows = {t: self.stored_rows(t) for t in manifest.inputs.features_of}
        for _, values in self._rows.values():
            if isinstance(values, np.memmap):  # an empty array is not mapped
                # no read-ahead: neighbouring rows are unrelated
                values._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined] # no other way

    def read(self, name: str) -> bytes:
        """Return the bytes of a member."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[name])
            return file.read(self.manifest.parts[name].num_bytes)

    @property
    def has_program(self) -> bool:
        """Whether the file has a program; otherwise it has the parameters of a user's model."""
        return PROGRAM in self.manifest.parts

    @property
    def program(self) -> bytes:
        """Bytes for `torch.export.load`.

        Raises:
            SchemaError: the model is that of a user's loop.
        """
        if not self.has_program:
            raise SchemaError(
                f"model has no program, since it is of {self.manifest.model}; load "
                f"{PARAMETERS} into your own module, and look rows up with open_model(...).rows_of",
                file=str(self.path),
            )
        return self.read(PROGRAM)

    def stored_rows(self, table: str) -> tuple[NDArray[np.int64], Array]:
        """Return the trained rows of a table, ascending, and their values, memory-mapped."""
        names = rows_paths(table)
        rows, values = (_array(self.path, self._offsets[name]) for name in names)
        if len(rows) != len(values) or values.shape[1:] != (self.manifest.dim,):
            raise SchemaError(
                f"{names[1]} must have {len(rows)} rows of {self.manifest.dim} numbers, got "
                f"{values.shape}; {_ADVICE}",
                file=str(self.path),
            )
        return rows, values

    def rows_of(self, table: str, rows: NDArray[np.int64]) -> Array:
        """Return (num_rows, dim) values of rows; untrained rows have their initial values."""
        manifest, (trained, values) = self.manifest, self._rows[table]
        result = initial_rows(
            rows,
            table=table if self.has_program else f"{table}{TORCHREC_SUFFIX}",
            seed=manifest.seed,
            dim=manifest.dim,
            dtype=manifest.inputs.dtype,
        )
        is_trained, index = find_sorted(trained, rows)
        result[is_trained] = values[index[is_trained]]
        return result

    def inputs(self, samples: pa.Table | pa.RecordBatch) -> dict[str, Array]:
        """Return the inputs of the program for samples; raises as `build_inputs`."""
        return build_inputs(self.manifest.inputs, samples, self.rows_of)


def open_model(source: Path | Location) -> ModelFile:
    """Open an exported model and verify every byte; from a URL, in a temporary copy.

    Raises:
        SchemaError: it is missing, damaged or of another format, or its program is unsafe.
    """
    with ExitStack() as copy:
        path = copy.enter_context(local_copy(source))
        manifest, offsets = _verify_model(path)
        model = ModelFile(path, manifest, offsets, copy.pop_all())
        if model.has_program:
            check_program(model.program, file=str(path))
        return model


def _verify_model(path: Path) -> tuple[ModelManifest, dict[str, int]]:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            data = archive.read(MANIFEST)
            manifest = decode_manifest(ModelManifest, data, path, _ADVICE)
            offsets = {i.filename: _offset(file, i) for i in archive.infolist()}
            stored = all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())
            if not stored or offsets.keys() != {*manifest.parts, MANIFEST}:
                raise SchemaError(
                    f"members of the model do not match its manifest; {_ADVICE}", file=str(path)
                )
            for name, part in manifest.parts.items():
                _check(file, offsets[name], name, part, path)
    except FileNotFoundError as error:
        raise SchemaError(
            "model is missing; create it with python -m presage.trainer export", file=str(path)
        ) from error
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise SchemaError(
            f"model is not a complete archive: {error}; {_ADVICE}", file=str(path)
        ) from error
    return manifest, offsets


def _offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes, after its local header."""
    file.seek(info.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name + extra


def _check(file: IO[bytes], offset: int, name: str, part: ModelMember, path: Path) -> None:
    file.seek(offset)
    digest, left = hashlib.sha256(), part.num_bytes
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    if left or digest.hexdigest() != part.sha256:
        raise SchemaError(
            f"{name} must have sha256 {part.sha256[:12]}, got {digest.hexdigest()[:12]}; {_ADVICE}",
            file=str(path),
        )


def _array(path: Path, offset: int) -> Array:
    with path.open("rb") as file:
        file.seek(offset)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    if not np.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset=start, shape=shape)


# Folders of changed rows.

CHANGES_FORMAT = 1
ROW, VECTOR = "row", "vector"
_CHANGES_HINT = "publish the rows again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesManifest:
    """Manifest of a folder of changed rows."""

    since_step: int
    """Trained steps of the older checkpoint."""
    since_sha256: str
    """Hash of the older checkpoint's manifest."""
    model: ModelManifest
    """Manifest of the newer model; `parts` is empty."""
    files: Mapping[str, str]
    """File to its sha256."""
    num_changed: Mapping[str, int]
    """Number of changed and new rows, by table."""
    num_dropped: Mapping[str, int]
    """Number of dropped rows, by table."""
    format: int = CHANGES_FORMAT


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
    """Yield changed rows, ascending, and their vectors, (num_rows, dim), by row group."""
    with pq.ParquetFile(path) as file:
        groups = map(file.read_row_group, range(file.num_row_groups))
        for batch in chain.from_iterable(group.to_batches() for group in groups):
            vectors = batch[VECTOR]
            flat = numpy_of(vectors.flatten())
            yield numpy_of(batch[ROW]), flat.reshape(batch.num_rows, vectors.type.list_size)


def read_dropped(path: Path) -> NDArray[np.int64]:
    """Return the dropped rows, ascending."""
    return numpy_of(pq.read_table(path)[ROW])


def write_changes_manifest(folder: Path, manifest: ChangesManifest) -> None:
    """Write the manifest, with a checksum of itself, as the last file of the folder."""
    replace_bytes(folder / MANIFEST, encode_manifest(manifest))


def open_changes(folder: Path) -> ChangesManifest:
    """Verify every byte of a folder of changed rows and return its manifest.

    Raises:
        SchemaError: a file is missing or changed, or has another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise SchemaError(f"folder holds no published rows; {_CHANGES_HINT}", file=str(path))
    manifest = decode_manifest(ChangesManifest, path.read_bytes(), path, _CHANGES_HINT)
    for name, sha256 in manifest.files.items():
        actual = sha256_of(folder / name) if (folder / name).is_file() else "none"
        if actual != sha256:
            raise SchemaError(
                f"file must have sha256 {sha256[:12]}, got {actual[:12]}; {_CHANGES_HINT}",
                file=str(folder / name),
            )
    return manifest
