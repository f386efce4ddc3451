"""Score samples with an exported model, without its run, dataset or model code.

Only this needs torch, which is imported when a model is loaded.
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.paths import path_or_url
from presage.schemas.run.model_file import ModelFile, open_model
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A model in memory; thread-safe."""

    file: ModelFile
    torch: Any
    _program: Any

    def logits(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) logits.

        Args:
            samples: the columns of the model, one row per sample; a null list or id has no
                look-ups, a null number is 0.

        Raises:
            SchemaError: a column is missing or does not fit its role.
        """
        inputs = {n: self.torch.from_numpy(a) for n, a in self.file.inputs(samples).items()}
        with self.torch.no_grad():
            return self._program(inputs).numpy()[: samples.num_rows]

    def score(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) probabilities, float64; see `logits`."""
        return probabilities(self.logits(samples))


def probabilities(logits: Array) -> Array:
    """Return the probability of each logit, float64."""
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def load_model(path: Path | Location | str) -> LoadedModel:
    """Open an exported model and verify its checksums; programs with pickles are refused.

    Raises:
        SchemaError: the file is missing or damaged, of another format, or torch is missing or
            cannot load it.
    """
    file = open_model(path_or_url(path))
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise SchemaError(
            f"extra `score` is not installed: no module {error.name}; use requirements.lock"
        ) from error
    try:
        program = torch.export.load(io.BytesIO(file.program)).module()
    except (RuntimeError, AssertionError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise SchemaError(
            f"torch {torch.__version__} cannot load the program: {reason}; export the run "
            "with this version of torch",
            file=str(file.path),
        ) from error
    return LoadedModel(file, torch, program)
