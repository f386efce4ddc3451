"""Export a run's model as one file: its program by torch.export, and the rows of a checkpoint.

The exported module has the parameters of the trained model and computes logits from named tensors
(`schemas/run/model_inputs.py`), as the model does for expanded batches: one bag per sample.
Look-ups are resolved before, so that the program contains tensors only.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.export import Dim, ExportedProgram, export, save
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from presage.schemas.arrays import Array
from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.files import sha256_of
from presage.schemas.errors import SchemaError
from presage.schemas.features import load_features
from presage.schemas.layout import JOB, MANIFEST, SCHEMA
from presage.schemas.run.model_file import (
    PARAMETERS,
    PROGRAM,
    Lineage,
    ModelManifest,
    rows_paths,
    write_model,
)
from presage.schemas.run.model_inputs import (
    DENSE,
    HISTORY,
    MIN_SAMPLES,
    ModelInputs,
    lengths_key,
    positions_key,
    rows_key,
    weights_key,
)
from presage.schemas.run.records import RUN_FILE
from presage.schemas.run.run_manifest import local_run
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.dense_state import load_state
from presage.trainer.checkpoint.files import DENSE_FILE, CheckpointManifest
from presage.trainer.checkpoint.format import NpyFile, to_buffers
from presage.trainer.checkpoint.load import (
    CheckpointTable,
    read_dense,
    require_checkpoint,
    table_rows,
    verify_checkpoint,
)
from presage.trainer.components import build_model, layouts_of, table_specs
from presage.trainer.data.attention_layout import QueryBuckets
from presage.trainer.data.decode import BatchSpec, spec_of_columns
from presage.trainer.embedding.cache import DirectSource
from presage.trainer.embedding.module import Embedding
from presage.trainer.models.attention import AttentionModel, build
from presage.trainer.run.folder import RunIdentity, has_run, read_identity
from presage.trainer.slots.slot_checkpoints import read_model
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.store import TableLayout

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Summary of an export."""

    file: str
    train_step: int
    num_rows: Mapping[str, int]
    """Trained rows by table."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExportedCheckpoint:
    """A verified checkpoint of a run."""

    run: Path
    identity: RunIdentity
    job: Job
    spec: BatchSpec
    layouts: Mapping[str, TableLayout]
    """By table of the job."""
    checkpoint: Path
    manifest: CheckpointManifest

    def rows(self, table: str) -> CheckpointTable:
        """Return the rows of a table."""
        return table_rows(self.checkpoint, self.manifest, self.layouts[table])

    def parts(self, table: str) -> set[str]:
        """Return the folders with rows of a table, below `checkpoints/`."""
        return set(self.manifest.parts.get(self.layouts[table].table, ()))

    @property
    def dim(self) -> int:
        """Width of a row."""
        return next(iter(self.layouts.values())).dim

    @property
    def inputs(self) -> ModelInputs:
        """Inputs of the model."""
        spec, model = self.spec, self.job.train.model
        is_attention = model.name == "attention" and not self.identity.is_of_slots
        history = model.history if is_attention else None
        return ModelInputs(
            dense=spec.dense,
            sparse={f: spec.table_of[f] for f in spec.sparse},
            weighted=spec.weighted,
            tables={t: spec.tables[t] for t in sorted({spec.table_of[f] for f in spec.sparse})},
            history=history,
            max_history=model.max_history,
            dtype=spec.dtype,
        )


def open_checkpoint(run: Path, train_step: int | None = None) -> ExportedCheckpoint:
    """Open a checkpoint of a run, by default the newest, and verify its checksums.

    Raises:
        SchemaError: the run or the checkpoint is missing or damaged.
    """
    if not has_run(run):
        raise SchemaError("found no run; train first", file=str(run))
    if not (run / SCHEMA).is_file():
        raise SchemaError(
            f"run has no {SCHEMA}; continue it with --resume, which copies it from the dataset",
            file=str(run),
        )
    job, features = load_job(run / JOB), load_features(run / SCHEMA)
    if job.train.histories:
        raise SchemaError(
            "run reads train.histories, which exported models cannot; use a run without them",
            file=str(run),
        )
    identity, checkpoint = read_identity(run), require_checkpoint(run, train_step)
    manifest = verify_checkpoint(checkpoint)
    spec = spec_of_columns(features, job.data, job.train.dtype)
    if identity.is_of_slots:
        spec, layouts = _of_slots(spec, identity, manifest)
    else:
        layouts = layouts_of(spec, job.train)
    return ExportedCheckpoint(run, identity, job, spec, layouts, checkpoint, manifest)


def _of_slots(
    spec: BatchSpec, identity: RunIdentity, manifest: CheckpointManifest
) -> tuple[BatchSpec, dict[str, TableLayout]]:
    """Return the columns that a run of `PlannedSlots` reads, and the layouts of its tables."""
    read = {*identity.train["dense"], *identity.train["sparse"]}
    columns = {
        name: tuple(column for column in getattr(spec, name) if column in read)
        for name in ("dense", "sparse", "weighted")
    }
    saved = manifest.fingerprint["tables"]
    tables = {spec.table_of[feature] for feature in columns["sparse"]}
    layouts = {t: TableLayout(**saved[identity.saved_name(t)]) for t in sorted(tables)}
    dtype = next(iter(layouts.values())).dtype
    return replace(spec, **columns, dtype=dtype), layouts


def export_run(
    run: Path | Location, output: Path | Location, train_step: int | None = None
) -> Exported:
    """Write the model of a run to one file.

    Raises:
        SchemaError: the run or the checkpoint is missing or damaged, or the output is a folder.
    """
    target = Location.parse(output)
    if target.local is not None and target.local.is_dir():
        raise SchemaError(f"output is a folder: {output}; name a file in it")
    with (
        local_run(run, (RUN_FILE, JOB, SCHEMA), (train_step,)) as run_folder,
        tempfile.TemporaryDirectory(dir=target.local and target.local.parent) as folder,
    ):
        source = open_checkpoint(run_folder, train_step)
        members: dict[str, Path | bytes] = {**dense_of(source), **texts_of(source)}
        num_rows: dict[str, int] = {}
        for table in source.inputs.features_of:
            paths = [Path(folder) / f"{table}.{n}.npy" for n in ("rows", "values")]
            chunks = ((r, records.values) for r, records in source.rows(table).contents())
            num_rows[table] = write_rows(chunks, paths, source.dim, source.spec.dtype)
            members |= dict(zip(rows_paths(table), paths, strict=True))
        write_model(target, manifest_of(source), members)
    return Exported(
        file=str(output),
        train_step=source.manifest.train_step,
        num_rows=num_rows,
        num_bytes=target.num_bytes() or 0,
    )


def texts_of(source: ExportedCheckpoint) -> dict[str, bytes]:
    """Return the files that are copied from the run, by name."""
    return {name: (source.run / name).read_bytes() for name in (JOB, SCHEMA)}


def manifest_of(source: ExportedCheckpoint) -> ModelManifest:
    """Return the manifest of a model, without its parts."""
    train = source.identity.train
    return ModelManifest(
        name=source.job.name,
        model=train["model"]["name"],
        inputs=source.inputs,
        label=source.spec.label,
        dim=source.dim,
        seed=next(iter(source.layouts.values())).seed,
        batch_samples=train["batch_samples"],
        lineage=Lineage(
            run=source.run.absolute().name,
            train_step=source.manifest.train_step,
            checkpoint_sha256=sha256_of(source.checkpoint / MANIFEST),
            segments_sha256=source.identity.segments,
        ),
        parts={},
    )


def dense_of(source: ExportedCheckpoint) -> dict[str, bytes]:
    """Return the file of a checkpoint's dense part; equal checkpoints give equal bytes.

    It is the exported program, or the parameters of a model that no job has.
    """
    if source.identity.is_of_slots:
        return {PARAMETERS: b"".join(to_buffers(read_model(source.checkpoint)))}
    model = served_model(source.job.train, source.spec)
    arrays = read_dense(source.checkpoint)
    load_state(arrays, model.model, None, file=str(source.checkpoint / DENSE_FILE))
    program = io.BytesIO()
    save(_export(model.eval(), source.inputs, source.job.train.embedding_dim), program)
    return {PROGRAM: program.getvalue()}


def _export(model: ServedModel, inputs: ModelInputs, dim: int) -> ExportedProgram:
    example = _example(inputs, dim)
    sizes: dict[str, dict[int, Any]] = {name: {0: Dim.AUTO} for name in example}
    if HISTORY in sizes:
        sizes[HISTORY][1] = Dim.AUTO
    with torch.no_grad():
        program = export(model, (example,), dynamic_shapes={"inputs": sizes}, strict=False)
    program.example_inputs = None  # they would be saved as a pickle
    for module in program.graph_module.modules():
        for node in cast(Any, module).graph.nodes if hasattr(module, "graph") else ():
            for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(name, None)  # debug information with local paths
    return program


def _example(inputs: ModelInputs, dim: int) -> dict[str, torch.Tensor]:
    """Return arrays of distinct sizes, so that torch does not unify dimensions."""
    sizes = count(MIN_SAMPLES + 1)
    num_samples = next(sizes)
    dtype = getattr(torch, inputs.dtype)
    example = {DENSE: torch.zeros(num_samples, len(inputs.dense), dtype=dtype)}
    for table in inputs.features_of:
        example[rows_key(table)] = torch.zeros(next(sizes), dim, dtype=dtype)
    for feature in inputs.sparse:
        example[lengths_key(feature)] = torch.ones(num_samples, dtype=torch.int64)
        example[positions_key(feature)] = torch.zeros(next(sizes), dtype=torch.int64)
        if feature in inputs.weighted:
            example[weights_key(feature)] = torch.zeros(len(example[positions_key(feature)])).to(
                dtype
            )
    if inputs.history is not None:
        example[HISTORY] = torch.zeros(num_samples, min(3, inputs.max_history)).long()
    return dict(sorted(example.items()))


def write_rows(
    chunks: Iterable[tuple[NDArray[np.int64], Array]], paths: Sequence[Path], dim: int, dtype: str
) -> int:
    """Write ascending rows and their values to two `.npy` files; return the number of rows."""
    num_rows = 0
    with NpyFile(paths[0], (), np.int64) as ids, NpyFile(paths[1], (dim,), dtype) as out:
        for rows, values in chunks:
            ids.append(rows)
            out.append(values)
            num_rows += len(rows)
    return num_rows


# ---- The exported module ----


@dataclass(frozen=True, slots=True)
class ServedLookups:
    """Look-ups as named tensors, in place of a KeyedJaggedTensor.

    Attributes:
        inputs: by the names of `presage.schemas.run.model_inputs`.
    """

    inputs: Tensors

    def stride(self) -> int:
        """Return the number of samples, as a KeyedJaggedTensor does."""
        return self.inputs[DENSE].shape[0]


@dataclass(frozen=True, slots=True)
class ServedVectors:
    """Pooled vectors, in place of a KeyedTensor."""

    vectors: dict[str, torch.Tensor]

    def __getitem__(self, feature: str) -> torch.Tensor:
        """Return the vectors of one feature, (num_samples, dim)."""
        return self.vectors[feature]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the vectors by feature, (num_samples, dim)."""
        return self.vectors


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """The part of an expanded `presage.trainer.data.collate.CollatedBatch` that models read."""

    dense: torch.Tensor
    sparse: ServedLookups


class ServedEmbedding(nn.Module):
    """The embedding interface of models, on rows that are inputs of the program."""

    def __init__(self, spec: BatchSpec, config: TrainConfig) -> None:
        super().__init__()
        self.spec = spec
        self._mean = config.pooling == "mean"
        self._configs = Embedding(
            table_specs(spec), config, DirectSource(memory_store({}))
        ).embedding_bag_configs()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        return self._configs

    def forward(self, sparse: ServedLookups) -> ServedVectors:
        """Pool the rows of each bag."""
        return ServedVectors({f: self._pooled(sparse.inputs, f) for f in self.spec.sparse})

    def _pooled(self, inputs: Tensors, feature: str) -> torch.Tensor:
        """Return (num_samples, dim); the last bag holds the padding and is dropped."""
        rows = inputs[rows_key(self.spec.table_of[feature])]
        positions, lengths = inputs[positions_key(feature)], inputs[lengths_key(feature)]
        if feature in self.spec.weighted:
            # products are rounded before they are summed, as in the trainer's kernels
            weights = inputs[weights_key(feature)].unsqueeze(1)
            rows = rows.index_select(0, positions) * weights
            positions = torch.arange(positions.shape[0])
        starts = F.pad(lengths.cumsum(0), (1, 0))
        bags = F.embedding_bag(positions, rows, starts, mode="sum")[:-1]
        if self._mean:
            bags = bags * (1 / lengths.clamp(min=1).to(bags.dtype)).unsqueeze(1)
        return bags


class ServedAttention(AttentionModel):
    """The attention model with histories as blocks of positions."""

    def read(self, batch: Any, embedding: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return (B, dim); each sample is the only query of its own history."""
        inputs: Tensors = batch.sparse.inputs
        spec: BatchSpec = embedding.spec
        history = inputs[HISTORY]
        num_samples, width = history.shape
        rows = inputs[rows_key(spec.table_of[self.history])]
        lengths = inputs[lengths_key(self.history)]
        columns = torch.arange(width)
        filled = columns < lengths.clamp(max=self.max_history)[:, None]
        vectors = rows.index_select(0, history.flatten()).view(num_samples, width, -1)
        padded = torch.where(filled.unsqueeze(2), vectors, 0.0)
        readable = columns < lengths.clamp(min=1, max=self.max_history)[:, None]
        identity = torch.arange(num_samples)
        buckets = QueryBuckets(identity, (num_samples,), (1,), identity)
        attended = self.attention(targets, self.encoder(padded, readable), readable, buckets)
        return torch.where((lengths == 0)[:, None], self.empty_history, attended)


class ServedModel(nn.Module):
    """Maps the named tensors of a batch to (num_samples,) logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensors) -> torch.Tensor:
        """Return the logits."""
        return self.model(cast(Any, ServedBatch(inputs[DENSE], ServedLookups(inputs))))


def served_model(config: TrainConfig, spec: BatchSpec) -> ServedModel:
    """Return the module to export for a job, with initial parameters."""
    plain = replace(config.model, dedup_compute=False)
    config = replace(config, model=plain, device="cpu")
    embedding = ServedEmbedding(spec, config)
    if config.model.name != "attention":
        return ServedModel(build_model(config, spec, embedding))
    num_dense = len(spec.dense)
    return ServedModel(build(config, spec.sparse, num_dense, embedding, ServedAttention))
