"""The example of TorchRec's sharding: losses equal those of one process, and it resumes."""

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from presage.schemas.dataset.hints import TableHints, write_hints
from tests.trainer.processes import children_of
from tests.trainer.runs import small_dataset

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/torchrec_distributed.py"
FEATURES = ["clicked", "item", "viewed", "page", "price", "age"]
STEPS_PER_EPOCH, EPOCHS, EVERY = 16, 4, 4
LINE = re.compile(r"^epoch (\d+) step (\d+) loss (\S+)$")
Loss = tuple[int, float]
"""Step, over all epochs, and its loss."""


def start(
    world_size: int, folder: Path, *options: str, epochs: int = EPOCHS
) -> subprocess.Popen[str]:
    """Start torchrun; everything listens on the loopback device."""
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # each restart has a store of its own
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "--max-restarts", "1"),
            *("--monitor-interval", "0.1", EXAMPLE, str(small_dataset())),
            *("--checkpoints", str(folder), "--every", str(EVERY), "--batch-samples", "64"),
            *("--epochs", str(epochs), "--features", *FEATURES, *options),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=(folder.parent / f"{folder.name}.log").open("w"),
        text=True,
    )


def loss_in(line: str) -> Loss:
    found = LINE.match(line)
    assert found, line
    return int(found[1]) * STEPS_PER_EPOCH + int(found[2]), float(found[3])


def finish(run: subprocess.Popen[str], folder: Path) -> list[Loss]:
    printed, _ = run.communicate()
    log = (folder.parent / f"{folder.name}.log").read_text()
    assert run.returncode == 0, log[-3000:]
    return [loss_in(line) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    found = finish(start(1, folder), folder)
    assert [step for step, _ in found] == list(range(EPOCHS * STEPS_PER_EPOCH))
    return [loss for _, loss in found]


@cache
def hints_of(folder: Path) -> Path:
    """Write hints of the tables that the example reads, as `presage oracle --hints` does."""
    sizes = {"items": (["clicked", "item", "viewed"], 300), "pages": (["page"], 12)}
    tables = {
        name: TableHints(
            feature_names=tuple(features),
            pooling_factors=(2.0,) * len(features),
            num_poolings=(0.5,) * len(features),
            batch_sizes=(64,) * len(features),
            num_rows=num_rows,
            num_unique_rows=num_rows,
            unique_rows_per_step=10.0,
            hot_rows=(),
            lru_misses=((0.0, 1.0),),
        )
        for name, (features, num_rows) in sizes.items()
    }
    write_hints(folder / "hints.json", tables)
    return folder / "hints.json"


RUNS = {
    "table-wise": (2, ["--sharding", "table_wise"]),
    "table-wise of four processes": (4, ["--sharding", "table_wise"]),
    "table-wise, one bag per sample, planned with hints": (2, ["--expanded", "--hints"]),
    "row-wise": (2, ["--sharding", "row_wise"]),
    "row-wise of four processes": (4, ["--sharding", "row_wise"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_processes_have_the_losses_of_one(
    name: str, of_one_process: list[float], tmp_path: Path
) -> None:
    world_size, options = RUNS[name]
    if options[-1] == "--hints":
        options = [*options, str(hints_of(tmp_path))]
    found = finish(start(world_size, tmp_path / "run", *options), tmp_path / "run")
    assert [step for step, _ in found] == list(range(EPOCHS * STEPS_PER_EPOCH))
    assert [loss for _, loss in found] == pytest.approx(of_one_process, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_killed_run_continues_after_its_newest_checkpoint(
    sharding: str, of_one_process: list[float], tmp_path: Path
) -> None:
    folder, found = tmp_path / "run", list[Loss]()
    run = start(2, folder, "--sharding", sharding)
    assert run.stdout is not None
    for line in run.stdout:
        found.append(loss_in(line))
        if found[-1][0] == 9:
            workers = [p for p, words in children_of(run.pid).items() if EXAMPLE in words]
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            break
    found += finish(run, folder)
    steps = [step for step, _ in found]
    restart = next(i for i, step in enumerate(steps) if i and step <= steps[i - 1])
    first, last = steps[restart], steps[restart - 1]
    assert first % EVERY == 0
    assert last - EVERY <= first <= last + 1
    assert steps == [*range(last + 1), *range(first, EPOCHS * STEPS_PER_EPOCH)]
    assert [loss for _, loss in found] == pytest.approx(
        [of_one_process[step] for step in steps], rel=2e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "before", "after"), [("table_wise", 2, 4), ("row_wise", 4, 2)]
)
def test_run_continues_with_another_number_of_processes(
    sharding: str, before: int, after: int, of_one_process: list[float], tmp_path: Path
) -> None:
    folder, options = tmp_path / "run", ["--sharding", sharding]
    found = finish(start(before, folder, *options, epochs=1), folder)
    found += finish(start(after, folder, *options, epochs=2), folder)
    assert [step for step, _ in found] == list(range(2 * STEPS_PER_EPOCH))
    assert [loss for _, loss in found] == pytest.approx(
        of_one_process[: 2 * STEPS_PER_EPOCH], rel=2e-6
    )
