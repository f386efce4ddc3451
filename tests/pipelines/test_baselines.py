"""Plain Parquet to compare with: the same rows in other orders, and their bytes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.report.sizes import (
    CLUSTERED,
    SHUFFLED,
    TIME_ORDERED,
    flat_bytes,
    flat_rows,
    shuffled,
    time_ordered,
    write_best,
    write_flat,
)
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.samples import column_names
from tests.pipelines.logs import built


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> OpenDataset:
    """A dataset of about 5,000 samples, not to be changed."""
    return open_dataset(built(tmp_path_factory.mktemp("baselines"), num_rows=2000))


@pytest.mark.slow
def test_baselines_hold_the_same_rows_in_other_orders(dataset: OpenDataset, tmp_path: Path) -> None:
    table = flat_rows(dataset).read(column_names(dataset, model_inputs=False))
    orders = {"clustered": table, "shuffled": shuffled(table), "time": time_ordered(table, "time")}
    rows = {name: sorted(map(str, t.to_pylist())) for name, t in orders.items()}
    assert rows["clustered"] == rows["shuffled"] == rows["time"]
    assert not orders["shuffled"].equals(table)
    assert (np.diff(orders["time"]["time"].cast(pa.int64()).to_numpy()) >= 0).all()
    for write in (write_flat, write_best):
        assert write(table, tmp_path / "x.parquet") == (tmp_path / "x.parquet").stat().st_size
        assert pq.read_table(tmp_path / "x.parquet").cast(table.schema).equals(table)


def test_baselines_cluster_better_than_they_shuffle(dataset: OpenDataset) -> None:
    rows = flat_rows(dataset)
    assert rows.share == 1
    found = flat_bytes(rows, dataset.job.data.session.time)
    assert found[CLUSTERED] < found[TIME_ORDERED] < found[SHUFFLED]


def test_flat_rows_beyond_the_limit_are_a_stated_share(dataset: OpenDataset) -> None:
    rows = flat_rows(dataset, max_bytes=1 << 16)
    assert 0 < rows.share < 1
    whole = flat_bytes(flat_rows(dataset), "time")[SHUFFLED]
    assert flat_bytes(rows, "time")[SHUFFLED] == pytest.approx(whole, rel=0.1)
