"""The order benchmark trains on the same samples in different orders."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.common.logs import build_dataset
from benchmarks.order import (  # fmt: skip
    BLOCKS,
    BY_TIME,
    CLUSTERED,
    ORDERS,
    SHUFFLED,
    main,
    training_samples,
    write_variant,
)
from presage.pipelines.table.expand import content_hash, expand
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.storage.location import Location
from tests.pipelines import logs
from tests.shared import json_of


@pytest.mark.slow
def test_variants_hold_the_same_samples_in_their_orders(tmp_path: Path) -> None:
    shipped = logs.built(tmp_path)
    expand(Location.parse(shipped), Location.parse(tmp_path / "samples.parquet"))
    job = tmp_path / "job" / "job.yaml"
    found = {}
    for place, order in enumerate(ORDERS):
        folder = tmp_path / str(place)
        write_variant(job, tmp_path / "samples.parquet", order, folder, seed=3)
        dataset = build_dataset(folder / "job.yaml", folder / "log", folder / "dataset")
        found[order] = logs.stored_table(dataset).drop_columns(["order_key"])
        assert training_samples(dataset) == training_samples(shipped)
        assert open_dataset(dataset).job.train.seed == 3
    original = pq.read_table(tmp_path / "samples.parquet")
    assert {str(content_hash([t])) for t in found.values()} == {str(content_hash([original]))}
    assert found[CLUSTERED].equals(original)
    assert found[BLOCKS].equals(original)  # stored alike, read in another order
    assert not found[SHUFFLED].equals(original)
    training = found[BY_TIME].slice(0, training_samples(shipped))["time"].to_pylist()
    assert training == sorted(training)
    orders = {o: open_dataset(tmp_path / str(i) / "dataset").job.data.oracle.order.shuffle
              for i, o in enumerate(ORDERS)}  # fmt: skip
    assert orders == {CLUSTERED: "none", BLOCKS: "blocks", SHUFFLED: "none", BY_TIME: "none"}


@pytest.mark.chaos
def test_order_of_mind_is_measured(shared_data: Path) -> None:
    arguments = ["--json", "--datasets", "mind", "--seeds", "1", "--shared-data", str(shared_data)]
    orders = json_of(main, [*arguments, "--parts", "orders"])["details"]["mind"]["orders"]
    assert len({tuple(o["num_steps"]) for o in orders.values()}) == 1
    assert {n for o in orders.values() for n in o["num_training_samples"]} == {149_984}
    assert all(0.5 < ne < 1.5 for o in orders.values() for ne in o["ne"])
