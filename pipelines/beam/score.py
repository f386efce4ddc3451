"""Score the samples of a dataset with an exported model, on Beam.

Workers import torch (extra `score`) when they load the model (`schemas/run/scoring.py`). Each row
group is read as Arrow and scored on one thread in batches of a fixed size, so that neither runner
nor number of workers change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.utils.shared import Shared

from presage.pipelines.beam.runner import run_pipeline
from presage.schemas.dataset.defaults import missing_column_defaults
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.dataset.opened import (
    OpenDataset,
    Segment,
    open_dataset,
    select_segments,
    select_segments_by_hash,
)
from presage.schemas.dataset.samples import blocks_of_row_group, read_joined_row_group
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVALUATION, MANIFEST, SAMPLE_WEIGHT, TRAIN
from presage.schemas.run.model_file import ModelFile, open_model
from presage.schemas.run.scoring import load_model
from presage.schemas.storage.location import Location

SCORE, SCORES = "score", "scores"
SPLITS = {"all": (TRAIN, EVALUATION), "train": (TRAIN,), "evaluation": (EVALUATION,)}


RowGroup = tuple[str, int, int, int]
"""Name of the output, and indices of segment, part and row group."""


def score(
    model_path: Path | Location,
    dataset_path: Location,
    output: Location,
    *,
    split: str,
    segments: tuple[str, ...] | None,
    beam_args: Sequence[str],
) -> dict[str, Any]:
    """Score the samples of a split, one of `SPLITS`, in some segments, all when None.

    Returns:
        `num_samples`, `num_files`, `output`.

    Raises:
        SchemaError: model and dataset do not match, the output is not empty, or the pipeline
            failed.
    """
    if output.exists():
        raise SchemaError(
            "output has files; name a new or empty directory",
            file=str(output),
        )
    model, dataset = open_model(model_path), open_dataset(dataset_path)
    if segments is not None:
        dataset = select_segments(dataset, segments)
    kept_columns(dataset, model)  # raises if they do not match
    groups = row_groups_of(dataset, split)
    if not groups:
        raise SchemaError(
            f"dataset has no samples of split {split!r}; choose another",
            file=str(dataset_path),
        )
    hashes = tuple(reference.manifest_sha256 for reference in dataset.manifest.segments)
    path = model_path if isinstance(model_path, Location) else model_path.resolve()
    stage = ScoreRowGroups(path, dataset_path, hashes, output)

    def add_transforms(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        files = (
            pipeline
            | "list row groups" >> beam.Create(groups)
            | "spread row groups" >> beam.Reshuffle()
            | "score" >> beam.ParDo(stage, split)
        )
        return {"files": files}

    if output.local is not None:
        output.local.mkdir(parents=True, exist_ok=True)  # fails here, not in a worker
    try:
        outputs = run_pipeline(add_transforms, list(beam_args), output, len(groups))
    except BaseException:
        output.remove_all()  # it was empty
        raise
    files = dict(sorted(outputs["files"]))
    body = {
        "model": asdict(model.manifest.lineage),
        "dataset": hashes,
        "split": split,
        "files": files,
    }
    (output / MANIFEST).write_bytes(canonical_json(body).encode())
    count = sum(entry["num_samples"] for entry in files.values())
    return {"num_samples": count, "num_files": len(files), "output": str(output)}


def kept_columns(dataset: OpenDataset, model: ModelFile) -> tuple[str, ...]:
    """Return the columns that are copied beside the scores, where the dataset has them.

    Raises:
        SchemaError: the dataset lacks a column that the model reads.
    """
    for name in model.manifest.inputs.columns:
        dataset.features[name]  # raises an error that names similar columns
    session, weights = dataset.job.data.session, dataset.features.with_role("weight")
    names = (session.key, session.time, model.manifest.label, SAMPLE_WEIGHT, *weights)
    kept = tuple(dict.fromkeys(n for n in names if n is not None and n in dataset.features))
    if SCORE in kept:
        raise SchemaError(
            f"columns beside the scores must not be named {SCORE!r}, got one in {kept}; rename it"
        )
    return kept


def row_groups_of(dataset: OpenDataset, split: str) -> list[RowGroup]:
    """Return the row groups with samples of a split, in stored order."""
    groups: list[RowGroup] = []
    for number, segment in enumerate(dataset.segments):
        positions = np.concatenate([segment.positions(s) for s in SPLITS[split]])
        columns = [segment.column(c)[positions].tolist() for c in ("file", "row_group")]
        pairs = zip(*columns, strict=True)
        for index, (part, row_group) in enumerate(dict.fromkeys(pairs)):
            name = f"{number:05d}-{index:06d}.parquet"
            groups.append((name, number, part, row_group))
    return groups


def chosen_samples(segment: Segment, part: int, row_group: int, split: str) -> np.ndarray:
    """Return which samples of a row group are of a split, (num_samples,) bool."""
    in_split = np.zeros(len(segment.block_ids), bool)
    for name in SPLITS[split]:
        in_split[segment.positions(name)] = True
    in_group = blocks_of_row_group(segment, part, row_group)
    return np.repeat(in_split[in_group], segment.column("num_samples")[in_group])


class ScoreRowGroups(beam.DoFn):
    """Scores the samples of a split in row groups, and writes one file for each; idempotent."""

    def __init__(
        self, model: Path | Location, dataset: Location, hashes: tuple[str, ...], output: Location
    ) -> None:
        """Store the settings; `hashes` are those of the segments' manifests."""
        self.path, self.dataset_path, self.hashes, self.output = model, dataset, hashes, output
        self._models = Shared()

    def setup(self) -> None:
        """Open the dataset with the launcher's segments, and load the model once per process.

        Raises:
            SchemaError: one of the segments was replaced, or as
                `presage.schemas.run.scoring.load_model`.
        """
        dataset = open_dataset(self.dataset_path)
        try:
            self.dataset = select_segments_by_hash(dataset, self.hashes)
        except SchemaError as error:
            raise SchemaError(
                "a segment was replaced while the dataset was scored; score again",
                file=str(self.dataset_path),
            ) from error
        self.model = self._models.acquire(lambda: load_model(self.path))
        self.model.torch.set_num_threads(1)  # there are as many workers as processors

    def process(self, group: RowGroup, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name, size and hash of the file."""
        name, number, part, row_group = group
        segment, data = self.dataset.segments[number], self.dataset.job.data
        absent = missing_column_defaults(self.dataset, segment)
        table = read_joined_row_group(segment, part, row_group, data, absent)
        table = table.filter(pa.array(chosen_samples(segment, part, row_group, split)))
        manifest = self.model.file.manifest
        samples = table.select(list(manifest.inputs.columns)).combine_chunks()
        starts = range(0, samples.num_rows, manifest.batch_samples)
        batches = (samples.slice(start, manifest.batch_samples) for start in starts)
        scores = np.concatenate([self.model.score(batch) for batch in batches])
        kept = table.select(kept_columns(self.dataset, self.model.file)).combine_chunks()
        with (self.output / SCORES / name).new_file() as partial:
            scored = pa.table({**{n: kept[n] for n in kept.column_names}, SCORE: scores})
            pq.write_table(scored, partial, compression="zstd", write_page_checksum=True)
            digest = sha256_of(partial)
        yield f"{SCORES}/{name}", {"num_samples": table.num_rows, "sha256": digest}
