"""First values of embedding rows; `schemas/rows.py` has them."""

from __future__ import annotations

from schemas.rows import initial_bound, initial_rows

__all__ = ["initial_bound", "initial_rows"]
