"""The benchmark of lookups alone applies the same gradients on both sides."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.train_sides import Timing
from benchmarks.train_variants import draw_gradient, measure_embedding
from schemas.dataset.opened import open_dataset
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, reader_of


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job", dtype="float32", pooling="sum")


def test_gradient_of_a_shared_row_is_the_sum_over_its_samples(job: Path, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    batch = reader_of(job, dataset, find_shared=True).read(0)
    shared = batch.shared
    assert shared is not None
    gradient = draw_gradient(
        shared.shared_features + shared.per_sample_features, batch.num_samples, 8
    )
    rows, own = gradient.pool_shared(shared)
    assert rows.shape == (shared.num_rows, len(shared.shared_features), 8)
    for column, feature in enumerate(shared.shared_features):
        for row in range(shared.num_rows):
            expected = gradient.by_feature[feature][shared.rows.indices == row].sum(0)
            torch.testing.assert_close(rows[row, column], expected)
    assert torch.equal(own.flatten(1), gradient.wide(shared.per_sample_features))


@pytest.mark.slow
def test_both_sides_have_equal_rows_afterwards(job: Path, tmp_path: Path) -> None:
    text = job.read_text().replace("9223372036854775808", "500")  # the peer keeps whole tables
    job.write_text(text)
    dataset = open_dataset(make_dataset(tmp_path / "dataset", job, SEGMENTS))
    found = measure_embedding(dataset, replace(dataset.job.train, epochs=1), Timing(1))
    assert 0 < found["parity"] < 1e-5
    assert found["num_lookups"]["ours"] < found["num_lookups"]["torchrec"]
    assert set(found["milliseconds"]) == {"torchrec", "wide", "dedup"}
