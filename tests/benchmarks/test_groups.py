"""The groups benchmark counts bytes and values of both sides."""

from pathlib import Path

import pytest

from benchmarks.groups import main
from tests.shared import json_of


@pytest.mark.slow
def test_both_sides_of_ten_rows_are_counted() -> None:
    found = json_of(main, ["--json", "--datasets", "ten_rows", "--shared-data", str(Path("none"))])
    sides = found["details"]["ten_rows"]
    assert found["ours"] == sides["auto"]["bytes"] < found["peer"] == sides["named"]["bytes"]
    assert found["ratio"] == found["worst"] == round(found["peer"] / found["ours"], 4)
    assert sides["auto"]["groups"] == {} != sides["named"]["groups"]
    assert sides["auto"]["values"] > 0
