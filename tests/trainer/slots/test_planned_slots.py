"""Training in TorchRec's shards with slots gives the bits of full tables."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import presage
from presage.schemas.config.train import SparseOptimizerConfig
from presage.schemas.layout import MANIFEST
from presage.trainer.checkpoint.format import ROW_FILES
from presage.trainer.checkpoint.load import require_checkpoint, verify_checkpoint
from presage.trainer.embedding.collections import EmbeddingBagCollection
from tests.shared import make_once
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS
from tests.trainer.slots.torchrec_run import SEED, Case

REPOSITORY = Path(__file__).resolve().parents[3]
FEATURES = ["clicked", "item", "viewed", "page", "price", "age"]
"""All but that of `users`, whose 2**63 rows no full table has."""
CACHE_ROWS = 2200
"""Slots of `items`, of whose 4,036 rows up to 1,890 are in a window."""
Found = dict[str, np.ndarray]


def _dataset(folder: Path) -> None:
    job = write_job(folder / "job", planned="32", items="6000")
    make_dataset(folder / "dataset", job, SEGMENTS)


def dataset() -> Path:
    """Return the dataset, of two epochs of 31 steps; no test changes it."""
    return make_once(_dataset) / "dataset"


def full(name: str, **options: object) -> Case:
    """Return a run of full tables."""
    order = {"shuffle": True, "seed": 5, "batch_samples": 32, "features": FEATURES}
    return Case(name=name, dataset=str(dataset()), **{**order, **options})  # type: ignore[arg-type]


def slots(name: str, folder: Path, **options: object) -> Case:
    """Return a run of tables of slots."""
    own = {
        "cache_rows": CACHE_ROWS,
        "folder": str(folder / name),
        "run": str(folder / "runs" / name),
    }
    return full(name, **{**own, **options})


def run_cases(folder: Path, world_size: int, cases: Sequence[Case]) -> dict[str, list[Found]]:
    """Run cases in the processes of one torchrun; return what each rank found."""
    (folder / "found").mkdir(parents=True, exist_ok=True)
    (folder / "cases.jsonl").write_text("".join(json.dumps(asdict(c)) + "\n" for c in cases))
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "--max-restarts", str(len(cases))),
            *("--monitor-interval", "0.1", "-m", "tests.trainer.slots.torchrec_run"),
            *(str(folder / "found"), str(folder / "cases.jsonl")),
        ],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        case.name: [
            dict(np.load(folder / "found" / f"{case.name}-{rank}.npz"))
            for rank in range(world_size)
        ]
        for case in cases
    }


def assert_same_bits(of_full: Sequence[Found], of_slots: Sequence[Found]) -> None:
    """Check losses, logits, dense parameters, rows and their state; slots may have been resumed."""
    for whole, found in zip(of_full, of_slots, strict=True):
        assert "error" not in found, found["error"]
        steps = len(found["losses"])
        assert steps, "steps were trained"
        np.testing.assert_array_equal(whole["losses"][-steps:], found["losses"])
        np.testing.assert_array_equal(whole["logits"][-len(found["logits"]) :], found["logits"])
        for name in whole:
            if name.startswith(("dense/", "evaluated")):
                np.testing.assert_array_equal(whole[name], found[name], err_msg=name)
        for name, rows in found.items():
            kind, _, table = name.partition("/")
            if kind == "rows" and len(rows):
                trained = whole[f"full/{table}"][rows - whole[f"first/{table}"]]
                np.testing.assert_array_equal(trained, found[f"block/{table}"], err_msg=table)
            elif kind == "full":
                np.testing.assert_array_equal(whole[name], rows, err_msg=name)


PAIRS: dict[str, dict[str, object]] = {
    "deduplicated": {"deduplicated": True, "evaluate": True},
    "row_wise": {"sharding": "row_wise", "optimizer": "adagrad", "evaluate": True},
    "pipeline": {"pipeline": "TrainPipelineSparseDist", "store": "log", "optimizer": "sgd"},
    "sequences": {"sequences": True, "sharding": "row_wise", "cache_rows": {"items": CACHE_ROWS}},
}
OTHERS: dict[str, dict[str, object]] = {
    "table_wise": {"evaluate": True},
    "adagrad": {"optimizer": "adagrad"},
    "sgd": {"optimizer": "sgd", "sharding": "row_wise"},
    "lite": {"pipeline": "TrainPipelineSparseDistLite", "sharding": "row_wise"},
    "sequences": {"sequences": True, "evaluate": True},
    "log": {"store": "log", "evaluate": True},
}


def cases_of(folder: Path, pairs: dict[str, dict[str, object]]) -> list[Case]:
    cases: list[Case] = []
    for name, options in pairs.items():
        whole = {k: v for k, v in options.items() if k not in ("cache_rows", "store")}
        cases += [full(f"full-{name}", **whole), slots(name, folder, save_at=[20], **options)]
    return cases


def check_pairs(found: dict[str, list[Found]], pairs: dict[str, dict[str, object]]) -> None:
    for name in pairs:
        assert_same_bits(found[f"full-{name}"], found[name])
        assert sum(len(rank["rows/items"]) for rank in found[name]) == 4036, name


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "small": ({"cache_rows": 1000}, "cache of table 'items' is too small"),
    "order": ({"seed": 6}, "dataset has no index for"),
    "unknown": ({"cache_rows": {"sellers": 100}}, "cache_rows must name tables of the batch"),
    "batches": (
        {"misuse": "batches of the loader", "cache_rows": {"pages": 12}},
        "batches were taken from PlannedSlots",
    ),
    "deduplicated": (
        {"sharding": "row_wise", "deduplicated": True},
        "TorchRec does not train deduplicated batches row_wise on gloo",
    ),
    "adagrad": (
        {"optimizer": "adagrad", "deduplicated": True},
        "FBGEMM has no Adagrad for deduplicated batches",
    ),
    "early": ({"misuse": "early look-ups"}, "use a pipeline that does not"),
}


def killed(seed: int, folder: Path) -> Case:
    """Return a run of which a drawn rank is killed at a drawn moment; torchrun restarts all."""
    rng = np.random.default_rng(seed)
    return slots(
        f"killed-{seed}",
        folder,
        sharding=str(rng.choice(["table_wise", "row_wise"])),
        store=str(rng.choice(["mmap", "log"])),
        save_at=list(range(4, 62, int(rng.integers(3, 9)))),
        die=[float(rng.integers(2)), float(rng.uniform(0.0, 1.5))],
    )


WHOLE = [{"sharding": sharding} for sharding in ("table_wise", "row_wise")]
"""Options of the runs that killed ones equal."""


def _two_ranks(folder: Path) -> None:
    refused = [
        slots(f"refused-{name}", folder, **options) for name, (options, _) in REFUSED.items()
    ]
    whole = [full(f"whole-{options['sharding']}", **options) for options in WHOLE]
    run_cases(folder, 2, [*cases_of(folder, PAIRS), *refused, *whole, killed(0, folder)])


def two_ranks() -> Path:
    """Return the folder of runs of two ranks, in the processes of one torchrun."""
    return make_once(_two_ranks)


def found_of_two_ranks() -> dict[str, list[Found]]:
    """Return what each rank found in the runs of `two_ranks`, by case."""
    found: dict[str, list[Found]] = {}
    for path in sorted((two_ranks() / "found").glob("*-[01].npz")):
        found.setdefault(path.stem[:-2], []).append(dict(np.load(path)))
    return found


@pytest.mark.slow
def test_slots_train_the_bits_of_full_tables() -> None:
    check_pairs(found_of_two_ranks(), PAIRS)


@pytest.mark.slow
def test_each_rank_hashes_the_files_that_it_wrote() -> None:
    checkpoint = require_checkpoint(two_ranks() / "runs" / "row_wise")
    of_ranks = [rank["hashed"].tolist() for rank in found_of_two_ranks()["row_wise"]]
    names = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert len(names) == len(of_ranks[0]) + len(of_ranks[1])
    assert {p for p in of_ranks[1] if p.startswith("items")} == {
        f"items_rows.1/{name}.npy" for name in ROW_FILES
    }
    assert any(path.startswith("distributed/__1_") for path in of_ranks[1])
    assert verify_checkpoint(checkpoint).files.keys() == {
        path.relative_to(checkpoint.parent).as_posix() for path in names
    }


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 4])
def test_slots_train_the_bits_of_full_tables_at_any_world_size(
    tmp_path: Path, world_size: int
) -> None:
    pairs = PAIRS | OTHERS
    check_pairs(run_cases(tmp_path, world_size, cases_of(tmp_path, pairs)), pairs)


@pytest.mark.nightly
def test_slots_train_the_bits_of_full_tables_in_all_ways(tmp_path: Path) -> None:
    check_pairs(run_cases(tmp_path, 2, cases_of(tmp_path, OTHERS)), OTHERS)


def check_killed(found: dict[str, list[Found]], cases: Sequence[Case]) -> None:
    for case in cases:
        assert Path(case.folder, "died").exists(), case.name
        assert_same_bits(found[f"whole-{case.sharding}"], found[case.name])


@pytest.mark.slow
def test_rank_killed_at_a_drawn_moment_changes_no_bit() -> None:
    found = found_of_two_ranks()
    check_killed(found, [killed(0, two_ranks())])


@pytest.mark.nightly
def test_rank_killed_at_twenty_moments_changes_no_bit(tmp_path: Path) -> None:
    cases = [killed(seed, tmp_path) for seed in range(1, 21)]
    whole = [full(f"whole-{options['sharding']}", **options) for options in WHOLE]
    check_killed(run_cases(tmp_path, 2, [*whole, *cases]), cases)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_checkpoint_continues_with_other_numbers_of_ranks(tmp_path: Path, sharding: str) -> None:
    same: dict[str, object] = {"sharding": sharding, "run": str(tmp_path / "run")}
    whole = run_cases(tmp_path / "one", 1, [full("full")])["full"][0]
    for world_size, steps in ((4, 20), (2, 20), (8, None)):
        case = slots(f"of-{world_size}", tmp_path, save_at=[20, 40], steps=steps, **same)
        ranks = run_cases(tmp_path / f"{world_size}", world_size, [case])[case.name]
    for name in whole:
        if name.startswith("dense/"):
            np.testing.assert_allclose(ranks[0][name], whole[name], rtol=2e-3, atol=2e-5)
    rows = np.concatenate([rank["rows/items"] for rank in ranks])
    block = np.concatenate([rank["block/items"] for rank in ranks if "block/items" in rank])
    assert len(np.unique(rows)) == len(rows) == 4036
    np.testing.assert_allclose(block, whole["full/items"][rows], rtol=2e-3, atol=2e-5)


@pytest.mark.nightly
def test_own_loop_in_one_process_continues_with_the_rows(tmp_path: Path) -> None:
    ranks = run_cases(tmp_path, 2, [slots("slots", tmp_path, save_at=[20], steps=20)])["slots"]
    loader = presage.DataLoader(
        dataset(), batch_samples=32, epochs=2, shuffle=True, seed=5, features=FEATURES
    )
    with presage.open_rows(loader, "memory") as rows:
        EmbeddingBagCollection(
            loader.embedding_bag_configs(8),
            optimizer=SparseOptimizerConfig(name="rowwise_adagrad"),
            seed=SEED,
            source=rows,
        )
        state = rows.load(tmp_path / "runs" / "slots")
        assert state is not None
        loader.load_state_dict(state["loader"])
        batch = next(iter(loader))
        assert (batch.epoch, batch.step, rows.train_step) == (0, 20, 20)
        for rank in ranks:
            ids = rank["rows/items"]
            if len(ids):
                found = rows.read({"items_rows": ids})["items_rows"]
                np.testing.assert_array_equal(found.block, rank["block/items"])


@pytest.mark.slow
def test_what_cannot_be_planned_is_refused() -> None:
    found = found_of_two_ranks()
    for name, (_, message) in REFUSED.items():
        assert message in str(found[f"refused-{name}"][0]["error"]), name
