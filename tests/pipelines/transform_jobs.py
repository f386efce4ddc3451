"""A log and a job with every kind of declared transform, for whole builds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

JOB = """
name: shop
data:
  sources:
    log: {files: "*.parquet", format: parquet}
  samples:
    map: >
      SELECT session, time, user, city, age, history, unnest(items) AS item, price, label FROM log
  session: {key: session, time: time}
  split: {evaluation_from: 2026-01-01 00:08:00}
  groups: {user: [session, user, city, age, history]}
  vocabularies:
    items: {columns: [item, recent], num_rows: 60, min_count: 3, oov_rows: 4}
    cities: {columns: [city], num_rows: 60}
  transforms:
    user:
      recent: {last: {column: history, count: 3}}
      oldest: {first: {column: history, count: 2}}
      recent_rows: {vocabulary: {name: items, column: recent}}
      city_row: {vocabulary: {name: cities, column: city}}
      city_id: {hash: {columns: [city], num_rows: 50}}
      city_age: {cross: {columns: [city, age], num_rows: 1000, salt: x}}
      city_recent: {cross: {columns: [city, recent], num_rows: 1000}}
      num_recent: ln(1 + len(recent))
      young: {clip: {column: age, minimum: 20, maximum: 40}}
      age_bucket: {bucketize: {column: age, boundaries: [20, 30, 40]}}
      age_scale: {normalize: {column: young}}
    samples:
      item_row: {vocabulary: {name: items, column: item}}
      price_log: {log: {column: price}}
      price_scale: {normalize: {column: price, by: min_max}}
      price_bucket: {bucketize: {column: price, quantiles: 4}}
      doubled: price_scale * 2
  block_samples: 16
  tables:
    items: {features: [item_row, recent_rows], rows: identity, num_rows: 64}
    cities: {features: [city_row], rows: identity, num_rows: 128}
    city_ids: {features: [city_id], rows: identity, num_rows: 50}
    crosses: {features: [city_age, city_recent], num_rows: 1000}
    ages: {features: [age_bucket], rows: identity, num_rows: 4}
    prices: {features: [price_bucket], rows: identity, num_rows: 4}
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""

SPARSE = ("item_row", "city_row", "city_id", "city_age", "age_bucket", "price_bucket")
LISTS = ("recent_rows", "city_recent")
DENSE = ("num_recent", "age_scale", "price_log", "price_scale", "doubled")
KEPT = {
    "session": "INT", "time": "INT", "user": "INT", "city": "BYTES", "age": "INT", "item": "INT",
    "price": "FLOAT", "young": "INT",
}  # fmt: skip


def schema_text() -> str:
    """Return the schema of the job."""
    template = 'feature {{ name: "{}" type: {} {} annotation {{ tag: "{}" }} }}'
    lines = [template.format("label", "INT", "int_domain { min: 0 max: 1 }", "label")]
    lines += [template.format(n, kind, "", "kept") for n, kind in KEPT.items()]
    lines += [
        template.format(n, "INT", "value_count { min: 0 }", "kept")
        for n in ("history", "recent", "oldest")
    ]
    lines += [template.format(n, "INT", "", "sparse") for n in SPARSE]
    lines += [template.format(n, "INT", "value_count { min: 0 }", "sparse") for n in LISTS]
    lines += [template.format(n, "FLOAT", "", "dense") for n in DENSE]
    return "\n".join(lines) + "\n"


def write_job(directory: Path) -> Path:
    """Write the job and its schema."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.yaml").write_text(JOB)
    (directory / "schema.pbtxt").write_text(schema_text())
    return directory / "job.yaml"


def raw_rows(num_rows: int, seed: int) -> pa.Table:
    """Return raw rows: null cities and lists, skewed items, prices with outliers."""
    rng = np.random.default_rng(seed)
    session = rng.integers(0, max(1, num_rows // 6), num_rows)
    second = np.sort(rng.integers(0, 600, num_rows))
    cities = ["bern", "ulm", "k\u00f6ln", "", None, "oslo", "rome"]
    return pa.table(
        {
            "session": pa.array(session),
            "time": pa.array(1_767_225_600_000_000 + second * 1_000_000, pa.timestamp("us")),
            "user": pa.array(session * 7 + 3),
            "city": pa.array([cities[s % 7] for s in session.tolist()]),
            "age": pa.array([None if s % 11 == 0 else 10 + s % 50 for s in session.tolist()]),
            "history": pa.array(
                [
                    None if s % 13 == 0 else (np.arange(s % 6) * s % 90).tolist()
                    for s in session.tolist()
                ],
                pa.list_(pa.int64()),
            ),
            "items": pa.array(
                [(rng.zipf(1.3, rng.integers(1, 5)) % 500).tolist() for _ in range(num_rows)],
                pa.list_(pa.int64()),
            ),
            "price": pa.array(np.round(np.exp(rng.normal(2, 1, num_rows)), 2)),
            "label": pa.array((rng.random(num_rows) < 0.3).astype(np.int8)),
        }
    )


def write_log(directory: Path, rows: pa.Table, num_files: int = 3) -> Path:
    """Write raw rows as several Parquet files."""
    directory.mkdir(parents=True, exist_ok=True)
    size = -(-rows.num_rows // num_files)
    for index in range(num_files):
        part = rows.slice(index * size, size)
        pq.write_table(part, directory / f"log-{index}.parquet", row_group_size=40)
    return directory
