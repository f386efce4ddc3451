"""The servers are built once, whole, and never without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import binary
from tests.cluster.binary import cluster_binary, needs_cluster

pytestmark = pytest.mark.nightly

MODULE = "module kubetest\n\ngo 1.24\n\nrequire (\n\tk8s.io/kubernetes v1.36.3\n)\n"
LACKS = MODULE.replace("v1.36.3", "v1.0.0-nowhere")
PROGRAM = 'package main\n\nfunc main() { println("runs") }\n'
IMPORTS = 'package main\n\nimport _ "k8s.io/kubernetes/nothing"\n\nfunc main() {}\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that takes a second to build, with a cache of its own and no network."""
    folder = tmp_path / "src"
    folder.mkdir()
    write(folder, MODULE, PROGRAM)
    monkeypatch.setattr(binary, "SOURCE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GOPROXY", "off")
    return folder


def write(folder: Path, module: str, program: str) -> None:
    (folder / "go.mod").write_text(module)
    (folder / "go.sum").write_text("")
    (folder / "main.go").write_text(program)


@pytest.mark.slow
@needs_cluster
def test_cluster_binary_of_one_source_is_built_once(source: Path) -> None:
    with pytest.warns(UserWarning, match="built the servers of a cluster in"):
        path = cluster_binary()
    built_at = path.stat().st_mtime_ns
    assert cluster_binary() == path
    assert path.stat().st_mtime_ns == built_at
    assert subprocess.run([path], capture_output=True, check=True).stderr == b"runs\n"
    (source / "main.go").write_text(PROGRAM.replace("runs", "runs anew"))
    with pytest.warns(UserWarning, match="built the servers of a cluster in"):
        assert cluster_binary() != path


@pytest.mark.slow
@needs_cluster
def test_cluster_binary_asked_for_by_two_at_once_is_built_by_one(source: Path) -> None:
    asks = (
        "import pathlib, sys; from tests.cluster import binary\n"
        "binary.SOURCE = pathlib.Path(sys.argv[1])\n"
        "print(binary.cluster_binary())\n"
    )
    command = [sys.executable, "-W", "always", "-c", asks, str(source)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("built the servers" in warned for _, warned in outputs) == 1


@pytest.mark.slow
@needs_cluster
def test_cluster_binary_that_does_not_build_raises(source: Path) -> None:
    (source / "main.go").write_text(PROGRAM.replace("println", "printnothing"))
    with pytest.raises(RuntimeError, match="undefined: printnothing"):
        cluster_binary()


@needs_cluster
def test_cluster_binary_without_its_modules_skips_but_fails_on_ci(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, LACKS, IMPORTS)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs the Go modules"):
        cluster_binary()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="the servers of a cluster must build"):
        cluster_binary()


def test_cluster_binary_without_go_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="needs Go to build"):
        cluster_binary()
