"""The small dataset, and patience: tests share their cores with other work."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.fake_device import to_fake_device
from tests.trainer.runs import reference_run, small_dataset


@pytest.fixture(scope="session")
def dataset() -> Path:
    """The small dataset, which no test changes."""
    return small_dataset()


@pytest.fixture(scope="session")
def reference() -> Path:
    """The run of one process, which no test changes."""
    return reference_run()


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Wait for agents of checkpoints in this process until they have written and ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("presage.trainer.checkpoint.manager._AGENT_EXIT_SEC", 300.0)
        yield


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Copy blocks to the device that refuses the processor's tensors; return their shapes."""
    shapes: list[tuple[int, ...]] = []

    def upload(block: torch.Tensor, device: torch.device) -> torch.Tensor:
        shapes.append(tuple(block.shape))
        return to_fake_device(block)

    for where in (
        "presage.trainer.data.transfer.upload",
        "presage.trainer.embedding.device_embedding.upload",
    ):
        monkeypatch.setattr(where, upload)
    return shapes
