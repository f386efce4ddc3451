"""The first lines of the README, in a fresh environment outside the source tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.kernels.build import processor_level
from tests.documents import blocks
from tests.external_tools import run_uv, sync_environment
from tests.test_documents import run_block

MARK = "outside the source tree"
"""In the reason of the README's blocks that run here."""


@pytest.fixture(scope="module")
def programs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the locked packages and our wheel, and nothing else."""
    folder, own = tmp_path_factory.mktemp("installed"), repository / ".venv" / "bin"
    lock = repository / "requirements-jobs.lock"
    sync_environment(lock.name, lock, own, folder / "venv")
    # Kernels for this processor alone take half as long to compile.
    levels = ["--config-setting", f"cmake.define.LEVELS={processor_level()}"]
    run_uv(own / "uv", "the wheel", ["build", "--wheel", *levels, "--out-dir", folder, repository])
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    run_uv(own / "uv", "the wheel", ["pip", "install", "--no-deps", "--python", python, wheel])
    return python.parent


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
    assert not (tmp_path / ".cache" / "presage").exists()  # the kernels are those of the wheel
