"""First values of embedding rows; `schemas/first_values.py` has them."""

from __future__ import annotations

from schemas.first_values import initial_bound, initial_rows

__all__ = ["initial_bound", "initial_rows"]
