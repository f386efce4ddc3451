"""What the documents show is run: each `console` and `python` block, in a copy of the tree."""

import doctest
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from presage.commands import PACKAGES as OF_PRESAGE
from tests.documents import (
    Block,
    anchors,
    arguments,
    blocks,
    commands,
    named_anchors,
    named_paths,
    named_tests,
)
from tests.fork_server import write_python_wrapper

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("pipelines", "scheduler", "trainer")
DOCUMENTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in (
        "README.md",
        "docs/*.md",
        "docs/decisions/*.md",
        "*/README.md",
        "pipelines/*/README.md",
        "deploy/*/README.md",
        "schemas/FORMAT.md",
        "schemas/formats/*.md",
    )
    for path in REPOSITORY.glob(pattern)
)
DEMO_SAMPLES = "num_samples: 200000"
CHECKER = doctest.OutputChecker()
LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def documents_to_run() -> list[str]:
    """Return the documents that have blocks to run."""
    return [
        name
        for name in DOCUMENTS
        if any(block.reason is None for block in blocks((REPOSITORY / name).read_text()))
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the working tree with a smaller demo; no ignored files, and the same `.venv`."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    copy = tmp_path / "presage"
    for name in filter(None, listing.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    write_environment(copy / ".venv")
    for package in (
        "schemas/kernels",
        "trainer/data",
        "trainer/embedding/kernels",
        "trainer/slots",
    ):
        for module in (REPOSITORY / package).glob("*/*.so"):
            target = copy / module.relative_to(REPOSITORY)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(module, target)
    (copy / "build").mkdir()
    (copy / "build" / "installed").touch()  # make builds nothing
    demo = copy / "schemas" / "demo" / "job.yaml"
    assert demo.read_text().count(DEMO_SAMPLES) == 1
    demo.write_text(demo.read_text().replace(DEMO_SAMPLES, "num_samples: 20000"))
    return copy


def write_environment(environment: Path) -> None:
    """Write a virtual environment with the tools of this one, whose `python` forks."""
    (environment / "bin").mkdir(parents=True)
    for tool in (REPOSITORY / ".venv" / "bin").iterdir():
        if not tool.name.startswith(("presage", "python")):
            (environment / "bin" / tool.name).symlink_to(tool)
    write_python_wrapper(environment / "bin" / "python")
    presage = environment / "bin" / "presage"
    presage.write_text('#!/bin/sh\nexec python -m presage "$@"\n')
    presage.chmod(0o755)
    (environment / "synced").touch()  # make installs nothing


def variables_of(tree: Path) -> dict[str, str]:
    """Return the environment of commands in the copy: the tools of `.venv` come first."""
    path = f"{tree / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # A make inside must not take itself for a part of the one that runs the tests.
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return {**outer, "PATH": path, "PYTHONPATH": str(tree)}


def run(
    words: list[str], folder: Path, variables: dict[str, str], text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return subprocess.run(
        words, cwd=folder, env=variables, input=text, capture_output=True, text=True, check=False
    )


def run_console(block: Block, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run the commands of a block and list those that fail or print something else."""
    problems: list[str] = []
    for command, printed in commands(block.body):
        done = run(["bash", "-euo", "pipefail", "-c", command], folder, variables)
        if done.returncode != 0:
            problems.append(f"{command} exits with {done.returncode}:\n{done.stderr[-2000:]}")
        elif printed and not CHECKER.check_output(printed, done.stdout, LENIENT):
            problems.append(f"{command} prints\n{done.stdout}instead of\n{printed}")
    return problems


def run_python(block: Block, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run a block as a script, or as a doctest where it shows prompts."""
    if ">>> " in block.body:
        page = folder / "block.txt"
        page.write_text(block.body)
        done = run(["python", "-m", "doctest", "-o", "ELLIPSIS", page.name], folder, variables)
    else:
        done = run(["python", "-"], folder, variables, block.body)
    return [] if done.returncode == 0 else [f"{block.body}{done.stdout}{done.stderr[-2000:]}"]


def run_block(block: Block, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run a block; list what fails or prints something else."""
    runner = run_console if block.language == "console" else run_python
    return runner(block, folder, variables)


@pytest.mark.nightly
@pytest.mark.parametrize("name", documents_to_run())
@pytest.mark.timeout(1800)
def test_blocks_of_document_run_as_shown(name: str, tree: Path) -> None:
    problems: list[str] = []
    for block in blocks((tree / name).read_text()):
        if block.reason is None:
            problems += [
                f"{name}:{block.line}: {text}"
                for text in run_block(block, tree, variables_of(tree))
            ]
    assert not problems, "\n".join(problems)


def parse(words: list[str]) -> None:
    """Hand one command to the parser that would read it; a wrong one raises SystemExit."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        assert not unknown, f"make has no target {unknown}"
    elif words[0] == "presage" and words[1] in OF_PRESAGE:
        parse(["python", "-m", OF_PRESAGE[words[1]], *words[1:]])
    elif words[:2] == ["python", "-m"] and words[2].removeprefix("presage.") in PACKAGES:
        words[2] = words[2].removeprefix("presage.")
        parser = importlib.import_module(f"presage.{words[2]}.__main__").build_parser()
        if words[2] == "pipelines":  # the rest is for Beam
            parser.parse_known_args(words[3:])
        else:
            parser.parse_args(words[3:])


def test_blocks_that_are_not_run_parse() -> None:
    problems: list[str] = []
    for name in DOCUMENTS:
        for block in blocks((REPOSITORY / name).read_text()):
            if block.reason is None:
                continue
            if block.language == "python":
                examples = doctest.DocTestParser().get_examples(block.body)
                source = "".join(example.source for example in examples) or block.body
                compile(source, f"{name}:{block.line}", "exec")
                continue
            for command, _ in commands(block.body):
                try:
                    parse(arguments(command))
                except SystemExit:
                    problems.append(f"{name}:{block.line}: {command} does not parse")
    assert not problems, "\n".join(problems)


def test_documents_name_only_files_and_tests_that_exist() -> None:
    folders = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"demo"}
    missing: list[str] = []
    for name in DOCUMENTS:
        text, here = (REPOSITORY / name).read_text(), (REPOSITORY / name).parent
        missing += [
            f"{name}: {path}"
            for path in named_paths(text, folders)
            if not (here / path).exists() and not (REPOSITORY / path).exists()
        ]
        missing += [
            f"{name}: {path}::{test}"
            for path, test in named_tests(text)
            if not (REPOSITORY / path).is_file()
            or f"def {test}(" not in (REPOSITORY / path).read_text()
        ]
    assert missing == []


def test_documents_link_only_to_headings_that_exist() -> None:
    missing: list[str] = []
    for name in DOCUMENTS:
        page = REPOSITORY / name
        missing += [
            f"{name}: {path}#{title}"
            for path, title in named_anchors(page.read_text())
            if title not in anchors((page.parent / path if path else page).read_text())
        ]
    assert missing == []


def test_named_tests_are_found_and_plain_files_are_not() -> None:
    text = "shown by `tests/test_a.py::test_b` and `tests/test_a.py`"
    assert named_tests(text) == [("tests/test_a.py", "test_b")]


def test_documents_are_found() -> None:
    assert {"README.md", "schemas/README.md", "docs/README.md"} <= set(DOCUMENTS)


@pytest.mark.nightly
def test_run_console_of_failing_and_wrong_commands_names_both(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    text = "```console\n$ echo one \\\n    two\none ...\n$ false\n$ echo three\nfour\n```\n"
    problems = run_console(blocks(text)[0], tmp_path, variables_of(tmp_path))
    assert problems == ["false exits with 1:\n", "echo three prints\nthree\ninstead of\nfour\n"]


def test_commands_with_a_text_of_lines_end_at_its_word() -> None:
    body = "$ cat <<'END' > a\n$ one\n  two\\\nEND\nprinted\n$ cat a\n"
    first = "cat <<'END' > a\n$ one\n  two\\\nEND"
    assert commands(body) == [(first, "printed\n"), ("cat a", "")]


@pytest.mark.nightly
def test_run_python_of_wrong_doctest_names_it(tmp_path: Path) -> None:
    write_environment(tmp_path / ".venv")
    right, wrong = blocks("```python\n>>> 1 + 1\n2\n```\n```python\n>>> 1 + 1\n3\n```\n")
    assert run_python(right, tmp_path, variables_of(tmp_path)) == []
    assert len(run_python(wrong, tmp_path, variables_of(tmp_path))) == 1


def test_blocks_with_unknown_option_raise() -> None:
    message = (
        "block must be opened by its language, `norun=<reason>`, "
        "got info='console later' in line 1; mend its first line"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        blocks("```console later\n$ true\n```\n")


def test_parse_of_unknown_make_target_fails() -> None:
    parse(["make", "test", "PYTHON=python3.11"])
    with pytest.raises(AssertionError, match=re.escape("make has no target ['tset']")):
        parse(["make", "tset"])
