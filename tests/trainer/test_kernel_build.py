"""The kernel is compiled once, by whoever comes first, and never in the way."""

import logging
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from schemas.kernels import build
from schemas.kernels.build import COMPILERS, build_library, cache_folder
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, run_job
from trainer.embedding.kernels import compiled
from trainer.embedding.kernels.compiled import (
    EMBEDDING,
    CompiledKernels,
    clear_cached_kernels,
    interactions_of,
    kernels_of,
)
from trainer.embedding.kernels.torch_ops import TorchInteractions, TorchKernels

UNOPTIMIZED = replace(EMBEDDING, flags=(*EMBEDDING.flags, "-O0"))
"""Compiles in a fifth of the time."""


def build_into(folder: str) -> str:
    return str(build_library(Path(folder), COMPILERS, UNOPTIMIZED))


@pytest.mark.slow
def test_library_is_made_once_and_found_again(tmp_path: Path) -> None:
    made = build_library(tmp_path / "cache", COMPILERS, UNOPTIMIZED)
    first = made.stat().st_mtime_ns
    assert build_library(tmp_path / "cache", ("no-such-compiler",), UNOPTIMIZED) == made
    assert made.stat().st_mtime_ns == first
    assert list((tmp_path / "cache").iterdir()) == [made]
    CompiledKernels(made)


@pytest.mark.slow
def test_processes_that_build_at_once_share_one_library(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(build_into, [str(tmp_path)] * 2)
    assert len(set(found)) == 1
    assert [str(path) for path in tmp_path.iterdir()] == found[:1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_library_is_made_elsewhere_when_the_cache_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert build_library(tmp_path / "cache", COMPILERS, UNOPTIMIZED).is_file()


@pytest.mark.slow
def test_library_is_made_elsewhere_when_the_cache_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert build_library(tmp_path / "cache", COMPILERS, UNOPTIMIZED).is_file()


@pytest.mark.slow
def test_library_of_another_source_has_another_name(tmp_path: Path) -> None:
    other = replace(UNOPTIMIZED, flags=(*UNOPTIMIZED.flags, "-DOTHER"))
    assert len({build_library(tmp_path, COMPILERS, what) for what in (UNOPTIMIZED, other)}) == 2


def test_cache_folder_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)


@pytest.mark.slow
def test_without_a_compiler_torch_is_used_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset(tmp_path / "dataset", write_job(tmp_path / "job"), SEGMENTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    clear_cached_kernels()
    try:
        with caplog.at_level(logging.WARNING):
            run_job(tmp_path / "job" / "job.yaml", dataset, tmp_path / "run", steps=3)
        assert isinstance(kernels_of("compiled"), TorchKernels)
        assert isinstance(interactions_of("compiled"), TorchInteractions)
    finally:
        clear_cached_kernels()
    assert [r.getMessage() for r in caplog.records if r.name == build.__name__] == [
        "kernels cannot be compiled: no compiler among g++, c++, clang++; slower torch operators "
        "are used, install g++, or set train.kernels to torch"
    ]


def test_compiler_that_refuses_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = replace(EMBEDDING, flags=("-fno-such-flag",))
    monkeypatch.setattr(compiled, "EMBEDDING", refused)
    with pytest.raises(CalledProcessError):
        build_library(tmp_path, COMPILERS, refused)
    clear_cached_kernels()
    try:
        assert isinstance(kernels_of("compiled"), TorchKernels)
    finally:
        clear_cached_kernels()
    assert "no-such-flag" in caplog.text


def test_torch_is_used_when_the_job_says_so() -> None:
    assert isinstance(kernels_of("torch"), TorchKernels)
    assert isinstance(kernels_of("compiled"), CompiledKernels)
