"""Fixtures that every test may use, and the profile of hypothesis."""

import hashlib
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import fork_server

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # both are read when torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers of the tests use all cores
STARTED = time.monotonic()
BUILD_TIMEOUT_SEC = 1800
"""Of a test whose fixture may have to build the servers of a cluster first."""

# The same examples each time, and no deadline: speed is for benchmarks.
settings.register_profile(
    "presage", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("presage")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run be a part of the tests that is drawn."""
    parser.addoption("--draw", metavar="SEED", help="run the tests in an order drawn by a seed")
    parser.addoption("--seconds", type=float, help="skip the tests that would begin later")


def pytest_configure() -> None:
    """Choose the directory of the fork server."""
    fork_server.start_session()


def pytest_unconfigure() -> None:
    """Remove it."""
    fork_server.end_session()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs and traces that may lie beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data in ../shared/data beside the checkout, and there is none")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin after the time of the run."""
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.monotonic() - STARTED > seconds:
        pytest.skip(f"the {seconds:.0f} s of this run are over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order, or put files with many slow tests first, so that workers end together.

    Also give the first build of a cluster its time, and skip what is marked `gpu` without a driver.
    """
    seed = config.getoption("draw")
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    if seed is None:
        items.sort(key=lambda item: -slow[item.path])
    else:
        items.sort(key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_SEC))
    if shutil.which("nvidia-smi"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device, and nvidia-smi is absent")
            )
