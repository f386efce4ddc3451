"""Both sides of the train benchmark have the same losses."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.train import Timing, measure_pooled
from presage.schemas.dataset.opened import open_dataset
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS


@pytest.mark.slow
def test_sides_have_equal_losses_and_a_bound(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", dtype="float32", pooling="sum")
    text = job.read_text().replace("9223372036854775808", "500")  # the peer keeps whole tables
    job.write_text(text)
    dataset = open_dataset(make_dataset(tmp_path / "dataset", job, SEGMENTS))
    found = measure_pooled(dataset, replace(dataset.job.train, epochs=1), Timing(1))
    assert found["parity"] < 1e-5
    assert found["bound"] > 0
    assert set(found["milliseconds"]) == {"torchrec", "unchanged", "dedup", "dense"}
