"""Runs that are exported, and their evaluation split as a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_joined_row_group, row_groups
from presage.schemas.layout import EVALUATION
from presage.trainer.checkpoint.load import load_checkpoint, verify_checkpoint
from presage.trainer.components import uses_shared_features
from tests.trainer.runs import parts_of, reader_of

LAYERS = "bottom_layers: [16], top_layers: [16]"
MODELS = {
    "dlrm": f"{{{LAYERS}}}",
    "dcn": f"{{name: dcn, {LAYERS}, cross_layers: 2, cross_rank: 4}}",
    "deepfm": f"{{name: deepfm, {LAYERS}}}",
    "wide_deep": "{name: wide_deep, top_layers: [16]}",
    "attention": f"{{name: attention, {LAYERS}, history: clicked, target: item, "
    "max_history: 10, num_heads: 2}",
}


def evaluation_table(dataset_path: Path) -> pa.Table:
    """Return the samples of the evaluation split in stored order, one row each."""
    dataset, found = open_dataset(dataset_path), list[pa.Table]()
    for segment in dataset.segments:
        held_back = np.isin(np.arange(len(segment.block_ids)), segment.positions(EVALUATION))
        for part, row_group in row_groups(segment):
            table = read_joined_row_group(segment, part, row_group, dataset.job.data)
            here = (segment.column("file") == part) & (segment.column("row_group") == row_group)
            chosen = np.repeat(held_back[here], segment.column("num_samples")[here])
            found.append(table.filter(pa.array(chosen)))
    return pa.concat_tables(found).combine_chunks()


def evaluation_logits(
    job: Path, dataset: Path, checkpoint: Path, *, expanded: bool
) -> list[np.ndarray]:
    """Return the trainer's own logits of each batch of the evaluation split."""
    parts = parts_of(job, dataset)
    load_checkpoint(checkpoint, verify_checkpoint(checkpoint), parts, with_optimizer=False)
    find_shared = not expanded and uses_shared_features(load_job(job).train)
    reader = reader_of(job, dataset, expanded=expanded, find_shared=find_shared)
    parts.model.eval()
    found: list[np.ndarray] = []
    with torch.no_grad():
        for batch in reader.evaluation_batches():
            parts.embedding.open_copies(batch, parts.store)
            found.append(parts.model(batch).numpy())
    return found
