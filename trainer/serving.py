"""Score samples with an exported model, without its run, dataset or model code."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.model import ModelFile, open_model
from schemas.paths import path_or_url
from schemas.storage import Location


class Served:
    """A loaded model; thread-safe."""

    def __init__(self, model: ModelFile) -> None:
        """Load the program of a model; `open_model` refuses programs with pickles.

        Raises:
            SchemaError: torch cannot load it.
        """
        self.model = model
        try:
            self._program = torch.export.load(io.BytesIO(model.program)).module()
        except (RuntimeError, AssertionError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise SchemaError(
                f"torch {torch.__version__} cannot load the program: {reason}; export the run "
                "with the torch version that serves it",
                file=str(model.path),
            ) from error

    def logits(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) logits.

        Args:
            samples: the columns of the model, one row per sample; a null list or id has no
                look-ups, a null number is 0.

        Raises:
            SchemaError: a column is missing or does not fit its role.
        """
        inputs = self.model.inputs(samples)
        with torch.no_grad():
            logits = self._program({name: torch.from_numpy(a) for name, a in inputs.items()})
        return logits.numpy()[: samples.num_rows]

    def score(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) probabilities; see `logits`."""
        return probabilities(self.logits(samples))


def probabilities(logits: Array) -> Array:
    """Return the probability of each logit, float64."""
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def load(path: Path | Location | str) -> Served:
    """Open an exported model and verify its checksums.

    Raises:
        SchemaError: the file is missing or damaged, or of another format or torch version.
    """
    return Served(open_model(path_or_url(path)))
