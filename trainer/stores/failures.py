"""What goes wrong between a trainer and its store processes, beyond bad input."""

from __future__ import annotations

from schemas.errors import SchemaError

REFUSED, MAP, BUSY, BEHIND = "refused", "map", "busy", "behind"
"""Codes that a store sends beside the line that says why."""


class StoreGoneError(Exception):
    """Say that a store process cannot be reached, or has not answered in time."""

    def __init__(self, reason: str, address: str = "") -> None:
        """Keep the address of the store."""
        super().__init__(reason)
        self.address = address


class MapChangedError(Exception):
    """Say that a store does not serve what it was asked for, or no longer knows its caller."""


class BehindError(SchemaError):
    """Say that rows were asked for as they were before steps that others have committed."""


class StoreLostError(SchemaError):
    """Say that acknowledged rows are in no store: the run goes back to its newest checkpoint."""
