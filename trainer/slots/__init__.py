"""The planned cache in TorchRec's sharded tables."""

from pathlib import Path

from presage.schemas.processor import module_folder

__path__.append(module_folder(Path(__file__).parent))  # `slot_map`
