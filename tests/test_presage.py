"""The `presage` command, and packages of users that have the name of one of ours."""

import os
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import pytest

from presage.__main__ import COMMANDS, main
from tests.fork_server import without_forking


def commands_of(package: str) -> set[str]:
    """Return the commands that `python -m package` lists in its help."""
    parser: ArgumentParser = import_module(f"{package}.__main__").build_parser()
    [group] = [a for a in parser._subparsers._group_actions if a.choices]  # type: ignore[union-attr]
    return {action.dest for action in group._choices_actions}  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", COMMANDS)
def test_commands_of_presage_exist(package: str) -> None:
    assert set(COMMANDS[package]) <= commands_of(package)


def test_presage_runs_the_command_of_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["presage", "plan", "no-such-job.yaml"])
    assert main() == 1
    assert "no-such-job.yaml" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["presage", "bake"])
    assert main() == 2
    assert "trainer    train, evaluate" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["pipelines", "trainer", "scheduler", "presage"])
def test_hidden_package_is_refused(module: str, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    hiding = tmp_path / "schemas" / "__init__.py"
    hiding.touch()
    with without_forking():
        completed = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert completed.returncode == 1
    assert completed.stderr.startswith("error: package schemas")
    assert str(hiding) in completed.stderr
    assert len(completed.stderr.splitlines()) == 1
