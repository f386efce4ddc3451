"""The groups benchmark counts bytes and values of both sides."""

import json
from pathlib import Path

import pytest

from benchmarks.groups import main


@pytest.mark.slow
def test_both_sides_of_ten_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--datasets", "ten_rows", "--shared-data", str(Path("none"))]) == 0
    found = json.loads(capsys.readouterr().out)
    sides = found["details"]["ten_rows"]
    assert found["ours"] == sides["auto"]["bytes"] < found["peer"] == sides["named"]["bytes"]
    assert found["ratio"] == found["worst"] == round(found["peer"] / found["ours"], 4)
    assert sides["auto"]["groups"] == {} != sides["named"]["groups"]
    assert sides["auto"]["values"] > 0
