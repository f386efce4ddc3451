"""Keys of several tables: equal values meet, whatever the width of their types."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.samples.lookups import common_type
from pipelines.table.rows import expand
from schemas.errors import SchemaError
from tests.pipelines.logs import request

START = 1_767_225_600_000_000


def written(directory: Path, job: str, schema: str) -> Path:
    directory.mkdir()
    (directory / "job.yaml").write_text(job)
    (directory / "schema.pbtxt").write_text(schema)
    return directory / "job.yaml"


def test_keys_without_a_common_type_are_refused() -> None:
    assert common_type({"a": pa.int8(), "b": pa.uint32()}, "k") == pa.int64()
    assert common_type({"a": pa.uint8(), "b": pa.uint64()}, "k") == pa.uint64()
    for other in (pa.string(), pa.float64(), pa.uint64()):
        with pytest.raises(
            SchemaError, match=r"^k must have one type in all tables, got int64 in 'a' and "
        ):
            common_type({"a": pa.int64(), "b": other}, "k")


@pytest.mark.slow
def test_negative_keys_of_two_widths_meet_in_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.prepare.PART_INPUT_BYTES", 400)  # many parts
    users = pa.array(range(-30, 10), pa.int32())
    log = {
        "user": users.cast(pa.int64()),
        "time": pa.array([START] * 40, pa.timestamp("us")),
        "label": [1] * 40,
    }
    (tmp_path / "input").mkdir()
    pq.write_table(pa.table(log), tmp_path / "input" / "log.parquet")
    pq.write_table(
        pa.table({"user": users, "age": range(40)}), tmp_path / "input" / "users.parquet"
    )
    job = """
name: keys
data:
  sources:
    log: {files: log.parquet, format: parquet}
    users: {files: users.parquet, format: parquet}
  samples:
    source: log
    per: {key: user, sql: "SELECT user, time, label, age FROM log LEFT JOIN users USING (user)"}
  session: {key: user, time: time}
  tables: {users: {features: [user], num_rows: 100}}
  block_samples: 16
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""
    schema = "\n".join(
        f'feature {{ name: "{name}" type: INT annotation {{ tag: "{tag}" }} }}'
        for name, tag in {
            "user": "sparse",
            "time": "kept",
            "label": "label",
            "age": "dense",
        }.items()
    )
    build(request(written(tmp_path / "job", job, schema), tmp_path / "input", tmp_path / "dataset"))
    expand(tmp_path / "dataset", tmp_path / "x.parquet")
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert {r["user"]: r["age"] for r in rows} == {u: u + 30 for u in range(-30, 10)}
