"""Declared transforms and vocabularies in the job file are read, or refused with their line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.config.job import load_job
from presage.schemas.config.transforms import TransformConfig, num_ids_of_transform
from presage.schemas.errors import SchemaError
from tests.schemas.test_job import SMALLEST, merged, write

# Sentence to what is added to the smallest job, and the message without its place.
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "transform of no kind": (
        {"data": {"groups": {"u": ["x"]}, "transforms": {"u": {"y": {}}}}},
        "data.transforms.u.y.hash, cross, vocabulary, first, last, clip, log, normalize, bucketize "
        "must be given once, got []@; keep one",
    ),
    "transform of an unknown kind": (
        {"data": {"groups": {"u": ["x"]}, "transforms": {"u": {"y": {"clop": {}}}}}},
        "unknown key: data.transforms.u.y.clop@; did you mean 'clip'?",
    ),
    "vocabulary that is not there": (
        {
            "data": {
                "groups": {"u": ["x"]},
                "vocabularies": {"items": {"columns": ["x"], "num_rows": 9}},
                "transforms": {"u": {"y": {"vocabulary": {"name": "item", "column": "x"}}}},
            }
        },
        "data.transforms.u.y.vocabulary.name must be one of data.vocabularies, got 'item'@; "
        "did you mean 'items'?",
    ),
    "vocabulary without room": (
        {"data": {"vocabularies": {"v": {"columns": ["x"], "num_rows": 5, "oov_rows": 5}}}},
        "data.vocabularies.v.num_rows must be larger than oov_rows, got 5 and 5@; raise it",
    ),
    "vocabulary of no column": (
        {"data": {"vocabularies": {"v": {"columns": [], "num_rows": 5}}}},
        "data.vocabularies.v.columns is empty@; name at least one column",
    ),
    "vocabulary that leaves the dataset": (
        {"data": {"vocabularies": {"../v": {"columns": ["x"], "num_rows": 5}}}},
        "data.vocabularies must be named with letters, digits, '_' and '-', got '../v'@; rename it",
    ),
    "min_count of nothing": (
        {"data": {"vocabularies": {"v": {"columns": ["x"], "num_rows": 5, "min_count": 0}}}},
        "data.vocabularies.v.min_count must be at least 1, got 0@; raise it",
    ),
    **{
        f"transform {kind} {config}": (
            {"data": {"groups": {"u": ["x"]}, "transforms": {"u": {"y": {kind: config}}}}},
            f"data.transforms.u.y.{kind}.{message}",
        )
        for kind, config, message in (
            ("hash", {"columns": [], "num_rows": 1}, "columns is empty@; name at least one column"),
            (
                "hash",
                {"columns": ["x"], "num_rows": 0},
                "num_rows must be in [1, 2**63], got 0@; lower it",
            ),
            (
                "cross",
                {"columns": ["x"], "num_rows": 1},
                "columns must name two columns, got ['x']@; use hash for others",
            ),
            ("last", {"column": "x", "count": 0}, "count must be at least 1, got 0@; raise it"),
            ("clip", {"column": "x"}, "minimum and maximum are both missing@; add one"),
            (
                "clip",
                {"column": "x", "minimum": 2, "maximum": 1},
                "minimum must be at most maximum, got 2.0 and 1.0@; swap them",
            ),
            (
                "log",
                {"column": "x", "offset": 0},
                "offset must be larger than 0, got 0.0@; write 1",
            ),
            (
                "normalize",
                {"column": "x", "by": "median"},
                "by must be one of mean_std, min_max, got 'median'@; use one of mean_std, min_max",
            ),
            (
                "bucketize",
                {"column": "x"},
                "boundaries or quantiles must be given, got none@; keep one",
            ),
            (
                "bucketize",
                {"column": "x", "boundaries": [2, 1]},
                "boundaries must ascend, got [2.0, 1.0]@; sort them",
            ),
            (
                "bucketize",
                {"column": "x", "quantiles": 1},
                "quantiles must be in [2, 4096], got 1@; use 10",
            ),
        )
    },
}


@pytest.mark.parametrize(("more", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_transform_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, more)
    before, _, after = message.partition("@")
    pattern = rf"^{re.escape(before)} in {re.escape(str(path))}:\d+{re.escape(after)}$"
    with pytest.raises(SchemaError, match=pattern):
        load_job(path)


def test_transforms_are_texts_or_exactly_one_kind(tmp_path: Path) -> None:
    data = {
        "groups": {"u": ["x", "h"]},
        "vocabularies": {"v": {"columns": ["x"], "num_rows": 9}},
        "transforms": {
            "u": {
                "a": "x + 1",
                "b": {"cross": {"columns": ["x", "h"], "num_rows": 7}},
                "c": {"vocabulary": {"name": "v", "column": "x"}},
                "d": {"bucketize": {"column": "x", "boundaries": [1, 2]}},
                "e": {"bucketize": {"column": "x", "quantiles": 5}},
                "f": {"last": {"column": "h", "count": 3}},
            }
        },
    }
    job = load_job(write(tmp_path, {"data": data}))
    transforms = job.data.transforms["u"]
    sizes = {n: num_ids_of_transform(t, job.data.vocabularies) for n, t in transforms.items()}
    assert sizes == {"a": float("inf"), "b": 7, "c": 9, "d": 3, "e": 5, "f": float("inf")}
    kinds = {
        n: (t.kind, t.inputs, t.needs_fitting)
        for n, t in transforms.items()
        if not isinstance(t, str)
    }
    assert kinds == {
        "b": ("cross", ("x", "h"), False),
        "c": ("vocabulary", ("x",), True),
        "d": ("bucketize", ("x",), False),
        "e": ("bucketize", ("x",), True),
        "f": ("last", ("h",), False),
    }
    assert isinstance(transforms["b"], TransformConfig)
    assert job.data.group_of_column["c"] == "u"


def test_transform_is_written_as_it_is_read(tmp_path: Path) -> None:
    transforms = {
        "b": {"cross": {"columns": ["x", "h"], "num_rows": 7}},
        "d": {"bucketize": {"column": "x", "boundaries": [1.0, 2.5]}},
    }
    data: dict[str, Any] = {"groups": {"u": ["x", "h"]}, "transforms": {"u": transforms}}
    job = load_job(write(tmp_path, {"data": data}))
    data["transforms"] = {
        "u": {
            n: t.to_mapping() for n, t in job.data.transforms["u"].items() if not isinstance(t, str)
        }
    }
    (tmp_path / "job.yaml").write_text(
        json.dumps({"name": "small", "data": merged(SMALLEST["data"], data)})
    )
    assert load_job(tmp_path / "job.yaml") == job
