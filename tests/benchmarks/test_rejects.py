"""The rejects benchmark writes the given share of bad rows, and compares builds by round."""

from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.rejects import STEPS, Measurement, compare, write_job, write_log
from schemas.config.job import load_job


def test_log_has_its_share_of_bad_prices_and_jobs_are_valid(tmp_path: Path) -> None:
    for share in (0.0, 0.1):
        write_log(tmp_path / str(share), 1000, share, seed=1)
        prices = pq.read_table(tmp_path / str(share) / "log.parquet")["price"].to_pylist()
        bad = sum(price.startswith("EUR") for price in prices)
        assert (bad == 0) if share == 0 else (60 < bad < 140)
    for name in STEPS:
        samples = load_job(write_job(tmp_path / name, name)).data.samples
        assert (samples.per is None, samples.map is None) == (name == "map", name == "per")


def test_compare_divides_by_round() -> None:
    def runs(*seconds: float) -> list[Measurement]:
        return [Measurement(wall, wall / 2, 100, 7) for wall in seconds]

    found = compare({0.0: runs(10, 20), 0.01: runs(11, 24)})
    assert found["none_sec"] == 15
    assert (found["0.01"]["wall"], found["0.01"]["rejects"], found["0.01"]["most"]) == (
        1.15,
        7,
        1.2,
    )
    assert found["0.01"]["rounds"] == [0.909, 0.833]
