"""The job file: its checks, and the pages that document it."""

import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from presage.schemas.config.job import load_job
from presage.schemas.config.schedule import UNLIMITED_CPUS, UNLIMITED_MEMORY, BudgetConfig
from presage.schemas.errors import SchemaError
from presage.schemas.features import ROLES, load_features
from presage.schemas.hashing import MAX_ROW
from presage.schemas.typed_values import from_json
from tests.schemas.job_reference import GUIDES, default_text, heading, page, sections, sentences

SMALLEST: dict[str, Any] = {
    "name": "small",
    "data": {
        "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
        "samples": {"map": "SELECT * FROM log"},
        "session": {"key": "session_id", "time": "time"},
        "tables": {"users": {"features": ["user_id"], "num_rows": 10}},
    },
}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The one mapping over the other; sources and samples are replaced whole."""
    joined = dict(base)
    for key, value in more.items():
        whole = key in ("sources", "samples") or not isinstance(value, Mapping)
        joined[key] = value if whole else merged(joined.get(key, {}), value)
    return joined


def write(tmp_path: Path, more: Mapping[str, Any]) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(merged(SMALLEST, more), sort_keys=False))
    return path


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "job.md").read_text()


def examples(text: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(body) for body in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def keys() -> set[str]:
    """Each key of the job file, names of sources and tables left out."""
    return {heading(key) for section in sections() for key, _, _ in section.keys}


def test_every_key_has_a_sentence_that_says_more_than_its_name() -> None:
    for section in sections():
        for key, field, _ in section.keys:
            words = re.findall(r"[a-z]+", sentences(section.kind).get(field.name, "").lower())
            assert {*words} - {*field.name.split("_"), "a", "of", "the"}, f"docstring of {key}"


def test_reference_is_that_of_the_dataclasses(repository: Path) -> None:
    written = (repository / "docs" / "job_reference.md").read_text()
    command = "python -m tests.schemas.job_reference > docs/job_reference.md"
    assert written == page(), f"run {command}"


def test_reference_links_to_a_guide_from_sections_that_exist() -> None:
    assert set(GUIDES) <= {section.heading for section in sections()}


def test_defaults_of_the_reference_are_read_as_those_of_the_dataclasses() -> None:
    read: dict[str, str] = {}
    for section in sections():
        for key, field, hint in section.keys:
            text = default_text(key, field)
            if text.startswith("`"):
                read[key] = text
                assert from_json(hint, yaml.safe_load(text.strip("`"))) == field.default, key
    assert len(read) > 100


def test_documents_show_every_key_in_an_example(document: str) -> None:
    shown: set[str] = set()

    def walk(value: Any, path: str) -> None:
        shown.add(path)
        one = (
            "data.sources",
            "data.sides",
            "data.tables",
            "data.histories",
            "data.vocabularies",
            "train.histories",
        )
        named = {**dict.fromkeys(one, 1), "data.transforms": 2}
        for _ in range(named.get(path, 0)):  # the names in between are the user's
            parts = [part for part in value.values() if isinstance(part, Mapping)]
            value = reduce(merged, parts, {})
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            walk(inner, f"{path}.{key}".lstrip("."))
        for inner in value if isinstance(value, list) else ():
            walk(inner, path)

    for example in examples(document + page()):
        walk(example, "")
    assert keys() - shown == set()


def test_examples_of_the_documents_are_read(document: str, tmp_path: Path) -> None:
    found = examples(document + page())
    assert len(found) == (document + page()).count("```yaml") > 10
    for example in found:
        load_job(write(tmp_path, example))


def test_first_example_of_the_document_is_a_whole_job(document: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)[0])
    job = load_job(path)
    assert job.data.table_of_feature["history"] == "articles"
    assert job.data.group_of_column["country"] == "user"


def test_columns_of_the_document_are_read(document: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.pbtxt"
    path.write_text(re.findall(r"```proto\n(.*?)```", document, re.DOTALL)[0])
    assert load_features(path).label == "clicked"
    assert all(f"| `{role}` |" in document for role in ROLES)


def test_error_of_the_document_is_the_one_that_is_raised(document: str, tmp_path: Path) -> None:
    shown = re.findall(r"```\n(unknown key: .*)\n```", document)[0]
    path = write(tmp_path, {"data": {"grops": {}}})
    with pytest.raises(SchemaError) as caught:
        load_job(path)
    line = shown.replace("job.yaml:9", f"{path}:{caught.value.location}")
    assert str(caught.value) == line


# Sentence to what is added to the smallest job, and the message without its place.
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "neither map nor per": (
        {"data": {"samples": {}}},
        "data.samples.map and per are both missing@; add one",
    ),
    "csv without columns": (
        {"data": {"sources": {"log": {"files": "*", "format": "csv"}}}},
        "data.sources.log.columns is missing@; name every column of a csv source",
    ),
    "a list in a csv source": (
        {
            "data": {
                "sources": {"log": {"files": "*", "format": "csv", "columns": {"x": "list<int8>"}}}
            }
        },
        "data.sources.log.columns of a csv source must not be lists, got 'list<int8>' for 'x'@; "
        "declare a string and split it in SQL",
    ),
    "a quote that is the delimiter": (
        {"data": {"sources": {"log": {"files": "*", "format": "parquet", "delimiter": '"'}}}},
        "data.sources.log.quote must not be the delimiter, got '\"'@; change one",
    ),
    "a group that leaves the dataset": (
        {"data": {"groups": {"../user": ["user"]}}},
        "data.groups must be named with letters, digits, '_' and '-', got '../user'@; rename it",
    ),
    "a group with a name that is longer than those of files": (
        {"data": {"groups": {"g" * 300: ["user"]}}},
        "data.groups must have at most 128 characters, got 300 in 'gggggggggggggggg'...@; "
        "shorten it",
    ),
    "a job with a name that is longer than those of files": (
        {"name": "j" * 300},
        "name must have at most 128 characters, got 300 in 'jjjjjjjjjjjjjjjj'...@; shorten it",
    ),
    "a table without a name": (
        {"data": {"tables": {"": {"features": ["user"], "num_rows": 1}}}},
        "data.tables must be named with letters, digits, '_' and '-', got ''@; rename it",
    ),
    "a window without length": (
        {"data": {"window": {"span": "0s"}}},
        "data.window.span must be longer than 0s@; write a duration such as 30s or 1d",
    ),
    "two characters as delimiter": (
        {"data": {"sources": {"log": {"files": "*", "format": "parquet", "delimiter": "||"}}}},
        "data.sources.log.delimiter must be one ASCII character, got '||'@; write it in quotes",
    ),
    "empty quote": (
        {"data": {"sources": {"log": {"files": "*", "format": "parquet", "quote": ""}}}},
        "data.sources.log.quote must be one ASCII character or null, got ''@; write it in quotes",
    ),
    "no source": ({"data": {"sources": {}}}, "data.sources is empty@; add a source"),
    "source that is not there": (
        {"data": {"samples": {"map": "x", "source": "lag"}}},
        "data.samples.source must be a source, got 'lag'@; did you mean 'log'?",
    ),
    "block of another size": (
        {"data": {"block_samples": 1000}},
        "data.block_samples must be a power of two in [16, 65536], got 1000@; use 1024",
    ),
    "batch of the oracle that cuts blocks": (
        {"data": {"oracle": {"batch_samples": 1500}}},
        "data.oracle.batch_samples must be a multiple of block_samples, got 1500 and 1024@; "
        "use 1024",
    ),
    "empty batch": (
        {"data": {"oracle": {"batch_samples": 0}}},
        "data.oracle.batch_samples must be at least 1, got 0@; raise it",
    ),
    "batch of training that cuts blocks": (
        {"train": {"batch_samples": 5000}},
        "train.batch_samples must be a multiple of data.block_samples, got 5000 and 1024@; "
        "use 4096",
    ),
    "column in two groups": (
        {"data": {"groups": {"a": ["x"], "b": ["y", "x"]}}},
        "data.groups a and b both have column 'x'@; keep one",
    ),
    "empty group": (
        {"data": {"groups": {"a": []}}},
        "data.groups.a is empty@; name a column or remove it",
    ),
    "nine groups": (
        {"data": {"groups": {f"g{i}": [f"c{i}"] for i in range(9)}}},
        "data.groups must be at most 8, got 9@; merge some",
    ),
    "group named samples": (
        {"data": {"groups": {"samples": ["x"]}}},
        "data.groups has the reserved name 'samples'@; rename it",
    ),
    "transform of no group": (
        {"data": {"groups": {"user": ["x"]}, "transforms": {"usr": {"y": "x"}}}},
        "data.transforms.usr names an unknown group@; did you mean 'user'?",
    ),
    "transform that overwrites": (
        {"data": {"groups": {"user": ["x"]}, "transforms": {"user": {"x": "x + 1"}}}},
        "data.transforms.user.x exists already@; rename it",
    ),
    "feature in two tables": (
        {"data": {"tables": {"more": {"features": ["user_id"], "num_rows": 1}}}},
        "data.tables users and more both have feature 'user_id'@; keep one",
    ),
    "table without rows": (
        {"data": {"tables": {"users": {"num_rows": 0}}}},
        "data.tables.users.num_rows must be in [1, 2**63], got 0@; lower it",
    ),
    "attention without features": (
        {"train": {"model": {"name": "attention"}}},
        "train.model.history and target are required by the attention model, got "
        "history=None, target=None@; name two features",
    ),
    "heads that do not divide": (
        {"train": {"model": {"name": "attention", "history": "h", "target": "t", "num_heads": 5}}},
        "train.embedding_dim must be divisible by model.num_heads, got 32 and 5@; change one",
    ),
    "fetch before write-back": (
        {"train": {"cache": {"lookahead": 2, "prefetch_steps": 3}}},
        "train.cache.prefetch_steps must be in [1, lookahead], got 3 and 2@; lower it",
    ),
    "layer without width": (
        {"train": {"model": {"top_layers": [64, 0]}}},
        "train.model.top_layers must have widths of at least 1, got (64, 0)@; raise them",
    ),
    "more stores than ranges": (
        {"schedule": {"training": {"max_stores": 17}}},
        "schedule.training.max_stores must be at most 16, got 17@; lower it",
    ),
    "no epochs": ({"train": {"epochs": 0}}, "train.epochs must be at least 1, got 0@; raise it"),
}


@pytest.mark.parametrize(("more", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_load_job_of_a_job_that_does_not_fit_says_where(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, more)
    before, _, after = message.partition("@")
    pattern = rf"^{re.escape(before)} in {re.escape(str(path))}(:\d+)?{re.escape(after)}$"
    with pytest.raises(SchemaError, match=pattern):
        load_job(path)


def test_smallest_job_has_the_defaults_of_the_dataclasses(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, {}))
    assert job.data.sample_source == "log"
    assert job.data.block_samples == 1024
    assert job.train.cache.lookahead == 50
    assert job.schedule.budget == BudgetConfig(cpus=UNLIMITED_CPUS, memory=UNLIMITED_MEMORY)


def test_table_may_have_every_row_that_fits(tmp_path: Path) -> None:
    widest = {"data": {"tables": {"users": {"num_rows": MAX_ROW + 1}}}}
    assert load_job(write(tmp_path, widest)).data.tables["users"].num_rows == 1 << 63


def test_groups_own_the_columns_that_transforms_make(tmp_path: Path) -> None:
    job = load_job(
        write(
            tmp_path,
            {
                "data": {
                    "groups": {"user": ["x"]},
                    "transforms": {"user": {"y": "x"}, "samples": {"z": "1"}},
                }
            },
        )
    )
    assert job.data.group_of_column == {"x": "user", "y": "user"}


def shipped(repository: Path) -> list[Path]:
    return sorted((repository / "schemas").glob("*/job.yaml"))


def test_shipped_jobs_and_their_columns_are_read(repository: Path) -> None:
    jobs = shipped(repository)
    assert "demo" in [path.parent.name for path in jobs]
    for path in jobs:
        job = load_job(path)
        features = load_features(path.parent / job.data.schema)
        assert job.name == path.parent.name
        assert features.label
        assert set(features.with_role("sparse")) == set(job.data.table_of_feature)
        assert set(job.data.group_of_column) <= set(features.names)


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/x", "a/b", "..", "", "-x", "a b", "a\nb"])
def test_name_that_is_no_name_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"name": name})
    with pytest.raises(SchemaError, match=re.escape(f"got {name!r} in {path}:1; rename it")):
        load_job(path)


def test_side_table_whose_name_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    side = {"files": "x.parquet", "format": "parquet", "key": "user_id"}
    path = write(tmp_path, {"data": {"sides": {"../x": side}}})
    with pytest.raises(SchemaError, match="sides must be named with letters"):
        load_job(path)
