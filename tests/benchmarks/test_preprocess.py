"""The preprocessing benchmark applies the same transforms to the same values on both sides."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.preprocess import main, measure_dataset, sides
from presage.pipelines.build import build
from presage.pipelines.transforms.apply import apply_transforms
from presage.schemas.config.job import SAMPLES
from presage.schemas.dataset.fitted import load_fitted
from presage.schemas.dataset.opened import open_dataset
from tests.pipelines import transform_jobs as jobs
from tests.pipelines.logs import request
from tests.shared import output_of


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.preprocess.ROUND_SEC", 0.01)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with every kind of transform."""
    directory = tmp_path_factory.mktemp("preprocess")
    log = jobs.write_log(directory / "log", jobs.raw_rows(300, 0))
    build(request(jobs.write_job(directory / "job"), log, directory / "dataset"))
    return directory / "dataset"


@pytest.mark.slow
def test_sides_differ_in_repetition_only(dataset: Path) -> None:
    opened = open_dataset(dataset)
    data = opened.job.data
    ours, peer = sides(opened)
    assert set(ours) == {"user", SAMPLES}
    assert pa.concat_tables(peer["user"]).num_rows > 3 * pa.concat_tables(ours["user"]).num_rows
    assert peer[SAMPLES][0].equals(ours[SAMPLES][0])
    fitted = load_fitted(dataset, opened.segments[0].manifest.fitted, data)
    tables = [
        apply_transforms(pa.concat_tables(side["user"]), "user", data.transforms["user"], fitted)
        for side in (ours, peer)
    ]
    first, second = (sorted(set(map(str, table.to_pylist()))) for table in tables)
    assert first == second


@pytest.mark.slow
def test_measure_counts_each_round_and_group(dataset: Path) -> None:
    found = measure_dataset(open_dataset(dataset), rounds=3)
    assert len(found["rounds"]) == 3
    assert found["groups"]["samples"]["dedup_factor"] == 1
    assert found["groups"]["user"]["dedup_factor"] > 3
    assert found["groups"]["user"]["transforms"] == 11


@pytest.mark.slow
def test_main_prints_one_object(shared_data: Path) -> None:
    arguments = ["--json", "--datasets", "ebnerd", "--rounds", "2", "--shared-data"]
    (line,) = output_of(main, [*arguments, str(shared_data)]).splitlines()
    found = json.loads(line)
    assert {"ours", "peer", "ratio", "spread", "unit", "rounds", "details"} == set(found)
