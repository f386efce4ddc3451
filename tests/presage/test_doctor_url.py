"""The doctor's findings about URLs: real stores, and stores with real deficiencies."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from presage.doctor import CheckResult, format_finding
from presage.doctor_url import CHECKS, examine_url
from presage.scheduler.__main__ import main
from presage.schemas.storage.location import Location
from tests.fault_proxy import Faults
from tests.object_store import Store

NAMES = [f"url {check.name}" for check in CHECKS]


def connect(store: Store, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Let clients of this process find a store; return a directory with one file in it."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    root = Location.parse(store.new_url())
    (root / "own").write_bytes(b"")
    return root


def last(root: Location, skew_sec: float = 0.0) -> CheckResult:
    """Return the last finding, after which nothing is left but the own file."""
    *before, finding = examine_url(root.url, lambda: time.time() + skew_sec)
    assert all(finding.ok for finding in before)
    assert [finding.name for finding in before] == NAMES[: len(before)]
    assert [entry.path for entry in root.entries()] == ["own"]
    return finding


@pytest.mark.parametrize("fixture", ["s3_store", "gcs_store", "azure_store"])
def test_real_store_is_ok(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = connect(request.getfixturevalue(fixture), monkeypatch)
    finding = last(root)
    assert (finding.name, finding.ok) == ("url delete", True)


def test_path_is_ok_and_is_not_created(tmp_path: Path) -> None:
    findings = list(examine_url(str(tmp_path / "not" / "yet")))
    assert [finding.name for finding in findings] == NAMES
    assert all(finding.ok for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_store_that_ignores_conditions_is_refused(
    gcs_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(ignore_conditions=True)
    with gcs_store.behind_proxy(faults) as behind:
        line = format_finding(last(connect(behind, monkeypatch)))
    assert line.startswith("lacks   url conditional put: store ignores the condition of a cond")
    assert line.endswith("; use a store that supports conditional puts, see docs/storage.md")


@pytest.mark.slow
def test_slow_store_and_another_clock_are_named(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    with s3_store.behind_proxy(faults) as behind:
        root = connect(behind, monkeypatch)
        ahead, behind_us = last(root, -90), last(root, 90)
        monkeypatch.setattr("presage.doctor_url.MAX_LATENCY_MS", 20.0)
        faults.latency_sec = 0.05
        slow = last(root)
        faults.latency_sec = 0
    assert (ahead.name, ahead.ok, behind_us.ok) == ("url clock", False, False)
    assert ahead.found.endswith(" s ahead")
    assert behind_us.found.endswith(" s behind")
    assert (slow.name, slow.ok) == ("url latency", False)
    assert float(slow.found.removesuffix(" ms")) >= 50


def test_missing_bucket_and_odd_url_are_the_only_finding(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(s3_store, monkeypatch)
    (finding,) = examine_url("s3://missing/x")
    assert (finding.name, finding.ok) == ("url list", False)
    assert finding.found.startswith("bucket does not exist in s3://missing/x")
    (finding,) = examine_url("s4://b")
    assert finding.found.startswith("scheme is unknown: 's4' in s4://b; use a path or file://")


@pytest.mark.slow
def test_doctor_of_a_url_prints_its_findings_too(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = connect(s3_store, monkeypatch)
    small = ["--least-shared", "1KiB", "--least-disk", "1KiB"]
    main(["doctor", "--json", *small, "--url", root.url])
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert set(NAMES) < set(findings)
    assert all(findings[name]["state"] == "ok" for name in NAMES)
    main(["doctor", *small, "--url", "s3://missing/x"])
    output = capsys.readouterr()
    assert (
        "lacks   url list: bucket does not exist in s3://missing/x; create it (must" in output.out
    )
    assert "url list" in output.err
