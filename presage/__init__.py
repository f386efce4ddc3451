"""The front door of Presage: one command over `pipelines`, `trainer` and `scheduler`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from presage.loader import DataLoader

__all__ = ["DataLoader"]
_MODULES = {"DataLoader": "presage.loader"}
"""Module of each public class; it is imported when it is first used, since it imports Torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
