"""What holds for all tracked files: no path of one machine, no registry, complete locks."""

import re
import subprocess
from pathlib import Path

import pytest

MAX_GOLDEN_BYTES = 100_000
LOCKS = ("requirements.lock", "requirements-pipelines.lock", "requirements-gpu.lock")
MORE_LOCKS = (
    "requirements-dataflow.lock",
    "requirements-jobs.lock",
    "requirements-scheduler.lock",
    "deploy/airflow/requirements.lock",
)
MACHINE_PATH = re.compile(r"(?<![\w.$}*~])/(?:work|root|home|Users)/\w")
REGISTRY = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.org|proxy\.golang\.org|download\.pytorch\.org"
    r"|repo1?\.maven\.)|https?://\S*/(?:simple|packages|maven2)(?:[/\"\s]|$)"
)
PINNED = re.compile(
    r"^[a-z0-9._-]+==\S+ (?:; .+ )?\\(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+$"
)


@pytest.fixture(scope="module")
def tracked(repository: Path) -> list[Path]:
    """Paths of all tracked files that lie in the working tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    )
    paths = (repository / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def lines_that_match(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """List `path:line: text` of each line in which the pattern is found; binary files have none."""
    return [
        f"{path}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_tracked_files_name_no_path_of_one_machine(tracked: list[Path]) -> None:
    found = lines_that_match(MACHINE_PATH, tracked)
    assert not found, "\n".join(found)


def test_tracked_files_name_no_package_registry(tracked: list[Path]) -> None:
    found = lines_that_match(REGISTRY, tracked)
    assert not found, "\n".join(found)


LINES = {
    "a checkout": (MACHINE_PATH, "cd " + "/".join(["", "work", "main"])),
    "a home": (MACHINE_PATH, 'path = "' + "/".join(["", "home", "ada", "log"])),
    "an index": (REGISTRY, "see " + ".".join(["pypi", "org"])),
    "a mirror": (REGISTRY, "--index-url " + "/".join(["https:", "", "mirror.example", "simple"])),
}


@pytest.mark.parametrize(("pattern", "line"), LINES.values(), ids=LINES.keys())
def test_lines_that_match_a_bad_line_finds_it(
    pattern: re.Pattern[str], line: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(f"good\n{line}\n")
    assert lines_that_match(pattern, [path]) == [f"{path}:2: {line}"]


def test_golden_files_stay_small(tracked: list[Path]) -> None:
    golden = {path: path.stat().st_size for path in tracked if "golden" in path.parts}
    assert {path: size for path, size in golden.items() if size >= MAX_GOLDEN_BYTES} == {}


@pytest.mark.parametrize("name", [*LOCKS, *MORE_LOCKS])
def test_lock_pins_each_package_with_hashes_and_names_no_url(repository: Path, name: str) -> None:
    text = (repository / name).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert "://" not in text
    assert [entry for entry in entries if not PINNED.match(entry)] == []


def locked_names(repository: Path, name: str) -> set[str]:
    """The packages that a lock installs."""
    return set(re.findall(r"^([a-z0-9._-]+)==", (repository / name).read_text(), re.MULTILINE))


def test_locks_keep_beam_torch_and_cuda_where_they_belong(repository: Path) -> None:
    cpu, pipelines, gpu = (locked_names(repository, name) for name in LOCKS)
    assert {"torch", "apache-beam", "fbgemm-gpu-cpu"} <= cpu
    assert "fbgemm-gpu" not in cpu
    assert "apache-beam" in pipelines
    assert not {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"} & pipelines
    assert {"torch", "fbgemm-gpu"} <= gpu
    assert "fbgemm-gpu-cpu" not in gpu
