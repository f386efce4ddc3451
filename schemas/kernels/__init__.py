"""Compiled loops over flat arrays: `arrays`, `oracle` and `statistics`."""

from pathlib import Path

from presage.schemas.processor import module_folder

__path__.append(module_folder(Path(__file__).parent))
