"""`scheduler fit`: what is read, skipped and refused, and what is held back."""

import re
from pathlib import Path

import pytest

from presage.scheduler.__main__ import main
from presage.scheduler.model.measurements import parse_holdout, read_measurements
from presage.scheduler.model.throughput import TRAINING_TERMS
from presage.schemas.errors import SchemaError
from tests.shared import error_of, json_of, printed_by

HEADER = "job,num_replicas,num_stores,replica_cpus,store_cpus,batch_size,samples_per_sec,site"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Two jobs whose steps take 8 / r + 1 seconds, and 4 / r + 0.1 r."""
    lines = [f"a,{r},,,,64,{64 / (8 / r + 1)},here" for r in range(1, 17)]
    lines += [f"b,{r},0,2,,64,{64 / (4 / r + 0.1 * r)},there" for r in range(1, 17)]
    return write(tmp_path / "measured.csv", *lines, "b,17,0,2,,64,0,there", "b,18,0,2,,64,,there")


def test_main_fit_json_holds_a_model_of_each_job(measured: Path) -> None:
    body = json_of(main, ["fit", str(measured), "--holdout", "num_replicas=>=13", "--json"])
    assert list(body["jobs"]) == ["a", "b"]
    for fit in body["jobs"].values():
        assert set(fit["coefficients"]) == set(TRAINING_TERMS)
        assert all(value >= 0 for value in fit["coefficients"].values())
        assert fit["mape_fit"] < 0.01
        assert fit["mape_holdout"] < 0.05
        assert (fit["num_fitted"], fit["num_held_back"], fit["inside"]) == (12, 4, 1.0)
        assert fit["confident"] is True
    assert 0 <= body["mape_holdout"] < 0.05
    assert body["num_skipped"] == 2


def test_main_fit_prints_a_line_for_each_job_and_what_it_skipped(measured: Path) -> None:
    words = ["fit", str(measured), "--holdout", "job=a,num_replicas=>12"]
    printed, errors = printed_by(main, words, 0)
    first, second = printed.splitlines()
    assert re.match(r"a: 12 fitted 0\.\d% off, 4 held back \d\.\d% off, 100% inside", first)
    assert re.match(r"b: 16 fitted 0\.\d% off; ", second)
    assert errors == "skipped 2 rows without a speed\n"


def test_main_fit_far_beyond_what_was_measured_predicts_without_confidence(measured: Path) -> None:
    for fit in json_of(main, ["fit", str(measured), "--holdout", "num_replicas=>2", "--json"])[
        "jobs"
    ].values():
        assert fit["mape_holdout"] > 0
        assert fit["confident"] is False


def test_main_fit_of_several_holdouts_predicts_what_matches_any(measured: Path) -> None:
    holdouts = ["--holdout", "num_replicas=3", "--holdout", "site=there,num_replicas=<=2"]
    jobs = json_of(main, ["fit", str(measured), *holdouts, "--json"])["jobs"]
    assert [jobs[name]["num_held_back"] for name in "ab"] == [1, 3]


REFUSED = {
    "no number": ("a,1,,,,64,fast,x", "samples_per_sec must be a number, not negative, got 'fast'"),
    "a negative speed": ("a,1,,,,64,-3,x", "samples_per_sec must be a number, not negative"),
    "an infinite speed": ("a,1,,,,64,inf,x", "samples_per_sec must be a number, not negative"),
    "half a replica": ("a,0.5,,,,64,3,x", "num_replicas must be a number, at least 1, got '0.5'"),
    "no replicas": ("a,,,,,64,3,x", "num_replicas must be a number, at least 1, got ''"),
    "no cores": ("a,1,,0,,64,3,x", "replica_cpus must be a number, positive, got '0'"),
}


@pytest.mark.parametrize(("line", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_main_fit_of_a_wrong_cell_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", "a,1,,,,64,10,x", line)
    found = error_of(main, ["fit", str(path)])
    assert found.startswith(f"error: {message}")
    assert f" in {path}:3; correct or remove the row\n" in found


def test_read_measurements_without_a_speed_or_a_column_says_so(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.csv", "a,1,,,,64,0,x")
    with pytest.raises(SchemaError, match="have no row with a speed: 1 without"):
        read_measurements(empty)
    short = tmp_path / "short.csv"
    short.write_text("job,samples_per_sec\na,1\n")
    with pytest.raises(SchemaError, match="measurements lack column 'num_replicas'"):
        read_measurements(short)
    with pytest.raises(SchemaError, match="measurements cannot be read as CSV"):
        read_measurements(tmp_path / "nowhere.csv")


HOLDOUTS = {
    "no condition": ("num_replicas", "holdout must be COLUMN=VALUE, got 'num_replicas'"),
    "no value": ("job=", "holdout must be COLUMN=VALUE, got 'job='"),
    "no column": ("num_replica=1", "holdout names an unknown column: 'num_replica'; did you mean"),
    "a comparison with a word": ("job=>=x", "holdout compares with a text: '>=x'"),
}


@pytest.mark.parametrize(("text", "message"), HOLDOUTS.values(), ids=HOLDOUTS.keys())
def test_parse_holdout_of_no_condition_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse_holdout(text, HEADER.split(","))


def test_main_fit_that_holds_back_a_whole_job_says_so(measured: Path) -> None:
    assert "holdout leaves no row to fit: all 16 of job 'b'" in error_of(
        main, ["fit", str(measured), "--holdout", "job=b"]
    )
