"""Fixtures that every test may use, and the profile of hypothesis."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD_TIMEOUT_SEC = 1800
"""Of a test whose fixture may have to build the servers of a cluster first."""

# The same examples each time, and no deadline: speed is for benchmarks.
settings.register_profile(
    "presage", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("presage")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with many slow tests first, so that workers end together.

    Also give the first build of a cluster its time, and skip what is marked `gpu` without a driver.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
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
