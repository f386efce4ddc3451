"""The `presage` command, and packages of users that have the name of one of ours."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import shtab

from presage import completion
from presage.__main__ import main
from presage.commands import PACKAGES, TASKS, help_text
from presage.completion import parser_of_all, subparsers_of
from tests.fork_server import without_forking
from tests.test_documents import PACKAGES as WITH_COMMANDS

FOR_RUNS = {("trainer", "verify"), ("trainer", "erase")}
"""Commands that are not below `presage`: those for datasets are."""
LIGHT = ("apache_beam", "duckdb", "numpy", "pyarrow", "torch")


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `main` does to the process that it is called in."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


def parsers_of(package: str) -> tuple[dict[str, str], set[str]]:
    """Return the commands that `python -m package` lists, with their lines, and all commands."""
    parser = import_parser(package)
    [group] = [a for a in parser._subparsers._group_actions if a.choices]  # type: ignore[union-attr]
    listed = {action.dest: action.help for action in group._choices_actions}  # type: ignore[attr-defined]
    return listed, set(subparsers_of(parser))


def import_parser(package: str) -> ArgumentParser:
    return import_module(f"presage.{package}.__main__").build_parser()


def test_help_has_each_command_with_the_line_of_its_parser() -> None:
    found = {
        (package, name): line
        for commands in TASKS.values()
        for name, (package, line) in commands.items()
    }
    expected = {
        (package, name): line
        for package in WITH_COMMANDS
        for name, line in parsers_of(package)[0].items()
    }
    assert found == {key: line for key, line in expected.items() if key not in FOR_RUNS}
    assert expected.keys() >= FOR_RUNS
    assert len(PACKAGES) == len(found)


def test_each_command_has_the_usage_of_presage(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("build", "train", "plan", "completion"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: presage {command} ")


def test_presage_runs_the_command_of_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such-job.yaml"]) == 1
    assert "no-such-job.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("bild", "did you mean 'build'? If not, run presage --help for all commands"),
        ("zzz", "run presage --help for all commands"),
    ],
)
def test_unknown_command_is_one_line_with_the_nearest_name(
    command: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    line = f"presage: error: unknown command: {command!r}; {advice}\n"
    assert capsys.readouterr().err == line


def test_help_of_a_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], []):
        assert main(words) == 0
        assert capsys.readouterr().out == help_text() + "\n"
    with pytest.raises(SystemExit):
        main(["help", "build"])
    assert "\n\nBuild a dataset from raw files\n\n" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("presage ")


def test_missing_arguments_are_one_line_with_the_way_to_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["build", "job.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "presage build: error: the following arguments are required: --input, --output; "
        "see presage build --help\n"
    )


@pytest.mark.slow
def test_help_imports_no_library() -> None:
    program = (
        "import json, sys; from presage.__main__ import main; status = main(['--help']); "
        f"print(json.dumps([status, [n for n in {LIGHT} if n in sys.modules]]))"
    )
    with without_forking():
        printed = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
    text, _, last = printed.rstrip().rpartition("\n")
    assert text == help_text()
    assert json.loads(last) == [0, []]


# Completion, by the shells themselves.


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    parser = parser_of_all()
    return {shell: shtab.complete(parser, shell) for shell in ("bash", "zsh")}


def test_completion_has_the_commands_and_options_of_the_parsers() -> None:
    completed = subparsers_of(parser_of_all())
    assert set(completed) == {*PACKAGES, "completion"}
    for package in WITH_COMMANDS:
        for command, parser in subparsers_of(import_parser(package)).items():
            if PACKAGES.get(command) == package:
                usage = parser.format_usage().partition(f" {command} ")[2].split()
                assert (
                    completed[command].format_usage().partition(f" {command} ")[2].split() == usage
                )


def test_completion_names_packages_whose_imports_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_torch(name: str) -> ModuleType:
        if name == "presage.trainer.__main__":
            raise ModuleNotFoundError("No module named 'torch'")
        return import_module(name)

    monkeypatch.setattr(completion, "import_module", without_torch)
    parsers = subparsers_of(parser_of_all())
    assert capsys.readouterr().err == "options of trainer are left out: No module named 'torch'\n"
    assert set(parsers) == {*PACKAGES, "completion"}
    assert "--dataset" not in parsers["train"].format_help()


def test_completion_prints_the_script(
    scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for shell, script in scripts.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == f"{script}\n"
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "choose from" in capsys.readouterr().err


LINES = {
    "presage bui": ["build"],
    "presage re": ["replay", "replica", "report", "retrain", "rewrite"],
    "presage train --emb": ["--embedding"],
    "presage train --embedding l": ["lru"],
    "presage rewrite --layout ": ["flat", "star"],
    "presage completion ": ["bash", "zsh"],
    "presage build jo": [],  # a file, which bash completes itself
}


def test_bash_completes_words(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text(scripts["bash"])
    program = "source ./script; complete -p presage\n"
    for words in (line.split(" ") for line in LINES):
        quoted = " ".join(word or "''" for word in words)
        program += (
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); _shtab_presage; "
            'echo "${COMPREPLY[@]}"\n'
        )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    first, *completions = done.stdout.splitlines()
    assert first == "complete -o bashdefault -F _shtab_presage presage"
    assert [sorted(line.split()) for line in completions] == list(LINES.values())


BASH_STARTUP = r"""
source ./script
show() { printf '%s\n' "$READLINE_LINE" > line; }
bind -x '"\C-t": show'
"""
ZSH_STARTUP = r"""
autoload -Uz compinit && compinit -u -d dump
source ./script
show() { print -r -- "$BUFFER" > line }
zle -N show
bindkey '^I' expand-or-complete
bindkey '^T' show
"""
SHELLS = {
    "bash": (".bashrc", BASH_STARTUP, ["--rcfile", ".bashrc", "-i"]),
    "zsh": (".zshrc", ZSH_STARTUP, ["-i"]),
}


@contextmanager
def terminal(shell: str, folder: Path, script: str) -> Iterator[Callable[[str], str]]:
    """Run an interactive shell; yield a function that types a text and returns the line."""
    name, startup, options = SHELLS[shell]
    (folder / "script").write_text(script)
    (folder / name).write_text(startup)
    file, other = pty.openpty()
    variables = {"PATH": os.environ["PATH"], "TERM": "dumb", "ZDOTDIR": str(folder)}
    process = subprocess.Popen(
        ["setsid", "--ctty", shell, *options],
        stdin=other,
        stdout=other,
        stderr=other,
        cwd=folder,
        env={**variables, "HOME": str(folder), "PS1": "> "},
    )
    os.close(other)

    def line_after(text: str) -> str:
        (folder / "line").unlink(missing_ok=True)
        os.write(file, b"\x15" + text.encode() + b"\x14")  # ^U empties the line
        ends = time.monotonic() + 30
        while not (folder / "line").exists() or not (folder / "line").read_text():
            assert time.monotonic() < ends, f"{shell} does not answer"
            if select.select([file], [], [], 0.01)[0]:
                os.read(file, 1 << 16)
        return (folder / "line").read_text().rstrip("\n")

    try:
        yield line_after
    finally:
        os.close(file)
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_an_interactive_shell(
    shell: str, scripts: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, and there is none")
    (tmp_path / "job.yaml").touch()
    with terminal(shell, tmp_path, scripts[shell]) as line_after:
        assert line_after("presage bui\t").rstrip() == "presage build"
        assert line_after("presage train --emb\t").rstrip() == "presage train --embedding"
        assert line_after("presage train --embedding l\t").rstrip().endswith(" lru")
        assert line_after("presage build job\t").rstrip() == "presage build job.yaml"


@pytest.mark.parametrize("module", ["presage", *(f"presage.{name}" for name in WITH_COMMANDS)])
def test_packages_of_the_user_have_names_of_their_own(
    module: str, repository: Path, tmp_path: Path
) -> None:
    for name in ("schemas", *WITH_COMMANDS):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('of the user')\n")
    with without_forking():
        completed = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.parametrize("package", WITH_COMMANDS)
def test_package_of_a_checkout_runs_by_its_folder_without_second_copies(
    package: str, repository: Path
) -> None:
    code = (
        "import os, runpy, sys; from pathlib import Path; end = os._exit\n"
        "def check(status):\n"
        "    names = {'pipelines', 'scheduler', 'schemas', 'trainer'}\n"
        "    print(*sorted(n for n in sys.modules if n.split('.')[0] in names), flush=True)\n"
        "    end(status)\n"
        f"os._exit = check; sys.argv = ['-', '--help']; runpy._run_module_as_main({package!r})"
    )
    with without_forking():
        completed = subprocess.run(
            [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
        )
    assert completed.stdout.splitlines()[-1] == package, "its __init__, which is a docstring"
