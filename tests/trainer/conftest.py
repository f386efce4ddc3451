"""The small dataset, and patience: tests share their cores with other work."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.runs import small_dataset


@pytest.fixture(scope="session")
def dataset() -> Path:
    """The small dataset, which no test changes."""
    return small_dataset()


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Wait for agents of checkpoints in this process until they have written and ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.checkpoint.manager._AGENT_EXIT_SEC", 300.0)
        yield
