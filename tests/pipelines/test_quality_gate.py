"""The quality gate: which segments are refused, the reasons, and the files that remain."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_metadata.proto.v0 import anomalies_pb2, statistics_pb2

from presage.pipelines.build import build
from presage.pipelines.cli import REFUSED, main
from presage.pipelines.quality.column_statistics import (
    Sketch,
    bucket_range,
    column_statistics,
    count_buckets,
    make_sketch,
    sum_columns,
    sum_sketches,
)
from presage.pipelines.quality.gate import _value_shares, infinity_norm, jensen_shannon
from presage.pipelines.quality.segment_statistics import (
    RANKED_VALUES,
    SliceStatistics,
    segment_statistics,
    statistics_text,
)
from presage.pipelines.table.commit import anomalies_text_of
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import ANOMALIES
from tests.pipelines.logs import (
    IN_PROCESS,
    SCHEMA,
    bytes_of,
    copy_of,
    raw_rows,
    request,
    unnamed_places,
    write_job,
)
from tests.shared import error_of, in_pairs

SHARES = st.dictionaries(st.integers(0, 9), st.integers(1, 50), min_size=1).map(
    lambda counts: {k: c / sum(counts.values()) for k, c in counts.items()}
)


@given(SHARES, SHARES)
def test_distances_are_symmetric_bounded_and_zero_for_equals(
    left: dict[int, float], right: dict[int, float]
) -> None:
    for distance in (infinity_norm, jensen_shannon):
        assert distance(left, left) == 0
        assert 0 <= distance(left, right) <= 1
        assert distance(left, right) == pytest.approx(distance(right, left))


def test_jensen_shannon_of_known_distributions() -> None:
    # by hand: half of KL((1/2, 1/2) | (3/4, 1/4)) and KL((1, 0) | (3/4, 1/4)), base 2
    expected = (0.5 * math.log2(0.5 / 0.75) + 0.5 * math.log2(0.5 / 0.25) + math.log2(4 / 3)) / 2
    assert jensen_shannon({0: 0.5, 1: 0.5}, {0: 1.0}) == pytest.approx(expected)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_every_number_lies_in_its_bucket(values: list[float]) -> None:
    for value in values:
        ((bucket, count),) = count_buckets(np.array([value])).items()
        low, high = bucket_range(bucket)
        assert count == 1
        assert low <= value <= high


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 100))
def test_sketches_of_two_halves_add_up_to_that_of_the_whole(values: list[int], cut: int) -> None:
    def sketch(part: list[int]) -> Sketch:
        array = np.array(part, np.int64)
        return make_sketch(array, array)

    assert sum_sketches([sketch(values[:cut]), sketch(values[cut:])]) == sketch(values)
    assert sketch(values).num_unique == len(set(values))


@pytest.mark.parametrize(
    ("num_values", "of_texts"), in_pairs([60_000, 200_000, 500_000], [True, False])
)
def test_frequent_values_are_those_of_the_rows_alone(num_values: int, of_texts: bool) -> None:
    """Whatever period, order, parts and number of rows."""
    rng = np.random.default_rng(0)
    zipf = np.minimum(rng.zipf(1.3, num_values), 10**9)
    for values in (zipf, np.arange(num_values) % 4):
        shares = dict[str, float]()
        for parts in ([values], np.array_split(rng.permutation(values), 7)):
            columns = [pa.array(p).cast(pa.string() if of_texts else pa.int64()) for p in parts]
            column = sum_columns([column_statistics(c) for c in columns])
            rows = SliceStatistics(num_values, {"x": column}, {}, {}, {})
            proto = statistics_pb2.DatasetFeatureStatisticsList()
            text_format.Parse(statistics_text({"segment": rows}, "x"), proto)
            shown = _value_shares(proto.datasets[0].features[0])
            assert shares in ({}, shown)
            shares = shown
        distinct, counts = np.unique(values, return_counts=True)
        assert column.sketch.num_unique == pytest.approx(len(distinct), rel=0.12)
        order = np.lexsort((distinct.astype(str) if of_texts else distinct, -counts))[:100]
        expected = {str(distinct[i]): counts[i] / num_values for i in order}
        assert shares == {k: v for k, v in expected.items() if v >= 0.001}


def write_rows(directory: Path, rows: pa.Table) -> Path:
    """Write raw rows as one file of a log."""
    directory.mkdir(parents=True)
    pq.write_table(rows, directory / "log.parquet")
    return directory


def changed(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return rows with another column."""
    return rows.set_column(rows.column_names.index(name), rows.schema.field(name), values)


def gated(directory: Path, gate: str, schema: str = SCHEMA) -> Path:
    """Write the job with a gate and a schema."""
    job = write_job(directory)
    job.write_text(job.read_text().replace("  block_samples", f"  {gate}\n  block_samples"))
    (directory / "schema.pbtxt").write_text(schema)
    return job


ROWS = raw_rows(300, 0)
NEXT = raw_rows(300, 1)


def with_limit(name: str, limit: str) -> str:
    """Return the schema with a constraint on one column."""
    return SCHEMA.replace(f'name: "{name}"', f'name: "{name}" {limit}')


L_INFTY = "{ infinity_norm { threshold: 0.2 } }"
DIVERGENCE = "{ jensen_shannon_divergence { threshold: 0.2 } }"
NO_USER = pa.nulls(300, pa.int64())
ONE_USER = pa.array([3] * 300)
BAD = pa.array([7] * 30 + NEXT["clicked"].to_pylist()[30:], pa.int8())
CLICKS = pa.array([1] * 300, pa.int8())
ONE_SESSION = pa.array([5] * 300)
LONG = pa.array([[i] * 40 for i in range(300)], pa.list_(pa.int64()))

CASES = {
    "a column that is missing too often": (
        "gate: {}",
        with_limit("user", "presence { min_fraction: 0.5 }"),
        changed(NEXT, "user", NO_USER),
        "feature 'user': must be present in at least 0.5 of its rows, got 0 (",
    ),
    "a column with too few values at all": (
        "gate: {}",
        with_limit("user", "presence { min_count: 10 }"),
        changed(NEXT, "user", NO_USER),
        "feature 'user': must be present in at least 10 rows, got 0",
    ),
    "lists that are too long": (
        "gate: {}",
        SCHEMA.replace("value_count { min: 0 }", "value_count { min: 0 max: 30 }"),
        changed(NEXT, "history", LONG),
        "feature 'history': must have at most 30 values in every row, got 40",
    ),
    "too few distinct values": (
        "gate: {}",
        with_limit("user", "unique_constraints { min: 5 max: 10000 }"),
        changed(NEXT, "user", ONE_USER),
        "feature 'user': must have at least 5 distinct values, got 1",
    ),
    "drift of an id": (
        "gate: {}",
        with_limit("user", f"drift_comparator {L_INFTY}"),
        changed(NEXT, "user", ONE_USER),
        "feature 'user': must have a L-infinity distance of at most 0.2 from the segment before, "
        "got 0.9",
    ),
    "drift of a number": (
        "gate: {}",
        with_limit("num_history", f"drift_comparator {DIVERGENCE}"),
        changed(NEXT, "history", LONG),
        "feature 'num_history': must have a Jensen-Shannon distance of at most 0.2 from the "
        "segment before, got ",
    ),
    "skew of training against evaluation": (
        "gate: {}",
        with_limit("label", f"skew_comparator {DIVERGENCE}"),
        changed(
            NEXT,
            "clicked",
            pa.array((NEXT["time"].cast(pa.int64()).to_numpy() < 1_767_226_080_000_000), pa.int8()),
        ),
        "feature 'label': must have a Jensen-Shannon distance of at most 0.2 from evaluation, "
        "got 1",
    ),
    "too many rejects, with the first rows": (
        "gate: {max_reject_fraction: 0.01}",
        SCHEMA,
        changed(NEXT, "clicked", BAD),
        "  log.parquet:0 {'session': ",
    ),
    "fewer samples": (
        "gate: {}",
        SCHEMA + "dataset_constraints { num_examples_drift_comparator "
        "{ min_fraction_threshold: 0.5 } }",
        NEXT.slice(0, 50),
        "segment: must have at least 0.5 times the samples of the segment before, got 0.",
    ),
    "another label rate": (
        "gate: {label_drift: 0.5}",
        SCHEMA,
        changed(NEXT, "clicked", CLICKS),
        "segment: label rate must change by at most 0.5 of the one before, got 1 after ",
    ),
    "other sessions": (
        "gate: {session_drift: 0.3}",
        SCHEMA,
        changed(NEXT, "session", ONE_SESSION),
        "segment: samples_per_session must have a Jensen-Shannon distance of at most 0.3 from the "
        "segment before, got 1",
    ),
    "another dedup factor": (
        "gate: {dedup_drift: 0.2}",
        SCHEMA,
        changed(NEXT, "session", pa.array(range(300))),
        "segment: dedup factor of user must change by at most 0.2 of the one before, got ",
    ),
}


@pytest.fixture(scope="module")
def dataset(first: Path) -> Path:
    """A dataset of that log, built without a gate; not to be changed."""
    build(request(write_job(first.parent / "job"), first, first.parent / "dataset"))
    return first.parent / "dataset"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log and nothing else; datasets of it are built once per schema."""
    return write_rows(tmp_path_factory.mktemp("first") / "log", ROWS)


def append(job: Path, dataset: Path, log: Path, status: int) -> str:
    """Append a log, and return the errors."""
    words = ["append", str(job), "--dataset", str(dataset), "--input", str(log), IN_PROCESS]
    return error_of(main, words, status)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gate_keeps_a_segment_out_and_says_why(dataset: Path, tmp_path: Path, case: str) -> None:
    gate, schema, rows, message = CASES[case]
    job, target = gated(tmp_path / "job", gate, schema), copy_of(dataset, tmp_path / "dataset")
    log = write_rows(tmp_path / "next", rows)
    printed = append(job, target, log, REFUSED)
    assert "error: segment is refused by the gate: " in printed
    assert message in printed
    refused = next(target.glob(".refused-*"))
    proto = text_format.Parse((refused / ANOMALIES).read_text(), anomalies_pb2.Anomalies())
    infos = [*proto.anomaly_info.values(), proto.dataset_anomaly_info]
    text = "\n".join(reason.description for info in infos for reason in info.reason)
    assert message in text
    left = {k: v for k, v in bytes_of(target).items() if not k.startswith(".refused-")}
    assert left == bytes_of(dataset)
    assert unnamed_places(target) == []


@pytest.mark.slow
def test_gate_that_warns_lets_the_segment_in_and_forgets_the_refusal(
    dataset: Path, tmp_path: Path
) -> None:
    target, log = copy_of(dataset, tmp_path / "dataset"), write_rows(tmp_path / "next", NEXT)
    errors = ""
    for action, status in (("fail", REFUSED), ("warn", 0)):
        job = gated(tmp_path / action, f"gate: {{action: {action}, label_drift: 0.001}}")
        errors = append(job, target, log, status)
    assert "warning: segment: label rate must change by at most 0.001" in errors
    segment = open_dataset(target).segments[1]
    proto = text_format.Parse(anomalies_text_of(segment), anomalies_pb2.Anomalies())
    info = proto.dataset_anomaly_info
    assert info.severity == anomalies_pb2.AnomalyInfo.WARNING
    assert verify(target)["problems"] == []
    assert not list(target.glob(".refused-*"))


@pytest.mark.slow
def test_gate_lets_a_like_segment_pass_and_writes_what_it_measured(
    dataset: Path, tmp_path: Path
) -> None:
    gate = "gate: {max_reject_fraction: 0, session_drift: 0.3, label_drift: 0.5, dedup_drift: 0.3}"
    schema = with_limit(
        "num_history", f"drift_comparator {DIVERGENCE} skew_comparator {DIVERGENCE}"
    )
    job, target = gated(tmp_path / "job", gate, schema), copy_of(dataset, tmp_path / "dataset")
    log = write_rows(tmp_path / "next", NEXT)
    build(request(job, log, target, append=True))
    segment = open_dataset(target).segments[1]
    proto = text_format.Parse(anomalies_text_of(segment), anomalies_pb2.Anomalies())
    assert not proto.anomaly_info
    (info,) = proto.drift_skew_info
    measured = [*info.drift_measurements, *info.skew_measurements]
    assert [m.threshold for m in measured] == [0.2, 0.2]
    assert all(0 < m.value < 0.2 for m in measured)
    assert verify(target)["problems"] == []


@pytest.mark.slow
def test_gate_of_a_first_build_leaves_no_dataset(first: Path, tmp_path: Path) -> None:
    schema = SCHEMA + "dataset_constraints { min_examples_count: 100000 }"
    job, dataset = gated(tmp_path / "job", "gate: {}", schema), tmp_path / "dataset"
    arguments = ["build", str(job), "--input", str(first), "--output", str(dataset)]
    message = "segment: must have at least 100000 samples, got "
    assert message in error_of(main, arguments, REFUSED)
    with pytest.raises(SchemaError, match=r"^there is no dataset: no build was committed in "):
        open_dataset(dataset)
    assert unnamed_places(dataset) == []


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (f"drift_comparator {L_INFTY}", "drift_comparator of feature 'num_history' must be one"),
        ("unique_constraints { min: 1 max: 2 }", "unique_constraints of feature 'num_history' mus"),
    ],
)
def test_limit_that_cannot_be_measured_is_refused_before_the_work(
    first: Path, tmp_path: Path, limit: str, message: str
) -> None:
    job = gated(tmp_path / "job", "gate: {}", with_limit("num_history", limit))
    with pytest.raises(SchemaError, match=f"^{message}"):
        build(request(job, first, tmp_path / "dataset"))


def test_gate_outside_its_range_is_refused(first: Path, tmp_path: Path) -> None:
    job = gated(tmp_path / "job", "gate: {max_reject_fraction: 2}")
    with pytest.raises(SchemaError, match=r"max_reject_fraction must be in \[0, 1\], got 2.0"):
        build(request(job, first, tmp_path / "dataset"))


def test_changed_limits_do_not_make_another_segment(
    first: Path, dataset: Path, tmp_path: Path
) -> None:
    looser = gated(tmp_path / "looser", "gate: {label_drift: 0.5}")
    assert build(request(looser, first, copy_of(dataset, tmp_path / "copy")))["built"] is False


def test_statistics_have_slices_sessions_and_distinct_values(dataset: Path) -> None:
    segment = open_dataset(dataset).segments[0]
    proto = segment_statistics(segment)
    assert [d.name for d in proto.datasets] == ["segment", "train", "evaluation"]
    counts = [d.num_examples for d in proto.datasets]
    assert counts[0] == counts[1] + counts[2] == segment.manifest.num_samples
    features = {f.path.step[0]: f for f in proto.datasets[0].features}
    items = [i for row in ROWS["items"].to_pylist() for i in row]
    custom = {c.name: c for c in features["item"].custom_stats}
    assert custom["unique"].num == len(set(items))
    ranks = custom["rank_histogram"].rank_histogram.buckets
    by_count = sorted((items.count(i) for i in set(items)), reverse=True)
    shown = by_count[: len(ranks)]
    assert len(ranks) == min(RANKED_VALUES, len(by_count))
    assert sum(b.sample_count for b in ranks) == pytest.approx(sum(shown))
    assert ranks[0].sample_count == pytest.approx(max(items.count(i) for i in set(items)))
    session = {c.name: c for c in features["session"].custom_stats}
    assert session["dedup_factor/user"].num == pytest.approx(
        segment.manifest.groups["user"].dedup_factor, rel=1e-6
    )
    histogram = features["num_history"].num_stats.histograms[0]
    assert (
        sum(b.sample_count for b in histogram.buckets)
        == features["num_history"].num_stats.common_stats.num_non_missing
    )
