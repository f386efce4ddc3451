"""Beam coders of Arrow tables and references, registered when this module is imported."""

from __future__ import annotations

import struct

import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry

from pipelines.shuffle import Reference, decode_table, encode_tables

_NUMBERS = struct.Struct(">qq")

SourceRows = tuple[str, pa.Table]
"""Type of raw rows as elements: (source, table)."""


class TableCoder(Coder):
    """Tables as LZ4 Arrow IPC bytes."""

    def encode(self, value: pa.Table) -> bytes:
        """Return a table as bytes."""
        return encode_tables(value)

    def decode(self, encoded: bytes) -> pa.Table:
        """Undo `encode`."""
        return decode_table(encoded)

    def estimate_size(self, value: pa.Table) -> int:
        """Return the bytes of a table in memory."""
        return value.nbytes

    def is_deterministic(self) -> bool:
        """Return False: equal tables with different chunks have different bytes."""
        return False

    def to_type_hint(self) -> type[pa.Table]:
        """Return the encoded type."""
        return pa.Table


registry.register_coder(pa.Table, TableCoder)


class ReferenceCoder(Coder):
    """References as bytes, equal for equal references."""

    def encode(self, value: Reference) -> bytes:
        """Return a reference as bytes."""
        return _NUMBERS.pack(value.batch, value.num_samples) + value.name.encode()

    def decode(self, encoded: bytes) -> Reference:
        """Undo `encode`."""
        batch, num_samples = _NUMBERS.unpack_from(encoded)
        return Reference(encoded[_NUMBERS.size :].decode(), batch, num_samples)

    def is_deterministic(self) -> bool:
        """Return True."""
        return True

    def to_type_hint(self) -> type[Reference]:
        """Return the encoded type."""
        return Reference


registry.register_coder(Reference, ReferenceCoder)
