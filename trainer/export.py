"""A run's model as one file: its program exported by torch, and the rows of a checkpoint."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import Dim, ExportedProgram, export, save

from schemas.checked import sha256_of
from schemas.errors import SchemaError
from schemas.events import CHECKPOINTS
from schemas.features import load_features
from schemas.jagged import Array
from schemas.job import Job, load_job
from schemas.layout import JOB, MANIFEST, SCHEMA
from schemas.model_file import (
    PROGRAM,
    Lineage,
    ModelManifest,
    rows_paths,
    write_model,
)
from schemas.model_inputs import (
    DENSE,
    FEWEST_SAMPLES,
    HISTORY,
    ModelInputs,
    factors_key,
    lengths_key,
    positions_key,
    rows_key,
)
from trainer.checkpoint import dense_of, newest_checkpoint, verified
from trainer.decode import BatchSpec, spec_of_columns
from trainer.flash.manifest import DENSE as DENSE_FILE
from trainer.flash.manifest import CheckpointManifest, folder_of
from trainer.npy import NpyFile
from trainer.parts import layouts_of
from trainer.run import has_run, read_identity
from trainer.served_model import ServedModel, served_model
from trainer.state import load_state
from trainer.stores.checkpoint_store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported."""

    file: str
    """The model."""
    train_step: int
    """Steps that it was trained."""
    num_rows: Mapping[str, int]
    """Trained rows by table."""
    num_bytes: int
    """Size of the file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of a run, verified, and what it is of."""

    run: Path
    job: Job
    spec: BatchSpec
    checkpoint: Path
    manifest: CheckpointManifest

    def rows(self, table: str) -> CheckpointStore:
        """Return the rows of a table."""
        layout = layouts_of(self.spec, self.job.train)[table]
        parts = self.manifest.parts.get(table, ())
        return CheckpointStore(layout, [self.checkpoint.parent / part for part in parts])

    @property
    def inputs(self) -> ModelInputs:
        """What the model reads."""
        spec, model = self.spec, self.job.train.model
        read = model.history if model.name == "attention" else None
        return ModelInputs(
            dense=spec.dense,
            sparse={f: spec.table_of[f] for f in spec.sparse},
            weighted=spec.weighted,
            tables={t: spec.tables[t] for t in sorted({spec.table_of[f] for f in spec.sparse})},
            history=read,
            max_history=model.max_history,
            dtype=spec.dtype,
        )


def open_source(run: Path, train_step: int | None = None) -> Source:
    """Open a checkpoint of a run; every byte of it is verified.

    Args:
        run: run folder.
        train_step: of the checkpoint; None takes the newest.

    Raises:
        SchemaError: the run or the checkpoint is missing or damaged.
    """
    if not has_run(run):
        raise SchemaError("run must exist, got none; train first", file=str(run))
    if not (run / SCHEMA).is_file():
        raise SchemaError(
            f"run must hold {SCHEMA}, got none; go on with --resume, which copies it from the "
            "dataset",
            file=str(run),
        )
    job, features = load_job(run / JOB), load_features(run / SCHEMA)
    checkpoint = newest_checkpoint(run)
    if train_step is not None:
        checkpoint = run / CHECKPOINTS / folder_of(train_step)
    if checkpoint is None or not (checkpoint / MANIFEST).is_file():
        found = sorted(int(p.parent.name) for p in (run / CHECKPOINTS).glob(f"*/{MANIFEST}"))
        wanted = "a checkpoint" if train_step is None else f"a checkpoint of step {train_step}"
        raise SchemaError(f"run must have {wanted}, got {found}; use one of these", file=str(run))
    spec = spec_of_columns(features, job.data, job.train.dtype)
    return Source(run, job, spec, checkpoint, verified(checkpoint, None))


def export_run(run: Path, output: Path, train_step: int | None = None) -> Exported:
    """Write the model of a run to one file.

    Args:
        run: run folder.
        output: the file.
        train_step: of the checkpoint; None takes the newest.

    Raises:
        SchemaError: the run or the checkpoint is missing or damaged, or the output is a folder.
    """
    if output.is_dir():
        raise SchemaError(f"output must be a file, got folder {output}; name a file in it")
    source = open_source(run, train_step)
    with tempfile.TemporaryDirectory(dir=output.absolute().parent) as folder:
        members: dict[str, Path | bytes] = {PROGRAM: program_of(source), **texts_of(source)}
        num_rows: dict[str, int] = {}
        for table in source.inputs.features_of:
            paths = [Path(folder) / f"{table}.{n}.npy" for n in ("rows", "values")]
            pieces = ((r, records.values) for r, records in source.rows(table).contents())
            dim = source.job.train.embedding_dim
            num_rows[table] = write_rows(pieces, paths, dim, source.spec.dtype)
            members |= dict(zip(rows_paths(table), paths, strict=True))
        write_model(output, manifest_of(source), members)
    return Exported(
        file=str(output),
        train_step=source.manifest.train_step,
        num_rows=num_rows,
        num_bytes=output.stat().st_size,
    )


def texts_of(source: Source) -> dict[str, bytes]:
    """Return what is copied from the run."""
    return {name: (source.run / name).read_bytes() for name in (JOB, SCHEMA)}


def manifest_of(source: Source) -> ModelManifest:
    """Return what a model says of itself, but for its parts."""
    train = source.job.train
    return ModelManifest(
        name=source.job.name,
        model=train.model.name,
        inputs=source.inputs,
        label=source.spec.label,
        dim=train.embedding_dim,
        seed=train.seed,
        batch_samples=train.batch_samples,
        lineage=Lineage(
            run=source.run.absolute().name,
            train_step=source.manifest.train_step,
            checkpoint_sha256=sha256_of(source.checkpoint / MANIFEST),
            segments_sha256=read_identity(source.run).segments,
        ),
        parts={},
    )


def program_of(source: Source) -> bytes:
    """Return the exported program of a checkpoint; equal checkpoints give equal bytes."""
    model = served_model(source.job.train, source.spec)
    arrays = dense_of(source.checkpoint)
    load_state(arrays, model.model, None, file=str(source.checkpoint / DENSE_FILE))
    made = io.BytesIO()
    save(_exported(model.eval(), source.inputs, source.job.train.embedding_dim), made)
    return made.getvalue()


def _exported(model: ServedModel, inputs: ModelInputs, dim: int) -> ExportedProgram:
    example = _example(inputs, dim)
    sizes: dict[str, dict[int, Any]] = {name: {0: Dim.AUTO} for name in example}
    if HISTORY in sizes:
        sizes[HISTORY][1] = Dim.AUTO
    with torch.no_grad():
        program = export(model, (example,), dynamic_shapes={"inputs": sizes}, strict=False)
    program.example_inputs = None  # they would be a pickle
    for module in program.graph_module.modules():
        for node in cast(Any, module).graph.nodes if hasattr(module, "graph") else ():
            for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(name, None)  # paths of this machine, and nothing that computes
    return program


def _example(inputs: ModelInputs, dim: int) -> dict[str, torch.Tensor]:
    """Return arrays of different sizes, so that torch takes no two sizes for one."""
    sizes = count(FEWEST_SAMPLES + 1)
    num_samples = next(sizes)
    dtype = getattr(torch, inputs.dtype)
    found = {DENSE: torch.zeros(num_samples, len(inputs.dense), dtype=dtype)}
    for table in inputs.features_of:
        found[rows_key(table)] = torch.zeros(next(sizes), dim, dtype=dtype)
    for feature in inputs.sparse:
        found[lengths_key(feature)] = torch.ones(num_samples, dtype=torch.int64)
        found[positions_key(feature)] = torch.zeros(next(sizes), dtype=torch.int64)
        if feature in inputs.weighted:
            found[factors_key(feature)] = torch.zeros(len(found[positions_key(feature)])).to(dtype)
    if inputs.history is not None:
        found[HISTORY] = torch.zeros(num_samples, min(3, inputs.max_history)).long()
    return dict(sorted(found.items()))


def write_rows(
    pieces: Iterable[tuple[NDArray[np.int64], Array]], paths: Sequence[Path], dim: int, dtype: str
) -> int:
    """Write ascending rows and their values to two `.npy` files; return how many rows.

    Args:
        pieces: rows and (num_rows, dim) values.
        paths: of the rows and of the values.
        dim: width of a row.
        dtype: of a number.
    """
    number = 0
    with NpyFile(paths[0], (), np.int64) as ids, NpyFile(paths[1], (dim,), dtype) as to:
        for rows, values in pieces:
            ids.append(rows)
            to.append(values)
            number += len(rows)
    return number
