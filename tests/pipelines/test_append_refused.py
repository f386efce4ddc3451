"""What may not be appended: each refusal names its key, and the dataset stays as it is."""

import re
from pathlib import Path

import pytest

from presage.pipelines.build import build
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed, with_logs
from tests.pipelines.logs import SCHEMA, bytes_of, copy_of


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    return with_logs(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments, not to be changed."""
    dataset = copy_of(one / "dataset", tmp_path_factory.mktemp("two") / "dataset")
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    return dataset


@pytest.mark.slow
def test_append_at_a_taken_position_is_refused_before_the_work(one: Path, two: Path) -> None:
    taken = open_dataset(two).segments[1].id
    with pytest.raises(
        SchemaError,
        match=re.escape(
            f"position is taken: 1, by {taken} in {two}; choose another, or leave "
            "--position out to append"
        ),
    ):
        build(addition(one / "job" / "job.yaml", one / "log-2", two, 1))


def test_append_to_no_dataset_is_refused(one: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^there is no dataset: no build was committed in "):
        build(addition(one / "job" / "job.yaml", one / "log-1", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


PINNED = {
    "groups": (
        ("groups: {user: [session, user, history]}", "groups: {user: [session, history]}"),
        "data.groups.user must be ('session', 'user', 'history') as in the dataset, got "
        "('session', 'history')",
    ),
    "transforms": (
        ("ln(1 + len(history))", "ln(2 + len(history))"),
        "data.transforms.user.num_history must be 'ln(1 + len(history))' as in the dataset, got "
        "'ln(2 + len(history))'",
    ),
    "tables": (
        ("num_rows: 65536", "num_rows: 1024"),
        "data.tables.users.num_rows must be 65536 as in the dataset, got 1024",
    ),
    "blocks": (
        ("block_samples: 16", "block_samples: 32"),
        "data.block_samples must be 16 as in the dataset, got 32",
    ),
    "session gap": (
        ("time: time}", "time: time, gap: 60s}"),
        "data.session.gap must be None as in the dataset, got datetime.timedelta(seconds=60)",
    ),
    "order of blocks": (
        ("oracle: {batch_samples: 32}", "oracle: {batch_samples: 32, order: {shuffle: blocks}}"),
        "data.oracle.order.shuffle must be 'none' as in the dataset, got 'blocks'",
    ),
    "name": (("name: shop", "name: mall"), "name must be 'shop' as in the dataset, got 'mall'"),
}


@pytest.mark.parametrize("case", PINNED)
def test_append_of_a_job_that_differs_in_what_is_pinned_names_the_key(
    one: Path, tmp_path: Path, case: str
) -> None:
    change, message = PINNED[case]
    job = changed(tmp_path / "job", change)
    whole = f"{message} in {job}; keep it, or build a new dataset"
    before = bytes_of(one / "dataset")
    with pytest.raises(SchemaError, match=f"^{re.escape(whole)}$"):
        build(addition(job, one / "log-1", one / "dataset"))
    assert bytes_of(one / "dataset") == before


COLUMNS = {
    "removed": (
        [("clicked AS label", "clicked AS label")],
        SCHEMA.replace('feature { name: "item"', 'feature { name: "thing"'),
        "column 'item' must be declared",
    ),
    "retyped": (
        [],
        SCHEMA.replace('name: "num_history" type: FLOAT', 'name: "num_history" type: INT'),
        "feature 'num_history' must be INT, got",
    ),
    "another role": (
        [],
        SCHEMA.replace(
            '"num_history" type: FLOAT annotation { tag: "dense" }',
            '"num_history" type: FLOAT annotation { tag: "kept" }',
        ),
        "role of column 'num_history' must be 'dense' as in the dataset, got 'kept'",
    ),
    "removed from SQL and schema": (
        [("transforms: {user: {num_history: ln(1 + len(history))}}", "transforms: {}")],
        SCHEMA.replace(
            'feature { name: "num_history" type: FLOAT annotation { tag: "dense" } }', ""
        ),
        "column of the dataset is not declared: 'num_history'",
    ),
    "retyped in SQL": (
        [("clicked AS label", "clicked::INT AS label")],
        SCHEMA,
        "column 'label' must be int8 as in the dataset, got int32",
    ),
    "added, but required": (
        [("clicked AS label", "clicked AS label, 1.5::FLOAT AS price")],
        SCHEMA + EXTRA.replace("type: FLOAT", "type: FLOAT presence { min_fraction: 1 }"),
        "added column 'price' is required, but older segments have no value",
    ),
    "added weight without default": (
        [("clicked AS label", "clicked AS label, 1.5::FLOAT AS price")],
        SCHEMA + EXTRA.replace("dense", "weight"),
        "added weight 'price' has no default",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_append_with_other_columns_is_refused_by_name(one: Path, tmp_path: Path, case: str) -> None:
    changes, schema, message = COLUMNS[case]
    job = changed(tmp_path / "job", *changes, schema=schema)
    before = bytes_of(one / "dataset")
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}"):
        build(addition(job, one / "log-1", one / "dataset"))
    assert bytes_of(one / "dataset") == before


def test_same_files_under_a_changed_job_are_refused(one: Path, tmp_path: Path) -> None:
    job = changed(tmp_path / "job", ("FROM log", "FROM log WHERE clicked = 1"))
    with pytest.raises(SchemaError, match=r"^input files are already in the dataset, in segment "):
        build(addition(job, one / "log", one / "dataset"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price", "default of feature 'price' must be INT, got 2.5 in "),
        ("sparse", "default of feature 'price' is not supported, as the column is sp"),
    ],
)
def test_default_that_no_reader_could_give_is_refused(
    one: Path, tmp_path: Path, text: str, message: str
) -> None:
    extra = EXTRA.replace("FLOAT", "INT")
    extra = extra.replace("dense", "sparse") if text == "sparse" else extra
    job = changed(tmp_path / "job", schema=SCHEMA + extra + DEFAULT)
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}"):
        build(addition(job, one / "log-1", one / "dataset"))
