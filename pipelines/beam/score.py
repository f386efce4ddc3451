"""Score the samples of a dataset by an exported model, with Beam's RunInference."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from apache_beam.ml.inference.base import ModelHandler, RunInference

from pipelines.atomic_files import atomic_write
from pipelines.beam.runner import run_pipeline
from pipelines.clustering.reader import read_joined_row_group
from schemas.dataset import (
    Dataset,
    Segment,
    missing_column_defaults,
    open_dataset,
    select_segments,
    select_segments_by_hash,
)
from schemas.errors import SchemaError
from schemas.files import sha256_of
from schemas.layout import EVALUATION, MANIFEST, SAMPLE_WEIGHT, TRAIN
from schemas.manifest import canonical_json, replace_bytes
from schemas.model import ModelFile, open_model

# Scores of a dataset's samples by an exported model, with Beam's RunInference.
#
# The only place here that knows torch (extra `score`): the file of the model says everything else
# (`schemas/model.py`). Each row group is read as Arrow and scored as a whole, on one thread, in
# batches that no runner cuts, so that neither runner nor workers change a bit.

SCORE, SCORES = "score", "scores"
SPLITS = {"all": (TRAIN, EVALUATION), "train": (TRAIN,), "evaluation": (EVALUATION,)}
Samples = tuple[str, pa.Table]
"""Name of a row group's output, and its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What is scored, by what, and where to."""

    model: Path
    """File of `python -m trainer export`."""
    dataset: Path
    """Directory of the dataset."""
    output: Path
    """New or empty directory."""
    split: str
    """One of `SPLITS`."""
    segments: tuple[str, ...] | None
    """Ids or days of the segments that are scored; None for all."""
    beam_args: Sequence[str]
    """Beam options."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Loaded:
    """A model as a worker holds it; Beam holds it weakly, for all threads of a process."""

    file: ModelFile
    program: Any

    def logits(self, samples: pa.Table) -> np.ndarray:
        """Return (num_samples,) logits."""
        inputs = {n: torch.from_numpy(a) for n, a in self.file.inputs(samples).items()}
        with torch.no_grad():
            return self.program(inputs).numpy()[: samples.num_rows]


class ExportedModelHandler(ModelHandler[Samples, Samples, Loaded]):
    """Loads an exported model once per process, and scores the tables that it is handed."""

    def __init__(self, path: Path) -> None:
        """Remember the file; each worker opens and verifies it."""
        super().__init__()
        self._path = path

    def load_model(self) -> Loaded:
        """Open the file.

        Raises:
            SchemaError: it is missing, cut or changed, or torch cannot load its program.
        """
        file = open_model(self._path)
        try:
            program = torch.export.load(io.BytesIO(file.program)).module()
        except (RuntimeError, AssertionError, ValueError, KeyError) as error:
            first = str(error).partition("\n")[0]
            raise SchemaError(
                f"program must be one of torch {torch.__version__}, got {first}; export the run "
                "with the torch that scores",
                file=str(self._path),
            ) from error
        return Loaded(file, program)

    def run_inference(
        self, batch: Sequence[Samples], model: Loaded, inference_args: dict[str, Any] | None = None
    ) -> Iterator[Samples]:
        """Yield each table with a column of scores in the place of what the model reads."""
        torch.set_num_threads(1)  # of this worker: there are as many workers as processors
        for name, samples in batch:
            yield name, scored(samples, model)

    def get_num_bytes(self, batch: Sequence[Samples]) -> int:
        """Return the size of tables, for Beam's metrics."""
        return sum(samples.nbytes for _, samples in batch)

    def batch_elements_kwargs(self) -> dict[str, int]:
        """Return that a table is a batch: what goes together may not depend on the runner."""
        return {"min_batch_size": 1, "max_batch_size": 1}


def scored(samples: pa.Table, model: Loaded) -> pa.Table:
    """Return the columns that no model reads, the label, and the score of each sample."""
    size = model.file.manifest.batch_samples
    starts = range(0, samples.num_rows, size)
    logits = np.concatenate([model.logits(samples.slice(start, size)) for start in starts])
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    kept = [n for n in samples.column_names if n.startswith(_KEPT)]
    columns = {n.removeprefix(_KEPT): samples[n] for n in kept}
    return pa.table({**columns, SCORE: scores})


_KEPT = "kept:"
"""Marks copies of columns that go to the output: a model may read the same ones."""


def score(request: ScoreRequest) -> dict[str, Any]:
    """Score a dataset.

    Returns:
        `num_samples`, `num_files`, `output`.

    Raises:
        SchemaError: model or dataset do not fit, the output is not empty, or the pipeline failed.
    """
    output = request.output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SchemaError(
            "output must be a new or empty directory, got one with files; name another",
            file=str(request.output),
        )
    model, dataset = open_model(request.model), open_dataset(request.dataset)
    if request.segments is not None:
        dataset = select_segments(dataset, request.segments)
    columns = kept_columns(dataset, model)
    places = places_of(dataset, request.split)
    if not places:
        raise SchemaError(
            f"dataset must have samples of split {request.split!r}, got none; choose another",
            file=str(request.dataset),
        )
    hashes = tuple(reference.manifest_sha256 for reference in dataset.manifest.segments)
    stage = ReadSamples(request.dataset.resolve(), hashes, columns, model.manifest.inputs.columns)
    handler = ExportedModelHandler(request.model.resolve())

    def make(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        files = (
            pipeline
            | "list row groups" >> beam.Create(places)
            | "spread row groups" >> beam.Reshuffle()
            | "read samples" >> beam.ParDo(stage, request.split)
            | "score" >> RunInference(handler)
            | "write scores" >> beam.ParDo(WriteScores(output))
        )
        return {"files": files}

    output.mkdir(parents=True, exist_ok=True)
    try:
        found = run_pipeline(make, list(request.beam_args), output, len(places))
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)  # it was empty
        raise
    files = {name: entry for name, entry in sorted(found.values["files"])}
    body = {
        "model": asdict(model.manifest.lineage),
        "dataset": hashes,
        "split": request.split,
        "files": files,
    }
    replace_bytes(output / MANIFEST, canonical_json(body).encode())
    count = sum(entry["num_samples"] for entry in files.values())
    return {"num_samples": count, "num_files": len(files), "output": str(request.output)}


def kept_columns(dataset: Dataset, model: ModelFile) -> tuple[str, ...]:
    """Return the columns that stand beside the scores, as far as the dataset has them.

    Raises:
        SchemaError: the dataset lacks a column that the model reads.
    """
    for name in model.manifest.inputs.columns:
        dataset.features[name]  # says which names are near
    session, weights = dataset.job.data.session, dataset.features.with_role("weight")
    wanted = (session.key, session.time, model.manifest.label, SAMPLE_WEIGHT, *weights)
    found = tuple(dict.fromkeys(n for n in wanted if n is not None and n in dataset.features))
    if SCORE in found:
        raise SchemaError(
            f"columns beside the scores must not be named {SCORE!r}, got one in {found}; rename it"
        )
    return found


Place = tuple[str, int, int, int]
"""Name of the output, segment, part and row group."""


def places_of(dataset: Dataset, split: str) -> list[Place]:
    """Return the row groups with samples of a split, in stored order."""
    found: list[Place] = []
    for number, segment in enumerate(dataset.segments):
        positions = np.concatenate([segment.positions(s) for s in SPLITS[split]])
        columns = [segment.column(c)[positions].tolist() for c in ("file", "row_group")]
        pairs = zip(*columns, strict=True)
        for index, (part, row_group) in enumerate(dict.fromkeys(pairs)):
            name = f"{number:05d}-{index:06d}.parquet"
            found.append((name, number, part, row_group))
    return found


def chosen_samples(segment: Segment, part: int, row_group: int, split: str) -> np.ndarray:
    """Return which samples of a row group are of a split, (num_samples,) bool."""
    of_split = np.zeros(len(segment.block_ids), bool)
    for each in SPLITS[split]:
        of_split[segment.positions(each)] = True
    here = (segment.column("file") == part) & (segment.column("row_group") == row_group)
    return np.repeat(of_split[here], segment.column("num_samples")[here])


class ReadSamples(beam.DoFn):
    """From a row group to the samples of a split, with the columns that are needed."""

    def __init__(
        self, path: Path, hashes: tuple[str, ...], kept: Sequence[str], read: Sequence[str]
    ) -> None:
        """Remember what to read: the segments by the hashes of their manifests."""
        self.path, self.hashes, self.kept, self.read = path, hashes, tuple(kept), tuple(read)

    def setup(self) -> None:
        """Open the dataset once per worker, with the launcher's segments: it may have changed.

        Raises:
            SchemaError: one of them was replaced.
        """
        dataset = open_dataset(self.path)
        try:
            self.dataset = select_segments_by_hash(dataset, self.hashes)
        except SchemaError as error:
            raise SchemaError(
                "dataset must keep its segments while it is scored, got one replaced; score again",
                file=str(self.path),
            ) from error

    def process(self, place: Place, split: str) -> Iterator[Samples]:
        """Yield the samples under the name of their output."""
        name, number, part, row_group = place
        segment, data = self.dataset.segments[number], self.dataset.job.data
        absent = missing_column_defaults(self.dataset, segment)
        table = read_joined_row_group(segment, part, row_group, data, absent)
        table = table.filter(pa.array(chosen_samples(segment, part, row_group, split)))
        kept = {f"{_KEPT}{column}": table[column] for column in self.kept}
        yield name, pa.table({**kept, **{c: table[c] for c in self.read}}).combine_chunks()


class WriteScores(beam.DoFn):
    """Writes a file per row group; a retry writes the same bytes."""

    def __init__(self, output: Path) -> None:
        """Remember the directory."""
        self.output = output

    def process(self, element: Samples) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name, size and hash of the file."""
        name, table = element
        path = self.output / SCORES / name
        with atomic_write(path) as partial:
            pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
        yield f"{SCORES}/{name}", {"num_samples": table.num_rows, "sha256": sha256_of(path)}
