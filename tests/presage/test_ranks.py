"""Our collections under DistributedDataParallel: every rank has the rows of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

import presage
from tests.presage.own_loop import loader_of
from tests.presage.ranks import train


@pytest.mark.slow
def test_ranks_train_the_rows_of_one_process(tmp_path: Path) -> None:
    train(0, 1, tmp_path)
    alone: Any = torch.load(tmp_path / "0.pt")
    multiprocessing.spawn(train, (2, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    ranks: list[Any] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert 0 in ranks[1]["counts"]
    sums = torch.tensor([rank["losses"] for rank in ranks]).sum(0)
    torch.testing.assert_close(sums, torch.tensor(alone["losses"]), rtol=1e-5, atol=1e-6)
    for part in ("rows", "dense"):
        for name, expected in alone[part].items():
            assert torch.equal(ranks[0][part][name], ranks[1][part][name])
            torch.testing.assert_close(ranks[0][part][name], expected, rtol=1e-5, atol=1e-6)


def test_source_of_rows_is_refused_where_there_are_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.trainer.own_loops.world_size", lambda: 2)
    message = "^a source of rows belongs to one process, but there are 2 ranks; leave `source` out"
    with pytest.raises(ValueError, match=message):
        presage.open_rows(loader_of(), "mmap", tmp_path)
