"""The Dockerfiles, without a daemon: their rules hold, and what they install and copy starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.external_tools import install_wheel

IMAGES = {
    "worker": ("schemas", "pipelines"),
    "jobs": ("schemas", "pipelines", "trainer", "scheduler"),
    "scheduler": ("schemas", "scheduler"),
    "template": ("schemas", "pipelines"),
}
"""The packages that run in each image; the wheel has all of them."""
WHEEL = "dist"
"""The folder of `make wheel`."""
GIVEN = "${LAUNCHER}"
"""A base without a default: its registry is Google's own."""
EXACT = re.compile(r"[a-z0-9._/-]+(:[\w.-]*\d+\.\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})")
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, f"{name}."):
        # Only what the extra `score` brings runs an exported model.
        if not found.name.endswith("__main__") and "score" not in found.name:
            importlib.import_module(found.name)
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A Dockerfile; instructions in order, arguments with the values of ARG."""

    instructions: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        return [argument for instruction, argument in self.instructions if instruction == name]

    @property
    def copied(self) -> list[tuple[str, str]]:
        """Sources and places of what comes from the source tree."""
        found = [shlex.split(argument) for argument in self.all("COPY")]
        return [(words[0], words[1]) for words in found if not words[0].startswith("--")]

    @property
    def lock(self) -> str:
        return next(source for source, _ in self.copied if source.endswith(".lock"))


def read_image(path: Path) -> Image:
    lines = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    values, found = dict[str, str](), list[tuple[str, str]]()
    for line in filter(None, map(str.strip, lines.splitlines())):
        instruction, argument = line.split(maxsplit=1)
        for name, value in values.items():
            argument = argument.replace(f"${{{name}}}", value)
        if instruction == "ARG" and "=" in argument:
            name, _, values[name] = argument.partition("=")
        found.append((instruction, argument))
    return Image(tuple(found))


@pytest.fixture(params=IMAGES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def image(name: str, repository: Path) -> Image:
    return read_image(repository / "deploy" / "images" / f"{name}.Dockerfile")


def test_no_dockerfile_is_left_out(repository: Path) -> None:
    found = {path.name for path in (repository / "deploy" / "images").glob("*.Dockerfile")}
    assert found == {f"{name}.Dockerfile" for name in IMAGES}


def test_bases_are_of_one_exact_version(image: Image) -> None:
    bases = [argument.split()[0] for argument in image.all("FROM")]
    assert bases
    assert [base for base in bases if base != GIVEN and not EXACT.fullmatch(base)] == []


def test_processes_are_not_root(image: Image) -> None:
    place = max(i for i, (name, _) in enumerate(image.instructions) if name == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.instructions[place][1])
    assert {"RUN", "COPY"}.isdisjoint(name for name, _ in image.instructions[place:])


def test_packages_come_from_a_lock_with_hashes(image: Image) -> None:
    locked, own = (shlex.split(argument) for argument in image.all("RUN"))
    assert "--require-hashes" in locked
    place = dict(image.copied)[image.lock]
    assert locked[locked.index("--requirement") + 1] == f"{place}{image.lock}"
    assert {"--no-deps", "--no-index"} < set(own)
    assert own[own.index("--find-links") + 1] == dict(image.copied)[WHEEL]
    assert own[-1] == "presage"


def test_what_is_copied_is_tracked_and_in_the_context(image: Image, repository: Path) -> None:
    allowed = (repository / ".dockerignore").read_text().splitlines()
    assert f"!{WHEEL}" in allowed
    for source, _ in image.copied:
        if source == WHEEL:
            continue
        listed = subprocess.run(
            ["git", "ls-files", source], cwd=repository, capture_output=True, text=True, check=True
        )
        assert listed.stdout, source
        wanted = "requirements-*.lock" if source.endswith(".lock") else source
        assert f"!{wanted}" in allowed


def test_torch_and_beam_are_where_they_are_needed_only(repository: Path) -> None:
    names = {
        name: set(re.findall(r"^([a-z0-9._-]+)==", (repository / image.lock).read_text(), re.M))
        for name in IMAGES
        for image in [read_image(repository / "deploy" / "images" / f"{name}.Dockerfile")]
    }
    assert {n for n, found in names.items() if "torch" in found} == {"jobs"}
    assert {n for n, found in names.items() if "apache-beam" in found} == {
        "worker",
        "jobs",
        "template",
    }
    assert [n for n, found in names.items() if {"pytest", "ruff", "pyright"} & found] == []


def test_workers_beside_flink_run_what_their_image_holds(repository: Path) -> None:
    path = repository / "deploy" / "kubernetes" / "flink" / "session.yaml"
    spec = yaml.safe_load(path.read_text())["spec"]
    (workers,) = spec["taskManager"]["podTemplate"]["spec"]["containers"]
    image = read_image(repository / "deploy" / "images" / "worker.Dockerfile")
    places = {f"{place}{Path(source).name}" for source, place in image.copied}
    assert workers["command"][2] in places
    version = re.search(
        r"beam-runners-flink-([\d.]+)", (repository / "deploy/flink/pom.xml").read_text()
    )
    assert version is not None
    assert spec["image"].startswith(f"flink:{version[1]}.")
    assert spec["flinkVersion"] == f"v{version[1].replace('.', '_')}"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_is_in_an_image_starts(
    name: str, image: Image, repository: Path, tmp_path: Path
) -> None:
    """Each module is imported, with the packages and the files of the image alone."""
    python = install_wheel(repository, repository / image.lock) / "python"
    for source, _ in image.copied:
        if source.endswith(".py"):
            shutil.copy(repository / source, tmp_path)
            run([python, "-c", f"import {Path(source).stem}"], tmp_path)
    run([python, "-c", IMPORT_ALL, *(f"presage.{package}" for package in IMAGES[name])], tmp_path)
    for package in IMAGES[name]:
        if (repository / package / "__main__.py").exists():
            assert "usage" in run([python, "-m", f"presage.{package}", "--help"], tmp_path)
    entry = json.loads(image.all("ENTRYPOINT")[-1])
    if entry[0] == "python":
        words = [*entry[1:], *json.loads(image.all("CMD")[-1])]
        assert "usage" in run([python, *words], tmp_path)


def run(words: Sequence[str | Path], folder: Path) -> str:
    """Run a command that finds our packages in its environment only; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
