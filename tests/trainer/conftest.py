"""Threads that sleep while they wait, and patience: tests share their cores with other work."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Wait for agents of checkpoints in this process until they have written and ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.flash.saver._END_SEC", 300.0)
        yield
