"""The first lines of the README, in a fresh environment outside the source tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import blocks
from tests.external_tools import install_wheel
from tests.test_documents import run_block

pytestmark = pytest.mark.nightly

MARK = "outside the source tree"
"""In the reason of the README's blocks that run here."""


@pytest.fixture(scope="module")
def programs(repository: Path) -> Path:
    """The programs of an environment with the locked packages and our wheel, and nothing else."""
    return install_wheel(repository, repository / "requirements-jobs.lock")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_first_lines_of_the_readme_run_in_a_fresh_environment(
    programs: Path, repository: Path, tmp_path: Path
) -> None:
    variables = {"HOME": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin"}
    found = blocks((repository / "README.md").read_text())
    problems = [
        f"README.md:{block.line}: {text}"
        for block in found
        if block.reason is not None and MARK in block.reason
        for text in run_block(block, tmp_path, variables)
    ]
    assert not problems, "\n".join(problems)
    assert (tmp_path / "demo" / "dataset").is_dir()
