"""The front door: `Dataset`, `DataLoader`, `open_rows`, and one command over all packages."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from presage.dataset import Dataset
    from presage.embedding_rows import open_rows
    from presage.loader import DataLoader
    from presage.planned_slots import PlannedSlots
    from presage.trainer.embedding.planner import planner_constraints

ROOT = Path(__file__).resolve().parents[1]
"""The source tree, or the folder of installed packages."""
if not Path(__file__).with_name("schemas").is_dir():  # in a source tree
    __path__.append(str(ROOT))  # where `presage.schemas` and so on are beside this package

__all__ = ["DataLoader", "Dataset", "PlannedSlots", "open_rows", "planner_constraints"]
_MODULES = {
    "DataLoader": "presage.loader",
    "Dataset": "presage.dataset",
    "PlannedSlots": "presage.planned_slots",
    "open_rows": "presage.embedding_rows",
    "planner_constraints": "presage.trainer.embedding.planner",
}
"""Module of each public name; it is imported when it is first used, since it imports libraries."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
