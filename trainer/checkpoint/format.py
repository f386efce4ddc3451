"""Files of a checkpoint: named arrays with checksums, and rows in parts."""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from trainer.checkpoint.manifest import ROW_FILES
from trainer.stores.api import ROWS_PER_CHUNK, Records, TableLayout

# Named arrays as bytes and back: checksummed, without pickle, in the layout of safetensors files.
#
#     8 bytes, little-endian: length of the header
#     header: JSON, name to {dtype, shape, data_offsets}, padded with spaces to 64 bytes
#     data: the arrays, one after the other, each begun at a multiple of 64 bytes where it can be
#
# `__metadata__` of the header holds a CRC-32 of each array and of the header itself. The
# safetensors library reads these bytes, too. Checkpoints, and what a process that joins gets from
# its peer, are such bytes; neither depends on who wrote them.

Buffer = bytes | bytearray | memoryview
_NAMES = {
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
_KINDS = {np.dtype(name): kind for kind, name in _NAMES.items()}
_METADATA, _CRCS, _HEADER_CRC = "__metadata__", "crc32", "header_crc32"
_ALIGNED = 64
_MOST_HEADER = 100 << 20
_ADVICE = "it was cut or changed, get it again"


@dataclass(frozen=True, slots=True)
class Spec:
    """What an array looks like.

    Attributes:
        dtype: of its numbers.
        shape: of it.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        """Return both, as `float32 (3, 4)`."""
        return f"{self.dtype} {self.shape}"


def spec_of_array(array: Array) -> Spec:
    """Return what an array looks like."""
    return Spec(array.dtype, array.shape)


def to_parts(arrays: Mapping[str, Array]) -> list[Buffer]:
    """Return the bytes of arrays in parts: a header, then views of the arrays where they lie.

    Args:
        arrays: by name, in this order.

    Raises:
        ValueError: an array has a type that has no name in the layout.
    """
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = {name: array.reshape(-1).view(np.uint8).data for name, array in whole.items()}
    crcs = {name: zlib.crc32(view) for name, view in data.items()}
    # a number has no axes, and ascontiguousarray gives it one
    return [header_of({n: spec_of_array(a) for n, a in arrays.items()}, crcs), *data.values()]


def to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return the bytes of arrays.

    Example:
        >>> data = to_bytes({"a": np.arange(3), "b": np.ones((1, 1))})
        >>> {name: array.tolist() for name, array in from_bytes(data).items()}
        {'a': [0, 1, 2], 'b': [[1.0]]}
    """
    return b"".join(to_parts(arrays))


def from_bytes(data: Buffer, *, file: str | None = None) -> dict[str, Array]:
    """Return arrays by name, views of `data` that must not be written.

    Args:
        data: what `to_bytes` returned.
        file: where it came from, for errors.

    Raises:
        SchemaError: a byte is missing, too many or another; the message names the array.
    """
    view = memoryview(data).cast("B")
    start, header = _header(view, file)
    crcs = _crcs(header, file)
    arrays: dict[str, Array] = {}
    end = 0
    for name, body in header.items():
        spec, offset = _spec(name, body, end, file)
        end = offset + spec.num_bytes
        part = view[start + offset : start + end]
        if len(part) != spec.num_bytes or zlib.crc32(part) != crcs.get(name):
            raise SchemaError(
                f"array {name!r} must have {spec.num_bytes} bytes of crc32 {crcs.get(name)}, got "
                f"{len(part)} bytes of {zlib.crc32(part)}; {_ADVICE}",
                file=file,
            )
        arrays[name] = np.frombuffer(part, spec.dtype).reshape(spec.shape)
        arrays[name].flags.writeable = False
    if len(view) != start + end:
        raise SchemaError(
            f"arrays must have {start + end} bytes, got {len(view)}; {_ADVICE}", file=file
        )
    return arrays


def header_of(specs: Mapping[str, Spec], crcs: Mapping[str, int]) -> bytes:
    """Return the bytes that stand in front of arrays.

    Args:
        specs: by name, in the order of the data.
        crcs: CRC-32 of each array.

    Raises:
        ValueError: an array has a type that has no name in the layout.
    """
    body: dict[str, Any] = {}
    end = 0
    for name, spec in specs.items():
        if spec.dtype not in _KINDS or name == _METADATA:
            raise ValueError(
                f"arrays must be of {', '.join(_NAMES.values())}, got {name}={spec}; convert it"
            )
        start, end = end, end + spec.num_bytes
        body[name] = {
            "dtype": _KINDS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    metadata = {_CRCS: json.dumps({name: int(crcs[name]) for name in specs})}
    text = _text(body, metadata)
    text = _text(body, {**metadata, _HEADER_CRC: str(zlib.crc32(text))})
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _text(body: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    return json.dumps({_METADATA: metadata, **body}, separators=(",", ":")).encode()


def _header(view: memoryview, file: str | None) -> tuple[int, dict[str, Any]]:
    """Return where the data begins and the header, whose own bytes are as they were written."""
    size = int.from_bytes(view[:8], "little")
    raw = bytes(view[8 : 8 + size]) if size <= _MOST_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(raw)
        metadata = dict(header.pop(_METADATA))
        crc = int(metadata.pop(_HEADER_CRC))
        text = _text(header, {**metadata, _HEADER_CRC: str(crc)})
        intact = zlib.crc32(_text(header, metadata)) == crc and raw.rstrip(b" ") == text
    except (ValueError, TypeError, KeyError, AttributeError):
        intact, header, metadata = False, {}, {}
    if not intact or len(raw) != size:
        raise SchemaError(
            f"arrays must begin with a header that has its checksum, got {bytes(view[:16])!r}; "
            f"{_ADVICE}",
            file=file,
        )
    return 8 + size, {**header, _METADATA: metadata}


def _crcs(header: dict[str, Any], file: str | None) -> dict[str, int]:
    try:
        return {
            str(name): int(crc) for name, crc in json.loads(header.pop(_METADATA)[_CRCS]).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            "arrays must have a checksum each, got none; use bytes of this release", file=file
        ) from error


def _spec(name: str, body: Any, end: int, file: str | None) -> tuple[Spec, int]:
    """Return what an array looks like and where it begins, which is where the last one ended."""
    try:
        shape = tuple(int(n) for n in body["shape"])
        spec = Spec(np.dtype(_NAMES[body["dtype"]]), shape)
        start, stop = body["data_offsets"]
        sound = start == end and stop == start + spec.num_bytes and min(shape, default=0) >= 0
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            f"array {name!r} must have dtype, shape and data_offsets, got {str(body)[:80]}; "
            "use bytes of this release",
            file=file,
        ) from error
    if not sound:
        raise SchemaError(
            f"array {name!r} must follow the one before it, got {str(body)[:80]}; {_ADVICE}",
            file=file,
        )
    return spec, start


class NpyFile:
    """Appends rows; the header, which says how many, is written again at the end.

    numpy leaves room in it for more digits, so its length does not change.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Remember what rows look like; entering the context opens the file.

        Args:
            path: of the file.
            shape: of one row.
            dtype: of its numbers.
        """
        self._path = path
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._num_rows = 0
        self._header_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> NpyFile:
        """Open the file."""
        self._file = self._path.open("wb")
        self._write_header(self._file)
        self._header_bytes = self._file.tell()
        return self

    def append(self, rows: Array) -> None:
        """Write rows behind those that are there."""
        assert self._file is not None, "rows are appended inside the context"
        assert rows.shape[1:] == self._shape, "rows have the shape of the file"
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the number of rows and close."""
        assert self._file is not None, "the context was entered"
        with self._file as file:
            file.seek(0)
            self._write_header(file)
            assert file.tell() == self._header_bytes, "numpy leaves room for the number of rows"

    def _write_header(self, file: BinaryIO) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(file, header)


RowsAndRecords = tuple[NDArray[np.int64], Records]


class RowPart:
    """A part, mapped; its bytes have been verified."""

    def __init__(self, folder: Path, *, random: bool = False) -> None:
        """Map the files.

        Args:
            folder: with one file of each of `ROW_FILES`.
            random: rows are asked for one by one, not in order.
        """
        self.rows, values, state = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ROW_FILES
        )
        for array in (values, state):
            if random and isinstance(array, np.memmap):  # one without numbers is not mapped
                array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined] # no other way
        self.records = Records(values, state)

    def pieces(self) -> Iterator[RowsAndRecords]:
        """Yield all rows, ascending, some at a time."""
        for start in range(0, len(self.rows), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            records = Records(
                np.array(self.records.values[part]), np.array(self.records.state[part])
            )
            yield np.array(self.rows[part]), records


def newest(streams: Sequence[Iterator[RowsAndRecords]]) -> Iterator[RowsAndRecords]:
    """Merge ascending streams of rows; of a row in several the one of the first stream is given.

    In memory is one piece of each stream.

    Example:
        >>> def piece(*pairs):
        ...     rows, values = (np.array(each) for each in zip(*pairs))
        ...     return rows, Records(values[:, None], values[:, None])
        >>> new = iter([piece((1, 10), (4, 40))])
        >>> old = iter([piece((1, -1), (2, 20)), piece((4, -4), (9, 90))])
        >>> [(r.tolist(), v.values[:, 0].tolist()) for r, v in newest([new, old])]
        [([1, 2], [10, 20]), ([4], [40]), ([9], [90])]
    """
    if len(streams) == 1:
        yield from streams[0]
        return
    heads = [(piece, stream) for stream in streams if (piece := _next(stream)) is not None]
    while heads:
        bound = min(int(rows[-1]) for (rows, _), _ in heads)
        taken: list[RowsAndRecords] = []
        left: list[tuple[RowsAndRecords, Iterator[RowsAndRecords]]] = []
        for (rows, records), stream in heads:
            cut = int(np.searchsorted(rows, bound, side="right"))
            taken.append((rows[:cut], _cut(records, slice(0, cut))))
            rest = (rows[cut:], _cut(records, slice(cut, None)))
            following = rest if cut < len(rows) else _next(stream)
            if following is not None:
                left.append((following, stream))
        heads = left
        # the first of equal rows is that of the first stream
        found, first = np.unique(np.concatenate([r for r, _ in taken]), return_index=True)
        values, state = [r.values for _, r in taken], [r.state for _, r in taken]
        yield found, Records(np.concatenate(values)[first], np.concatenate(state)[first])


def write_part(folder: Path, layout: TableLayout, pieces: Iterable[RowsAndRecords]) -> int:
    """Write ascending rows as a part; return how many.

    Args:
        folder: new folder.
        layout: of the table.
        pieces: rows and their records.
    """
    folder.mkdir(parents=True)
    count = 0
    with (
        NpyFile(folder / "rows.npy", (), np.int64) as rows,
        NpyFile(folder / "values.npy", (layout.dim,), layout.dtype) as values,
        NpyFile(folder / "state.npy", (layout.state_width,), layout.dtype) as state,
    ):
        for some_rows, records in pieces:
            rows.append(some_rows)
            values.append(records.values)
            state.append(records.state)
            count += len(some_rows)
    return count


def _next(stream: Iterator[RowsAndRecords]) -> RowsAndRecords | None:
    """Return the next piece that has a row."""
    return next((piece for piece in stream if len(piece[0])), None)


def _cut(records: Records, part: slice) -> Records:
    return Records(records.values[part], records.state[part])
