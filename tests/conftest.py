"""Common fixtures, command-line options, and the Hypothesis profile."""

import hashlib
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import fork_server
from tests.durations import Durations, file_of, part_of_files
from tests.object_store import Store, shared_store

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers of the tests use all cores
STARTED = time.monotonic()
BUILD_TIMEOUT_SEC = 1800
"""Timeout of a test whose fixture may have to build servers."""
SERVERS = {"cluster", "s3_store", "gcs_store", "azure_store"}
"""Fixtures that build servers."""
RARE_SERVERS = {"cluster", "gcs_store", "azure_store", "gs", "az"}
"""Fixtures and parameters whose tests are nightly: `make test` has S3 alone."""

# The same examples in every run, and no deadline: speed is measured by benchmarks.
settings.register_profile(
    "presage",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("presage"), max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "presage"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options to run a random part of the tests."""
    parser.addoption("--draw", metavar="SEED", help="run the tests in a random order")
    parser.addoption("--seconds", type=float, help="skip tests that would start after this time")
    parser.addoption("--part", metavar="K/N", help="run the nightly tests of one part of N, from 0")
    parser.addoption("--write-seconds", action="store_true", help="of the run into the table")


def pytest_configure(config: pytest.Config) -> None:
    """Create the directory of the fork server; add up the seconds of the tests."""
    fork_server.start_session()
    if not hasattr(config, "workerinput"):  # not a worker of xdist
        config.pluginmanager.register(Durations(writes=bool(config.getoption("write_seconds"))))


def pytest_unconfigure() -> None:
    """Remove the directory of the fork server."""
    fork_server.end_session()


@pytest.fixture(scope="session")
def s3_store() -> Store:
    """An S3 store that all tests share; each works in a `new_url()` of its own."""
    return shared_store("s3")


@pytest.fixture(scope="session")
def gcs_store() -> Store:
    """The same for Google Cloud Storage."""
    return shared_store("gs")


@pytest.fixture(scope="session")
def azure_store() -> Store:
    """The same for Azure."""
    return shared_store("az")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs and traces beside the checkout; skips the test if it is missing."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data in ../shared/data beside the checkout, and there is none")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would start after `--seconds`."""
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.monotonic() - STARTED > seconds:
        pytest.skip(f"the {seconds:.0f} s of this run are over")


def _names(item: pytest.Item) -> set[str]:
    """Return the fixtures of a test, and its parameters that are texts."""
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters else ()
    return {*getattr(item, "fixturenames", ()), *(v for v in values if isinstance(v, str))}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by `--draw`, or files with many slow tests first to balance the workers.

    Also keep the files of `--part`, extend the timeout of tests with servers, and skip tests marked
    `gpu` without a driver.
    """
    for item in items:
        if RARE_SERVERS & _names(item):
            item.add_marker(pytest.mark.nightly)
    part = config.getoption("part")
    if part is not None:
        number, count = map(int, part.split("/"))
        nightly = [
            item
            for item in items
            if item.get_closest_marker("nightly") and not item.get_closest_marker("chaos")
        ]
        files = part_of_files({file_of(item) for item in nightly}, number, count)
        items[:] = [item for item in nightly if file_of(item) in files]
    seed = config.getoption("draw")
    marked = {m: [i.path for i in items if i.get_closest_marker(m)] for m in ("slow", "nightly")}
    slow = Counter(marked["slow"] + marked["nightly"])
    if seed is None:
        items.sort(key=lambda item: -slow[item.path])
    else:
        items.sort(key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())
    for item in items:
        if SERVERS & _names(item):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_SEC))
    if shutil.which("nvidia-smi"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device, and nvidia-smi is absent")
            )
