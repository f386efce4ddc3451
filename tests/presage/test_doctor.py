"""The doctor's findings on machines with real deficiencies."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from presage import doctor
from presage.doctor import CHECKS, SOURCES, CheckResult, Machine, examine, format_finding
from presage.scheduler.__main__ import main
from tests.shared import json_of

NOW = 1_767_225_600.0
CLUSTER = """\
namespace: presage
image: presage
kubeconfig: {kubeconfig}
"""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


def check(name: str, **fields: Any) -> CheckResult:
    """Run one check on a machine with these properties."""
    defaults: dict[str, Any] = {
        "environment": {},
        "sites": (),
        "python": (3, 11),
        "output": Path(),
        "now_sec": NOW,
    }
    (finding,) = [c.run(Machine(**{**defaults, **fields})) for c in CHECKS if c.name == name]
    return finding


def package(site: Path, name: str, version: str) -> None:
    """Install a package's metadata, as pip leaves it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def program(folder: Path, name: str, text: str) -> dict[str, str]:
    """Put a program on a PATH of its own; return an environment with it alone."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


def closed_port() -> int:
    """Return a port of loopback on which nobody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_wheels_of_other_versions_and_missing_ones_are_named(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    hashes = "\\\n    --hash=sha256:00\n"
    lock.write_text(f"numpy==2.4.6 {hashes}Torch==2.13.0 {hashes}rich==14.0 {hashes}")
    package(tmp_path / "site", "numpy", "2.3.0")
    package(tmp_path / "site", "torch", "2.13.0+cpu")
    found = check("wheels", lock=lock, sites=(str(tmp_path / "site"),))
    assert format_finding(found) == (
        "lacks   wheels: numpy 2.3.0 instead of 2.4.6; no rich 14.0 (must have the versions of "
        "some.lock); run make setup, or install Presage again (docs/install.md)"
    )
    package(tmp_path / "first", "numpy", "2.4.6")
    package(tmp_path / "first", "rich", "14.0")
    both = (str(tmp_path / "first"), str(tmp_path / "site"))
    assert check("wheels", lock=lock, sites=both).state == "ok"
    assert "no lock" in check("wheels", lock=tmp_path / "none.lock", sites=both).found


def test_without_a_source_tree_the_metadata_name_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOCK", tmp_path / "none.lock")
    package(tmp_path, "presage", "0.1.0")
    with (tmp_path / "presage-0.1.0.dist-info" / "METADATA").open("a") as file:
        for line in ("numpy==2.4.6", "rich>=14", 'torch==2.13.0; extra == "trainer"'):
            file.write(f"Requires-Dist: {line}\n")
    package(tmp_path, "numpy", "2.4.6")
    options: dict[str, Any] = {"lock": tmp_path / "none.lock", "sites": (str(tmp_path),)}
    assert check("wheels", **options).found == "all 1"  # torch is of an extra
    package(tmp_path, "torch", "2.12.0")
    assert check("wheels", **options).found == "torch 2.12.0 instead of 2.13.0"


def test_another_python_lacks() -> None:
    assert check("python", python=(3, 11)).ok
    assert check("python", python=(3, 13)).ok
    line = format_finding(check("python", python=(3, 14)))
    assert line.startswith("lacks   python: 3.14 (must be 3.11 to 3.13); ")


def test_shared_memory_that_is_small_or_absent_lacks(tmp_path: Path) -> None:
    assert check("shared memory", least_shared_bytes=1).ok
    small = check("shared memory", shared_memory=tmp_path, least_shared_bytes=1 << 60)
    assert (small.state, small.must) == ("lacks", f"have 1073741824.0 GiB free in {tmp_path}")
    assert check("shared memory", shared_memory=tmp_path / "none").found == "no such folder"


def test_disk_that_is_full_or_not_writable_lacks(tmp_path: Path) -> None:
    assert check("disk", output=tmp_path / "not" / "yet", least_disk_bytes=1).ok
    assert list(tmp_path.iterdir()) == []
    assert not check("disk", output=tmp_path, least_disk_bytes=1 << 60).ok
    written = check(
        "disk", output=Path("/proc/self"), least_disk_bytes=0
    )  # a folder in which nobody may make a file
    assert not written.ok
    assert "cannot be written" in written.found


def test_port_that_is_taken_lacks_and_is_free_again_afterwards() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = int(server.getsockname()[1])
        finding = check("ports", port=port)
        assert (finding.state, finding.found) == ("lacks", "address already in use")
        assert finding.must == f"have port {port} free on loopback"
    assert check("ports", port=port).ok
    assert check("ports", port=0).ok


def test_clock_that_is_behind_files_or_the_log_lacks(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    stamp.touch()
    now = stamp.stat().st_mtime
    assert check("clock", output=tmp_path, now_sec=now).ok
    assert re.search(
        r"files 36\d\d\.\d s ahead", check("clock", output=tmp_path, now_sec=now - 3600).found
    )
    assert re.search(
        r"files \d+\.\d s behind", check("clock", output=tmp_path, now_sec=now + 60).found
    )
    log = tmp_path / "scheduler.jsonl"
    event, torn = {"event": "Looked", "time_sec": now + 90}, '{"event": "Lo'
    log.write_text(f'{json.dumps(event)}\n{{"decision": {{"time_sec": 1}}}}\n{torn}')
    assert re.fullmatch(
        r"scheduler\.jsonl (89|90)\.\d s ahead", check("clock", output=tmp_path, now_sec=now).found
    )
    event["time_sec"] = now - 5
    log.write_text(f"{json.dumps(event)}\n")
    assert check("clock", output=tmp_path, now_sec=now).ok


JAVAS = {
    "17": ("echo 'openjdk version \"17.0.15\" 2025-04-15' >&2", True),
    "8": ("echo 'java version \"1.8.0_392\"' >&2", False),
    "25": ("echo 'openjdk version \"25\" 2025-09-16' >&2", False),
    "one that fails": ("exit 3", False),
}


@pytest.mark.parametrize(("text", "ok"), JAVAS.values(), ids=JAVAS.keys())
def test_java_of_a_version_that_flink_supports_is_enough(
    text: str, ok: bool, tmp_path: Path
) -> None:
    environment = program(tmp_path / "bin", "java", text)
    assert check("java", environment=environment).ok == ok


def test_what_is_optional_is_absent_unless_it_is_needed(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert format_finding(check("java", environment=environment)) == (
        "absent  java: none on PATH (must be of version 11 to 17, for builds on Flink "
        "(docs/flink.md)); install a JDK of version 17, or put it first on PATH"
    )
    for name in ("java", "flink jars"):
        assert check(name, environment=environment, needed={"flink"}).state == "lacks"
    assert check("gpu", environment=environment).state == "absent"


def test_flink_jars_are_found_in_the_cache_of_their_versions(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    sources = SOURCES / "deploy" / "flink"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import artifacts; "
        "print(artifacts.cache_directory())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(sources)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    Path(printed.strip()).mkdir(parents=True)
    assert check("flink jars", environment=environment).ok


def test_gpu_needs_the_driver_and_the_packages(tmp_path: Path) -> None:
    environment = program(tmp_path / "bin", "nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    assert not check("gpu", environment=environment, sites=(str(tmp_path),)).ok
    package(tmp_path / "site", "fbgemm-gpu", "1.8.0")
    assert check("gpu", environment=environment, sites=(str(tmp_path / "site"),)).ok


def test_kubernetes_that_does_not_answer_lacks(tmp_path: Path) -> None:
    kubeconfig, cluster = tmp_path / "kubeconfig", tmp_path / "cluster.yaml"
    kubeconfig.write_text(KUBECONFIG.format(port=closed_port()))
    cluster.write_text(CLUSTER.format(kubeconfig=kubeconfig))
    found = check("kubernetes", cluster=cluster, output=tmp_path, needed={"kubernetes"})
    assert found.state == "lacks"
    assert "refused" in found.found.lower()
    assert check("kubernetes", output=tmp_path).state == "absent"
    none = check("kubernetes", cluster=tmp_path / "none.yaml", output=tmp_path)
    assert "none.yaml" in none.found


@pytest.mark.slow
def test_command_says_all_and_fails_where_something_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--output", str(tmp_path), "--least-disk", "1B", "--least-shared", "1B"]
    lock = tmp_path / "empty.lock"
    lock.write_text("")
    report = json_of(main, [*command, "--lock", str(lock), "--json"])
    assert report["ok"]
    names = [finding["name"] for finding in report["findings"]]
    assert len(names) == len(set(names)) == 10
    lock.write_text("no-such-package==1.0\n")
    assert main([*command, "--lock", str(lock)]) == 1
    out, error = capsys.readouterr()
    assert len(out.splitlines()) == 10
    assert error == ("error: machine lacks wheels; see the findings\n")


def test_needs_decide_what_is_a_failure(tmp_path: Path) -> None:
    lock = tmp_path / "empty.lock"
    lock.write_text("")
    machine = Machine(
        environment={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        sites=(), python=(3, 11), output=tmp_path, now_sec=NOW, lock=lock,
    )  # fmt: skip

    def states(findings: list[CheckResult]) -> dict[str, str]:
        return {finding.name: finding.state for finding in findings}

    free = states(examine(machine))
    assert free["flink jars"] == free["java"] == free["gpu"] == free["kubernetes"] == "absent"
    needed = states(examine(replace(machine, needed=frozenset({"flink", "kubernetes"}))))
    assert {name for name in free if free[name] != needed[name]} == {
        "flink jars", "java", "kubernetes",
    }  # fmt: skip
