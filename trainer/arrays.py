"""Named arrays as bytes and back: checksummed, without pickle, in the layout of safetensors files.

    8 bytes, little-endian: length of the header
    header: JSON, name to {dtype, shape, data_offsets}, padded with spaces to 64 bytes
    data: the arrays, one after the other, each begun at a multiple of 64 bytes where it can be

`__metadata__` of the header holds a CRC-32 of each array and of the header itself. The safetensors
library reads these bytes, too. Checkpoints, and what a process that joins gets from its peer, are
such bytes; neither depends on who wrote them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import SchemaError
from schemas.jagged import Array

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
