"""Texts as ids: whatever is built, trained and scored is that of their hashes as whole numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.cli import main as pipelines_main
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_joined_row_group
from presage.schemas.run.model_inputs import ModelInputs, build_inputs
from presage.schemas.run.records import SUMMARY, read_summary
from presage.trainer.__main__ import main as trainer_main
from tests.pipelines.logs import bytes_of
from tests.schemas.reference import hash_text

NUM_ROWS = 1500
JOB = """\
name: texts
data:
  sources:
    log: {files: "*.parquet", format: parquet}
  samples: {map: "SELECT session, time, user, history, tags, item, city, label FROM log"}
  session: {key: session, time: time}
  split: {evaluation_from: 2026-01-01 00:50:00}
  groups: {user: [user, city], clicks: [history]}
  vocabularies:
    cities: {columns: [city], num_rows: 50}
    tags: {columns: [tags], num_rows: 50}
  transforms:
    user: {city_row: {vocabulary: {name: cities, column: city}}}
    clicks: {newest: {last: {column: history, count: 3}}}
    samples: {tag_rows: {vocabulary: {name: tags, column: tags}}}
  tables:
    items: {features: [item, history, newest], num_rows: 3000}
    users: {features: [user], num_rows: 9223372036854775808}
    cities: {features: [city_row], num_rows: 50, rows: identity}
    tags: {features: [tag_rows], num_rows: 50, rows: identity}
  block_samples: 32
  oracle: {batch_samples: 64}
train:
  model: {top_layers: [16]}
  embedding_dim: 8
  batch_samples: 64
  cache: {lookahead: 3, rows: 2000}
"""
COLUMNS = {
    "session": ("BYTES", "kept", False),
    "time": ("INT", "kept", False),
    "user": ("BYTES", "sparse", False),
    "history": ("BYTES", "sparse", True),
    "newest": ("BYTES", "sparse", True),
    "tags": ("BYTES", "kept", True),
    "item": ("BYTES", "sparse", False),
    "city": ("BYTES", "kept", False),
    "city_row": ("INT", "sparse", False),
    "tag_rows": ("INT", "sparse", True),
    "label": ("INT", "label", False),
}
HASHED = ("user", "history", "newest", "item")


def raw_rows() -> pa.Table:
    """A log of texts: nulls, empty ones and lists, letters of several bytes, shifting histories."""
    rng = np.random.default_rng(5)
    rows: list[dict[str, object]] = []
    histories: dict[int, list[str]] = {}
    for second in range(NUM_ROWS):
        session = int(rng.integers(0, 120))
        item = f"N{rng.zipf(1.3) % 2000}" if second % 29 else ("" if second % 2 else None)
        history = histories.setdefault(
            session, [f"K\N{LATIN SMALL LETTER O WITH DIAERESIS}ln-{session}"]
        )
        rows.append(
            {
                "session": f"s{session}",
                "time": 1_767_225_600_000_000 + second * 2_500_000,
                "user": None if session % 11 == 0 else f"user-{session % 70}@example.org",
                "history": None if session % 13 == 0 else history[-12:],
                "tags": [f"tag{t}" for t in rng.integers(0, 30, rng.integers(0, 4))],
                "item": item,
                "city": ["Bern", "Ulm", "", None, "\N{SNOWMAN}"][session % 5],
                "label": int(rng.random() < 0.3),
            }
        )
        if item is not None and rng.random() < 0.5:
            histories[session] = [*history, item]
    kinds = {"time": pa.timestamp("us"), "history": pa.list_(pa.string())}
    kinds["tags"] = pa.list_(pa.string())
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return pa.table({n: pa.array(v, kinds.get(n)) for n, v in columns.items()})


def hashed(value: object) -> object:
    """The ids that texts stand for, by the slow way."""
    if isinstance(value, list):
        return [hashed(v) for v in value]
    return hash_text(value) if isinstance(value, str) else None


def built(folder: Path, rows: pa.Table, types: dict[str, str]) -> Path:
    """Write log, job and schema below a folder, and build the dataset."""
    (folder / "log").mkdir(parents=True)
    pq.write_table(rows, folder / "log" / "log.parquet")
    (folder / "job.yaml").write_text(JOB)
    lines = [
        f'feature {{ name: "{name}" type: {types.get(name, kind)} annotation {{ tag: "{role}" }} '
        f"{'value_count { min: 0 } ' if is_list else ''}}}\n"
        for name, (kind, role, is_list) in COLUMNS.items()
    ]
    (folder / "schema.pbtxt").write_text("".join(lines))
    paths = ["--input", str(folder / "log"), "--output", str(folder / "dataset")]
    assert pipelines_main(["build", str(folder / "job.yaml"), *paths, "--runner=InProcess"]) == 0
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job whose ids are texts."""
    return built(tmp_path_factory.mktemp("texts"), raw_rows(), {})


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same job whose ids are the hashes of the texts."""
    rows = raw_rows()
    for name in ("user", "history", "item"):
        ids = [hashed(value) for value in rows[name].to_pylist()]
        kind = pa.list_(pa.int64()) if name == "history" else pa.int64()
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(ids, kind))
    return built(tmp_path_factory.mktemp("numbers"), rows, dict.fromkeys(HASHED, "INT"))


@pytest.mark.slow
def test_oracle_of_texts_has_the_bytes_of_that_of_their_hashes(texts: Path, numbers: Path) -> None:
    one, other = (open_dataset(folder / "dataset") for folder in (texts, numbers))
    opened = [[*d.segments, *d.open_index(d.manifest.indexes[0]).parts] for d in (one, other)]
    for mine, theirs in zip(*opened, strict=True):
        found, expected = bytes_of(mine.directory), bytes_of(theirs.directory)
        names = [n for n in expected if n.startswith(("access/", "edges/", "items/", "users/"))]
        assert len(names) >= 2
        assert [n for n in names if found[n] != expected[n]] == []


def test_expand_gives_back_the_rows_of_texts(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    assert pipelines_main(["expand", str(texts / "dataset"), "--output", str(output)]) == 0
    found, expected = pq.read_table(output), raw_rows()
    assert found.schema.field("history").type == pa.large_list(pa.string())
    assert found.num_rows == NUM_ROWS
    order = [("time", "ascending")]
    found, expected = found.sort_by(order), expected.sort_by(order)
    assert found.to_pylist() == expected.select(found.column_names).to_pylist()
    assert pipelines_main(["verify", str(texts / "dataset")]) == 0


def losses(folder: Path, run: Path, *options: str) -> list[float]:
    """Train, and return the loss of each step."""
    paths = ["--dataset", str(folder / "dataset"), "--output", str(run)]
    assert trainer_main(["train", str(folder / "job.yaml"), *paths, *options]) == 0
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(numbers: Path) -> Path:
    """A folder with a run on the hashes."""
    losses(numbers, numbers / "run")
    return numbers


@pytest.mark.parametrize("embedding", ["plain", "cached", "lru", "uncached"])
def test_training_on_texts_has_the_bits_of_training_on_their_hashes(
    embedding: str, texts: Path, runs: Path, tmp_path: Path
) -> None:
    found = losses(texts, tmp_path / "run", "--embedding", embedding)
    lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(found) > 15
    assert found == [json.loads(line)["loss"] for line in lines]
    assert trainer_main(["diff", str(tmp_path / "run"), str(runs / "run")]) == 0
    one, other = (read_summary(path / "run" / SUMMARY) for path in (tmp_path, runs))
    assert one.ne is not None
    assert (one.ne, one.auc) == (other.ne, other.auc)


def test_exported_models_read_texts_as_their_hashes(texts: Path, numbers: Path) -> None:
    found = []
    for folder in (texts, numbers):
        dataset = open_dataset(folder / "dataset")
        data = dataset.job.data
        spec = ModelInputs(
            dense=(),
            sparse={f: data.table_of_feature[f] for f in HASHED},
            weighted=(),
            tables=data.tables,
            history="history",
            max_history=5,
            dtype="float32",
        )
        rows = read_joined_row_group(dataset.segments[0], 0, 0, data)
        found.append(build_inputs(spec, rows, lambda _, rows: rows[:, None].astype(np.float64)))
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
