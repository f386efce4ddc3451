"""What goes wrong between a trainer and its store processes, beyond bad input."""

from __future__ import annotations

from schemas.errors import SchemaError

REFUSED, MAP, BUSY, BEHIND = "refused", "map", "busy", "behind"
"""Codes that a store sends beside the line that says why."""


class StoreGoneError(Exception):
    """Say that a store process cannot be reached."""


class MapChangedError(Exception):
    """Say that a store does not serve what it was asked for, or no longer knows its caller."""


class BehindError(SchemaError):
    """Say that rows were asked for as they were before steps that others have committed."""


class StoreLostError(SchemaError):
    """Say that acknowledged rows are in no store: the run goes back to its newest checkpoint."""
