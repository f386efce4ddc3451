"""Real logs with known counts: every sample is stored, in the expected number of bytes."""

from collections import Counter
from datetime import datetime
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from pipelines.table.rows import expand
from pipelines.table.verify import verify
from schemas.storage import Location
from tests import real_logs


@pytest.fixture(scope="module")
def mind(shared_data: Path) -> tuple[Path, dict[str, object]]:
    """The MIND dataset, and what its build printed."""
    return real_logs.built("mind", shared_data)


def parse_mind(path: Path) -> Counter[tuple[object, ...]]:
    """Parse behaviors.tsv with nothing of ours."""
    samples: Counter[tuple[object, ...]] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        impression, user, time, history, shown = line.split("\t")
        moment = datetime.strptime(time, "%m/%d/%Y %I:%M:%S %p")
        items = tuple(int(word[1:]) for word in history.split())
        for word in shown.split(" "):
            item, label = word.split("-")
            key = int(impression), int(user[1:]), moment, items, int(item[1:]), int(label)
            samples[key] += 1
    return samples


@pytest.mark.slow
def test_mind_expands_to_an_independent_parse(
    mind: tuple[Path, dict[str, object]], shared_data: Path, tmp_path: Path
) -> None:
    dataset, result = mind
    expand(Location.parse(dataset), Location.parse(tmp_path / "x.parquet"))
    rows = pl.read_parquet(tmp_path / "x.parquet")
    assert rows.columns == ["impression_id", "user_id", "time", "history", "item", "label"]
    actual = Counter((i, u, t, tuple(h), a, c) for i, u, t, h, a, c in rows.iter_rows())
    assert actual == parse_mind(shared_data / "mind" / "behaviors.tsv")
    assert result["num_samples"] == rows.height == 189_359
    assert rows["impression_id"].n_unique() == 5_000
    assert result["num_rejects"] == 0


def test_mind_is_ten_times_smaller_than_its_rows_shuffled(
    mind: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    dataset, result = mind
    expand(Location.parse(dataset), Location.parse(tmp_path / "x.parquet"))
    rows = pl.read_parquet(tmp_path / "x.parquet").sample(fraction=1, shuffle=True, seed=0)
    pq.write_table(
        rows.to_arrow(), tmp_path / "shuffled.parquet", compression="zstd", compression_level=3
    )
    shuffled = (tmp_path / "shuffled.parquet").stat().st_size
    assert isinstance(result["dataset_bytes"], int)
    assert shuffled / result["dataset_bytes"] >= 10


@pytest.mark.slow
def test_mind_verifies(mind: tuple[Path, dict[str, object]]) -> None:
    assert verify(mind[0])["problems"] == []


@pytest.mark.slow
def test_ebnerd_joins_each_impression_with_the_history_before_it(
    shared_data: Path, tmp_path: Path
) -> None:
    dataset, result = real_logs.built("ebnerd", shared_data)
    assert (result["num_samples"], result["num_sessions"], result["num_rejects"]) == (
        10_848, 485, 0)  # fmt: skip
    expand(Location.parse(dataset), Location.parse(tmp_path / "x.parquet"))
    rows = pl.read_parquet(tmp_path / "x.parquet")
    assert rows.columns == [
        "impression_id", "user_id", "session_id", "time", "history", "item", "label"]  # fmt: skip
    histories = {
        r["user_id"]: list(zip(r["article_id_fixed"], r["impression_time_fixed"], strict=True))
        for r in pl.read_parquet(shared_data / "ebnerd_test" / "history.parquet").to_dicts()
    }
    expected: Counter[tuple[object, ...]] = Counter()
    for r in pl.read_parquet(shared_data / "ebnerd_test" / "behaviors.parquet").to_dicts():
        moment, user = r["impression_time"], r["user_id"]
        history = tuple(a for a, t in histories[user] if t < moment)
        for article in r["article_ids_inview"]:
            clicked = int(article in r["article_ids_clicked"])
            key = r["impression_id"], user, r["session_id"], moment, history, article, clicked
            expected[key] += 1
    actual = Counter((*r[:4], tuple(r[4]), *r[5:]) for r in rows.iter_rows())
    assert actual == expected
    assert verify(dataset)["problems"] == []
