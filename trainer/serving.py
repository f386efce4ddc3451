"""An exported model that scores: nothing of a run, a dataset or this trainer's models is needed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.model import ModelFile, open_model


class Served:
    """A loaded model; several threads may score with it."""

    def __init__(self, model: ModelFile) -> None:
        """Load the program; `open_model` has refused one that would be unpickled.

        Args:
            model: open file.

        Raises:
            SchemaError: torch cannot load it.
        """
        self.model = model
        try:
            self._program = torch.export.load(io.BytesIO(model.program)).module()
        except (RuntimeError, AssertionError, ValueError, KeyError) as error:
            first = str(error).partition("\n")[0]
            raise SchemaError(
                f"program must be one of torch {torch.__version__}, got {first}; export the run "
                "with the torch that serves it",
                file=str(model.path),
            ) from error

    def logits(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) logits.

        Args:
            samples: with the columns that the model reads, one row per sample; a null list or id
                looks nothing up, a null number is 0.

        Raises:
            SchemaError: a column is missing or does not fit its role.
        """
        inputs = self.model.inputs(samples)
        with torch.no_grad():
            found = self._program({name: torch.from_numpy(a) for name, a in inputs.items()})
        return found.numpy()[: samples.num_rows]

    def score(self, samples: pa.Table | pa.RecordBatch) -> Array:
        """Return (num_samples,) probabilities; see `logits`."""
        return probabilities(self.logits(samples))


def probabilities(logits: Array) -> Array:
    """Return the probability of each logit, float64."""
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def load(path: Path | str) -> Served:
    """Open an exported model, of which every byte is verified.

    Raises:
        SchemaError: it is missing, cut, changed, of another format or another torch.
    """
    return Served(open_model(Path(path)))
