"""The packages are imported as `presage.schemas` and so on, where pytest goes by their folders."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

PACKAGES = ("pipelines", "scheduler", "schemas", "trainer")


def pytest_collect_file(file_path: Path) -> None:
    """Give pytest, which looks for doctests, the module of a file instead of a second copy."""
    place = file_path.relative_to(Path(__file__).parent) if file_path.suffix == ".py" else Path()
    if place.parts and place.parts[0] in PACKAGES and place.stem != "__main__":
        name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        sys.modules[name] = import_module(f"presage.{name}")
