"""Shipped jobs over joined and windowed logs: KuaiRand and 30Music, compared with plain Polars."""

from pathlib import Path

import polars as pl
import pytest

from pipelines.table.rows import expand
from pipelines.table.verify import verify
from schemas.storage import Location
from tests import real_logs

pytestmark = pytest.mark.slow  # two builds of several seconds

HISTORIES = ["watch_seq", "like_seq", "long_watch_seq"]


def samples_of(name: str, shared_data: Path, directory: Path) -> tuple[dict, pl.DataFrame]:
    """Return what the build of a shipped job printed, and its samples."""
    dataset, result = real_logs.built(name, shared_data)
    assert verify(dataset)["problems"] == []
    expand(Location.parse(dataset), Location.parse(directory / "x.parquet"))
    return result, pl.read_parquet(directory / "x.parquet")


@pytest.fixture(scope="module")
def kuairand(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, pl.DataFrame]:
    """The samples of KuaiRand."""
    return samples_of("kuairand", shared_data, tmp_path_factory.mktemp("kuairand"))


@pytest.fixture(scope="module")
def thirtymusic(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, pl.DataFrame]:
    """The samples of 30Music."""
    return samples_of("thirtymusic", shared_data, tmp_path_factory.mktemp("thirtymusic"))


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


def test_kuairand_expands_to_a_join_by_polars(
    kuairand: tuple[dict, pl.DataFrame], shared_data: Path
) -> None:
    result, samples = kuairand
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


def test_kuairand_keeps_repeated_rows_and_users_without_history(
    kuairand: tuple[dict, pl.DataFrame],
) -> None:
    samples = kuairand[1]
    repeated = samples.height - samples.select(pl.exclude(HISTORIES)).n_unique()
    assert repeated >= 5_460
    assert samples["user_id"].n_unique() == 25_156
    with_history = samples.filter(pl.col("watch_seq").is_not_null())
    assert with_history["user_id"].n_unique() == 24_548
    empty = with_history.filter(pl.col("like_seq").list.len() == 0)
    assert 0 < empty.height < with_history.height


def test_kuairand_shows_no_history_before_it_was_complete(
    kuairand: tuple[dict, pl.DataFrame], shared_data: Path
) -> None:
    histories = pl.read_parquet(shared_data / "kuairand_pure_part" / "user_sequences.parquet")
    joined = kuairand[1].join(histories.select("user_id", "last_time_ms"), on="user_id")
    early = joined.filter(pl.col("time").dt.timestamp("ms") <= pl.col("last_time_ms"))
    assert early.height == 3
    assert early["watch_seq"].null_count() == 3


def test_thirtymusic_history_is_the_plays_before_in_the_session(
    thirtymusic: tuple[dict, pl.DataFrame], shared_data: Path
) -> None:
    result, samples = thirtymusic
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
