"""Tables as elements of a Beam pipeline, with a size that is known without encoding them.

Beam samples the sizes of elements, and of the first ones every one; for a type
without a coder it pickles the element to learn its size. That was a sixth of
the time of a build, all of it under Python's lock.
"""

from __future__ import annotations

import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry

from pipelines.beam.ipc import from_bytes, to_bytes

SourceRows = tuple[str, pa.Table]
"""Type of raw rows as elements: (source, table)."""


class TableCoder(Coder):
    """Tables as LZ4 Arrow IPC bytes."""

    def encode(self, value: pa.Table) -> bytes:
        """Return a table as bytes."""
        return to_bytes(value)

    def decode(self, encoded: bytes) -> pa.Table:
        """Undo `encode`."""
        return from_bytes(encoded)

    def estimate_size(self, value: pa.Table) -> int:
        """Return the bytes of a table in memory."""
        return value.nbytes

    def is_deterministic(self) -> bool:
        """Return that equal tables may have other bytes: chunks are kept."""
        return False

    def to_type_hint(self) -> type[pa.Table]:
        """Return what is encoded."""
        return pa.Table


registry.register_coder(pa.Table, TableCoder)
