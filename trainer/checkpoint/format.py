"""Files of a checkpoint: named arrays with checksums, and rows of tables in parts."""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    TableLayout,
    chunks_of,
    merge_newest,
)

# ---- Named arrays as bytes, in the format of safetensors files, with checksums ----
#
#     8 bytes, little-endian: length of the header
#     header: JSON, name to {dtype, shape, data_offsets}, padded with spaces to 64 bytes
#     data: the arrays, one after the other, without gaps
#
# `__metadata__` in the header has a CRC-32 of each array and of the header. Checkpoints contain
# such files, and replicas send their state to each other in this format.

Buffer = bytes | bytearray | memoryview
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_METADATA, _CRCS, _HEADER_CRC = "__metadata__", "crc32", "header_crc32"
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Type and shape of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @staticmethod
    def of(array: Array) -> ArraySpec:
        """Return type and shape of an array."""
        return ArraySpec(array.dtype, array.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        """Return both, such as `float32 (3, 4)`."""
        return f"{self.dtype} {self.shape}"


def to_buffers(arrays: Mapping[str, Array]) -> list[Buffer]:
    """Return the bytes of arrays: a header, then a view of each array.

    Args:
        arrays: by name, in this order.

    Raises:
        ValueError: the format has no code for the type of an array.
    """
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = {name: array.reshape(-1).view(np.uint8).data for name, array in whole.items()}
    crcs = {name: zlib.crc32(view) for name, view in data.items()}
    specs = {name: ArraySpec.of(array) for name, array in arrays.items()}
    return [_header(specs, crcs), *data.values()]


def from_bytes(data: Buffer, *, file: str | None = None) -> dict[str, Array]:
    """Return arrays by name, read-only views of `data`.

    Raises:
        SchemaError: a byte is missing, added or changed; the message names the array.

    Example:
        >>> data = b"".join(to_buffers({"a": np.arange(3), "b": np.ones((1, 1))}))
        >>> {name: array.tolist() for name, array in from_bytes(data).items()}
        {'a': [0, 1, 2], 'b': [[1.0]]}
    """
    view = memoryview(data).cast("B")
    end, specs, crcs = _read_header(view, file)
    arrays: dict[str, Array] = {}
    for name, spec in specs.items():
        start, end = end, end + spec.num_bytes
        part = view[start:end]
        if len(part) != spec.num_bytes or zlib.crc32(part) != crcs[name]:
            raise SchemaError(
                f"array {name!r} is damaged: {len(part)} bytes of crc32 {zlib.crc32(part)} instead "
                f"of {spec.num_bytes} of {crcs[name]}; restore it",
                file=file,
            )
        arrays[name] = np.frombuffer(part, spec.dtype).reshape(spec.shape)
        arrays[name].flags.writeable = False
    if len(view) != end:
        raise SchemaError(
            f"arrays have {len(view)} bytes instead of {end}; restore them", file=file
        )
    return arrays


def _header(specs: Mapping[str, ArraySpec], crcs: Mapping[str, int]) -> bytes:
    """Return the header of arrays, and its length."""
    body: dict[str, Any] = {}
    end = 0
    for name, spec in specs.items():
        if spec.dtype not in _CODES or name == _METADATA:
            raise ValueError(
                f"arrays must be of {', '.join(_DTYPES.values())}, got {name}={spec}; convert it"
            )
        start, end = end, end + spec.num_bytes
        body[name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    metadata = {_CRCS: json.dumps({name: int(crcs[name]) for name in specs})}
    text = _to_json(body, metadata)
    text = _to_json(body, {**metadata, _HEADER_CRC: str(zlib.crc32(text))})
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _to_json(body: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    return json.dumps({_METADATA: metadata, **body}, separators=(",", ":")).encode()


def _read_header(
    view: memoryview, file: str | None
) -> tuple[int, dict[str, ArraySpec], dict[str, int]]:
    """Return the start of the data, the arrays, and their checksums.

    A header is intact if it is, byte for byte, the one that is written for its arrays.
    """
    size = int.from_bytes(view[:8], "little")
    raw = bytes(view[: 8 + size]) if size <= _MAX_HEADER_BYTES else b""
    try:
        body: dict[str, Any] = json.loads(raw[8:])
        crcs: dict[str, int] = json.loads(body.pop(_METADATA)[_CRCS])
        specs = {name: _spec(**array) for name, array in body.items()}
        is_intact = _header(specs, crcs) == raw
    except (ValueError, TypeError, KeyError, AttributeError):
        is_intact, specs, crcs = False, {}, {}
    if not is_intact:
        raise SchemaError(
            f"header of arrays is damaged, it starts with {bytes(view[:16])!r}; restore it",
            file=file,
        )
    return 8 + size, specs, crcs


def _spec(dtype: str, shape: list[Any], data_offsets: list[Any]) -> ArraySpec:
    if min(shape, default=0) < 0:
        raise ValueError(f"shape must not be negative, got {shape}")
    return ArraySpec(np.dtype(_DTYPES[dtype]), tuple(int(n) for n in shape))


class NpyFile:
    """An `.npy` file to which rows are appended; their number is written at the end.

    NumPy reserves space in the header for more digits, so its length does not change.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._path = path
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._num_rows = 0
        self._header_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> NpyFile:
        self._file = self._path.open("wb")
        self._write_header(self._file)
        self._header_bytes = self._file.tell()
        return self

    def append(self, rows: Array) -> None:
        """Append rows."""
        assert self._file is not None, "rows are appended inside the context"
        assert rows.shape[1:] == self._shape, "rows have the shape of the file"
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def __exit__(self, *error: object) -> None:
        assert self._file is not None, "the context was entered"
        with self._file as file:
            file.seek(0)
            self._write_header(file)
            assert file.tell() == self._header_bytes, "the header keeps its length"

    def _write_header(self, file: BinaryIO) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(file, header)


# ---- Rows of a table, in one or several parts ----
#
# `rows.npy` has the ids, ascending, and `records.npy` a record of `values` and `state` for each.

ROW_FILES = "rows", "records"
HEADERS = Lock()
"""Held while NumPy parses headers as Python, which fails at times in several threads (CPython
gh-106905)."""


def record_type(layout: TableLayout) -> np.dtype[Any]:
    """Return the type of the entries of `records.npy`."""
    fields = ("values", layout.dim), ("state", layout.state_width)
    return np.dtype([(name, layout.dtype, (width,)) for name, width in fields])


class RowPart:
    """Rows of a table that one checkpoint wrote: a folder, memory-mapped after verification."""

    def __init__(self, folder: Path, *, random: bool = False) -> None:
        with HEADERS:
            self.rows, records = (
                np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ROW_FILES
            )
        if random and isinstance(records, np.memmap):  # an empty array is not mapped
            records._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined] # no other way
        self.dtype = records.dtype
        """The `record_type` of its table."""
        number = self.dtype["values"].base
        block = records.view(number).reshape(len(records), self.dtype.itemsize // number.itemsize)
        self.records = Records(block, self.dtype["values"].shape[0])

    def chunks(self) -> Iterator[RowsAndRecords]:
        """Yield copies of all rows, ascending, in chunks."""
        for part in chunks_of(len(self.rows), self.records.block):
            yield (
                np.array(self.rows[part]),
                Records(np.array(self.records.block[part]), self.records.dim),
            )


def read_parts(folders: Iterable[Path]) -> Iterator[RowsAndRecords]:
    """Yield the rows of all parts of a table, ascending; newer parts come first."""
    return merge_newest([RowPart(folder).chunks() for folder in folders])


def write_part(folder: Path, dtype: np.dtype[Any], chunks: Iterable[RowsAndRecords]) -> int:
    """Write ascending rows, whose records are of a `record_type`; return their number."""
    folder.mkdir(parents=True)
    count = 0
    with (
        NpyFile(folder / "rows.npy", (), np.int64) as rows_file,
        NpyFile(folder / "records.npy", (), dtype) as records_file,
    ):
        for rows, records in chunks:
            rows_file.append(rows)
            records_file.append(np.ascontiguousarray(records.block).view(dtype)[:, 0])
            count += len(rows)
    return count
