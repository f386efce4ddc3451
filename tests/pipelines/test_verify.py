"""`verify` and `oracle`: what a dataset claims about itself is recomputed by other means."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.cli import main
from presage.pipelines.table.verify import segment_problems, verify
from presage.schemas.dataset.files import describe_file, parse_files, sha256_of, write_files
from presage.schemas.dataset.hints import read_hints
from presage.schemas.dataset.manifest import (
    SegmentManifest,
    commit_root,
    read_dataset,
    read_root,
    read_segment,
    write_manifest,
)
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.layout import FILES, SEGMENTS
from presage.schemas.storage.location import MANIFESTS
from tests.pipelines.logs import IN_PROCESS, built, copy_of, segment_directory
from tests.schemas import reference
from tests.shared import error_of, json_of, output_of, refusal_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of about 750 samples, not to be changed."""
    return built(tmp_path_factory.mktemp("verified"))


def rewritten(dataset: Path, path: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the content of a segment's file and mend every checksum above it."""
    segment = segment_directory(dataset)
    file = pq.ParquetFile(segment / path)
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    with pq.ParquetWriter(segment / path, file.schema_arrow) as writer:
        for table in groups:
            writer.write_table(change(table))
    entries = parse_files((segment / FILES).read_bytes(), segment / FILES)
    entries[path] = describe_file(segment / path, path)
    write_files(segment / FILES, entries.values())
    mended(dataset, replace(read_segment(segment), files_sha256=sha256_of(segment / FILES)))


def mended(dataset: Path, manifest: SegmentManifest) -> None:
    """Change the manifest of the only segment, and commit a root with its hash."""
    root = read_root(dataset)
    sha256 = write_manifest(segment_directory(dataset), manifest)
    reference = replace(root.manifest.segments[0], manifest_sha256=sha256)
    assert commit_root(dataset, root, replace(root.manifest, segments=(reference,)))


@pytest.mark.parametrize("content", [None, b"changed"])
def test_missing_or_changed_anomalies_are_found(
    dataset: Path, tmp_path: Path, content: bytes | None
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    (path,) = segment_directory(copy).glob("anomalies-*")
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (problem,) = verify(copy)["problems"]
    assert path.name in problem


@pytest.mark.slow
def test_verify_of_a_fresh_dataset_finds_nothing(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(dataset), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["problems"], found["num_segments"]) == ([], 1)
    assert printed.err.splitlines()[-1] == f"verify: ok, {found['num_samples']} samples, 1 segment"
    assert output_of(main, ["verify", str(dataset)]).splitlines()[-1] == printed.err.strip()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_verify_of_a_damaged_dataset_ends_with_the_number_of_problems(
    more: list[str], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    file = next((copy / SEGMENTS).glob("*/samples/*.parquet"))
    file.write_bytes(b"x")
    assert main(["verify", str(copy), *more]) == 1
    printed = capsys.readouterr()
    assert (printed.err if more else printed.out).splitlines()[-1] == "verify: 1 problem"
    assert len(printed.out.splitlines()) == 1 or not more


def test_verify_names_every_file_in_which_a_byte_has_changed(dataset: Path, tmp_path: Path) -> None:
    segment = segment_directory(dataset)
    (segment_id,) = (s.id for s in read_dataset(dataset).segments)
    data_files = [p for p in segment.rglob("*") if p.parent != segment and p.is_file()]
    for number, file in enumerate(sorted(data_files)):
        copy = copy_of(dataset, tmp_path / str(number))
        damaged = copy / file.relative_to(dataset)
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        (problem,) = verify(copy)["problems"]
        assert problem == f"{segment_id}/{file.relative_to(segment)}: content has changed"


def swap_first_items(table: pa.Table) -> pa.Table:
    items = table["item"].to_numpy().copy()
    items[0] = (items[0] + 1) % 1000
    return table.set_column(table.column_names.index("item"), "item", pa.array(items))


def repeat_first_tuple(table: pa.Table) -> pa.Table:
    rows = np.arange(table.num_rows)
    rows[1] = 0
    index = table.column_names.index("unique_index")
    return table.take(pa.array(rows)).set_column(index, "unique_index", table["unique_index"])


def point_nowhere(table: pa.Table) -> pa.Table:
    inverse = table["user_inverse"].to_numpy().copy()
    inverse[0] = 1_000_000
    return table.set_column(
        table.column_names.index("user_inverse"), "user_inverse", pa.array(inverse)
    )


WRONG_CONTENT = {
    "an item that the access lists do not know": (
        "samples/00000.parquet",
        swap_first_items,
        "access/items: rows differ from those that the samples look up",
    ),
    "a tuple that stands twice in its block": (
        "groups/user/00000.parquet",
        repeat_first_tuple,
        "group user in row group 0 of part 0: 1 tuples are not unique in their block",
    ),
    "an inverse index that points nowhere": (
        "samples/00000.parquet",
        point_nowhere,
        "inverse_indices must be in",
    ),
}


@pytest.mark.parametrize(
    ("path", "change", "problem"), WRONG_CONTENT.values(), ids=WRONG_CONTENT.keys()
)
def test_verify_finds_wrong_content_under_right_checksums(
    path: str, change: Callable[[pa.Table], pa.Table], problem: str, dataset: Path, tmp_path: Path
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    rewritten(copy, path, change)
    problems = verify(copy)["problems"]
    assert any(problem in p for p in problems), problems


def test_verify_finds_counts_of_reuse_that_differ(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    with monkeypatch.context() as patched:
        patched.setattr("presage.schemas.oracle.reuse.ReuseCounts.add", lambda *_: None)
        assert main(["oracle", str(copy), "--reindex", "--epochs", "2", "--json"]) == 0
    (problem,) = {p.rpartition(": ")[2] for p in verify(copy)["problems"]}
    assert problem == "counts of reuse differ from the access lists"


def test_dataset_without_its_manifest_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    shutil.rmtree(copy / MANIFESTS)
    with pytest.raises(SchemaError, match=r"there is no dataset: no build was committed in "):
        open_dataset(copy)
    assert main(["verify", str(copy)]) == 1


def steps_of(dataset: Path, feature_columns: list[str], batch: int) -> list[list[int]]:
    """Return the distinct ids of each step of the training range, by plain Python."""
    opened = open_dataset(dataset)
    table = next(iter(read_samples(opened)))  # the first row group is all of the training range
    columns = {c: table[c].to_pylist() for c in feature_columns}
    steps: list[list[int]] = []
    for start in range(0, table.num_rows, batch):
        ids: set[int] = set()
        for values in columns.values():
            for value in values[start : start + batch]:
                ids.update(value if isinstance(value, list) else [value])
        steps.append(sorted(ids))
    return steps


@pytest.mark.parametrize(("batch", "epochs"), [(32, 1), (64, 1), (32, 3)])
def test_oracle_counts_what_a_plain_scan_counts(
    batch: int, epochs: int, dataset: Path, tmp_path: Path
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    arguments = ["oracle", str(copy), "--batch-samples", str(batch), "--epochs", str(epochs)]
    report = json_of(main, [*arguments, "--reindex", "--lookahead", "2", "--json", IN_PROCESS])
    steps = steps_of(copy, ["item", "history"], batch) * epochs
    table = report["tables"]["items"]
    assert report["num_steps"] == len(steps)
    assert table["num_accesses"] == sum(len(s) for s in steps)
    assert table["num_unique_rows"] == len({i for s in steps for i in s})
    distances = reference.next_use(steps)
    kept: set[int] = set()
    fetched, resident, fetches = 0, [], []
    for ids, ahead in zip(steps, distances, strict=True):
        new = set(ids) - kept
        fetched += len(new)
        resident.append(len(kept | set(ids)))
        fetches.append(len(new))
        kept = (kept | set(ids)) - {i for i, d in zip(ids, ahead, strict=True) if not 0 < d <= 2}
    assert table["fetched_rows"] == fetched
    assert table["hit_rate"] == pytest.approx(1 - fetched / table["num_accesses"])
    peak = max(r + sum(fetches[s + 1 : s + 3]) for s, r in enumerate(resident))
    assert table["peak_cache_rows"] == peak
    assert verify(copy)["problems"] == []


def test_oracle_counts_lookups_with_and_without_deduplication(dataset: Path) -> None:
    tables = json_of(main, ["oracle", str(dataset), "--json"])["tables"]
    opened = open_dataset(dataset)
    training = next(iter(read_samples(opened)))
    lengths = [len(h) for h in training["history"].to_pylist()]
    assert tables["items"]["num_lookups"] == training.num_rows + sum(lengths)
    blocks = [training.slice(s, 16).to_pylist() for s in range(0, training.num_rows, 16)]
    unique = [{(r["session"], r["user"], tuple(r["history"])) for r in block} for block in blocks]
    assert tables["users"]["num_lookups_dedup"] == sum(len(u) for u in unique)
    stored = training.num_rows + sum(len(h) for u in unique for _, _, h in u)
    assert tables["items"]["num_lookups_dedup"] == stored


def test_oracle_writes_hints_that_agree_with_a_plain_scan(dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "hints.json"
    assert main(["oracle", str(dataset), "--json", "--hints", str(path)]) == 0
    opened = open_dataset(dataset)
    job = opened.job
    steps = steps_of(dataset, ["item", "history"], job.data.oracle.batch_samples)
    items = read_hints(path)["items"]
    assert set(read_hints(path)) == set(job.data.tables)
    assert items.feature_names == job.data.tables["items"].features
    assert items.unique_rows_per_step == pytest.approx(sum(map(len, steps)) / len(steps))
    assert items.num_unique_rows == len({i for s in steps for i in s})
    everything = pa.concat_tables(read_samples(opened))
    unique = sum(s.manifest.groups["user"].num_unique for s in opened.segments)
    history = dict(zip(items.feature_names, items.num_poolings, strict=True))["history"]
    assert history == pytest.approx(unique / everything.num_rows)
    counts = Counter(i for s in steps for i in s)
    most = sorted(counts.values(), reverse=True)
    share, hot = items.hot_rows[3]
    assert share == 0.1
    assert hot == pytest.approx(sum(most[: max(1, round(0.1 * len(most)))]) / sum(most))
    shares, misses = zip(*items.lru_misses, strict=True)
    assert misses[0] == 1
    assert misses[-1] == pytest.approx(0, abs=1e-9)
    assert list(shares) == sorted(shares)
    assert list(misses) == sorted(misses, reverse=True)


@pytest.mark.slow
def test_oracle_without_an_index_for_the_batch_names_the_command_that_builds_it(
    dataset: Path, tmp_path: Path
) -> None:
    copy = copy_of(dataset, tmp_path / "dataset")
    error = error_of(main, ["oracle", str(copy), "--batch-samples", "64"]).strip()
    assert "batch_samples=64, epochs=1, shuffle=none, seed=0, closest: batch_samples=32 in" in error
    command = error.partition("run python -m presage.pipelines ")[2].split()
    assert main(command) == 0
    assert main(["oracle", str(copy), "--batch-samples", "64"]) == 0


def test_oracle_with_a_cache_that_is_too_small_names_a_larger_one(dataset: Path) -> None:
    message = "cache is too small for rows kept for their next use and those of the"
    assert message in error_of(main, ["oracle", str(dataset), "--cache-rows", "3"])


CLAIMS = {
    "num_rejects": ({"num_rejects": 4}, "num_rejects is 4, stored are 0"),
    "num_sessions": ({"num_sessions": 1}, "num_sessions is 1, stored are "),
    "input_bytes": ({"input_bytes": 1}, "input_bytes is 1, stored are "),
    "dataset_bytes": ({"dataset_bytes": 1}, "dataset_bytes is 1, stored are "),
    "oracle_bytes": ({"oracle_bytes": 1}, "oracle_bytes is 1, stored are "),
    "splits": ({"splits": {"train": (0, 3)}}, "splits differ from those of blocks.parquet: "),
    "list values of a group": ({"num_values": 1}, "groups.user is {"),
    "a dedup factor": ({"dedup_factor": 1.0}, "groups.user is {"),
    "look-ups": ({"num_lookups": 1}, "tables.items is {"),
    "look-ups once per tuple": ({"num_lookups_dedup": 1}, "tables.items is {"),
    "distinct rows": ({"num_unique_rows": 1}, "tables.items is {"),
    "a type": ({"columns": {"label": "int64"}}, "columns is {'label': 'int64'}, stored are "),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_verify_counts_again_what_a_manifest_claims(
    dataset: Path, tmp_path: Path, case: str
) -> None:
    change, problem = CLAIMS[case]
    copy = copy_of(dataset, tmp_path / "dataset")
    manifest = read_segment(segment_directory(copy))
    if "groups." in problem:
        user = replace(manifest.groups["user"], **change)
        manifest = replace(manifest, groups={"user": user})
    elif "tables." in problem:
        items = replace(manifest.tables["items"], **change)
        manifest = replace(manifest, tables={**manifest.tables, "items": items})
    else:
        manifest = replace(manifest, **change)
    mended(copy, manifest)
    problems = verify(copy)["problems"]
    assert any(problem in p and "MANIFEST.json" in p for p in problems), problems


@pytest.mark.parametrize("name", ["weight", "num_lookups", "num_lookups_dedup"])
def test_verify_sums_blocks_again(dataset: Path, name: str) -> None:
    opened = open_dataset(dataset)
    blocks = opened.segments[0].blocks
    column = blocks.schema.get_field_index(name)
    changed = pa.array(blocks[name].to_numpy() + 1)
    segment = replace(opened.segments[0])
    segment.__dict__["blocks"] = blocks.set_column(column, name, changed)
    (problem, *_) = segment_problems(segment, opened)
    assert problem == f"row group 0 of part 0: {name} of its blocks differs from blocks.parquet"


@pytest.mark.parametrize(
    ("option", "value"),
    [("lookahead", 0), ("lookahead", -5), ("epochs", 0), ("batch-samples", 0), ("cache-rows", 0)],
)
def test_oracle_refuses_what_is_below_one(dataset: Path, option: str, value: int) -> None:
    error = f"--{option} must be at least 1, got {value}; raise it or leave it out"
    assert refusal_of(main, ["oracle", str(dataset), f"--{option}", str(value)]) == error


def test_generate_refuses_an_empty_log(repository: Path, tmp_path: Path) -> None:
    job = str(repository / "schemas" / "demo" / "job.yaml")
    assert "num_samples must be at least 1, got num_samples=0" in error_of(
        main, ["generate", job, "--output", str(tmp_path), "--num-samples", "0"]
    )
