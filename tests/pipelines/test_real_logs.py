"""Real logs with known counts: every sample is stored, in the expected number of bytes."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from presage.pipelines.table.verify import verify
from tests import real_logs
from tests.pipelines.logs import stored_table

pytestmark = pytest.mark.nightly  # builds of several seconds


def samples_of(name: str, shared_data: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    """Return what the build of a shipped job printed, and its samples."""
    dataset, result = real_logs.built(name, shared_data)
    assert verify(dataset)["problems"] == []
    samples = pl.from_arrow(stored_table(dataset))
    assert isinstance(samples, pl.DataFrame)
    return result, samples


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


def test_mind_expands_to_an_independent_parse(shared_data: Path) -> None:
    result, rows = samples_of("mind", shared_data)
    assert rows.columns == ["impression_id", "user_id", "time", "history", "item", "label"]
    actual = Counter((i, u, t, tuple(h), a, c) for i, u, t, h, a, c in rows.iter_rows())
    assert actual == parse_mind(shared_data / "mind" / "behaviors.tsv")
    assert result["num_samples"] == rows.height == 189_359
    assert rows["impression_id"].n_unique() == 5_000
    assert result["num_rejects"] == 0


def test_mind_is_ten_times_smaller_than_its_rows_shuffled(
    shared_data: Path, tmp_path: Path
) -> None:
    result, samples = samples_of("mind", shared_data)
    rows = samples.sample(fraction=1, shuffle=True, seed=0)
    pq.write_table(
        rows.to_arrow(), tmp_path / "shuffled.parquet", compression="zstd", compression_level=3
    )
    shuffled = (tmp_path / "shuffled.parquet").stat().st_size
    assert isinstance(result["dataset_bytes"], int)
    assert shuffled / result["dataset_bytes"] >= 10


def test_ebnerd_joins_each_impression_with_the_history_before_it(shared_data: Path) -> None:
    result, rows = samples_of("ebnerd", shared_data)
    assert (result["num_samples"], result["num_sessions"], result["num_rejects"]) == (
        10_848, 485, 0)  # fmt: skip
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


HISTORIES = ["watch_seq", "like_seq", "long_watch_seq"]


def raw_kuairand(directory: Path) -> pl.DataFrame:
    """Join the log by Polars alone."""
    log = pl.concat([pl.read_parquet(directory / f"{f}.parquet") for f in ("val", "test")])
    users = pl.read_parquet(directory / "user_features.parquet")
    histories = pl.read_parquet(directory / "user_sequences.parquet")
    joined = log.join(users, on="user_id", how="left").join(histories, on="user_id", how="left")
    known = pl.col("last_time_ms") < pl.col("time_ms")
    onehot = [f"onehot_feat{i}" for i in range(18)]
    return joined.with_columns(
        pl.from_epoch("time_ms", time_unit="ms").cast(pl.Datetime("us")).alias("time"),
        *(pl.when(known).then(pl.col(c)).alias(c) for c in HISTORIES),
        *((pl.col(c) + 1).fill_null(0).cast(pl.Int64) for c in onehot),
    )


def test_kuairand_expands_to_a_join_by_polars(shared_data: Path) -> None:
    result, samples = samples_of("kuairand", shared_data)
    assert (result["num_samples"], result["num_sessions"], result["num_rejects"]) == (
        228_329, 189_039, 0)  # fmt: skip
    raw = raw_kuairand(shared_data / "kuairand_pure_part").select(samples.columns)
    raw = raw.cast(dict(zip(samples.columns, samples.dtypes, strict=True)))
    by = ["user_id", "time", "video_id", "tab", "play_time_ms", "hourmin", "is_like"]
    actual, expected = (
        t.with_columns(pl.concat_str(pl.exclude(HISTORIES), ignore_nulls=True).hash().alias("row"))
        .sort([*by, "row"])
        .drop("row")
        for t in (samples, raw)
    )
    assert actual.equals(expected)


def test_thirtymusic_history_is_the_plays_before_in_the_session(shared_data: Path) -> None:
    result, samples = samples_of("thirtymusic", shared_data)
    assert (result["num_samples"], result["num_sessions"], result["num_rejects"]) == (
        343_183, 37_877, 0)  # fmt: skip
    raw = pl.read_parquet(shared_data / "30music_sample10" / "sessions_sample_10.parquet.snappy")
    expected: list[tuple[object, ...]] = []
    for _, rows in raw.sort("session_id", "ts").group_by("session_id", maintain_order=True):
        plays = rows.rows()
        songs = [song for _, _, song, _, _ in plays]
        expected.extend(
            (s, u, song, ts, playtime, songs[max(0, i - 50) : i], int(i + 1 < len(plays)))
            for i, (s, u, song, ts, playtime) in enumerate(plays)
        )
    columns = ["session_id", "user_id", "song_id", "time", "playtime", "history", "goes_on"]
    assert samples.columns == columns
    actual = samples.with_columns(pl.col("time").dt.timestamp("ms") // 1000).sort(
        "session_id", "time"
    )
    assert actual.rows() == expected
