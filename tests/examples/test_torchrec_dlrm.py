"""The training loop of TorchRec's own DLRM example, where a checkout of it is at hand."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import presage
from presage.pipelines.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT = "PRESAGE_TORCHREC_DLRM"
"""Variable with the path of `torchrec_dlrm` in a checkout of github.com/facebookresearch/dlrm."""


def build_demo(folder: Path) -> Path:
    """Return a dataset of the demo with small blocks: each rank needs evaluation samples."""
    demo, oracle = REPOSITORY / "schemas" / "demo", "  oracle: {batch_samples: 4096}\n"
    text = (demo / "job.yaml").read_text()
    assert oracle in text
    job, log = folder / "job.yaml", str(folder / "log")
    job.write_text(text.replace(oracle, f"  block_samples: 128\n{oracle}"))
    shutil.copy(demo / "schema.pbtxt", folder)
    assert main(["generate", str(job), "--output", log, "--num-samples", "8000"]) == 0
    assert main(["build", str(job), "--input", log, "--output", str(folder / "dataset")]) == 0
    return folder / "dataset"


def run_example(world_size: int, checkout: str, dataset: Path) -> str:
    """Return what the example prints with batches of 2,048 samples for all ranks."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "examples/torchrec_dlrm.py", checkout),
            *(str(dataset), "--batch_size", str(2048 // world_size), "--epochs", "2"),
            *("--limit_train_batches", "3", "--adagrad", "--learning_rate", "0.01"),
            *("--embedding_dim", "8", "--dense_arch_layer_sizes", "16,8"),
            *("--over_arch_layer_sizes", "16,1"),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_dlrm_of_torchrec_trains_on_the_loader(tmp_path: Path) -> None:
    checkout = os.environ.get(CHECKOUT)
    if not checkout:
        pytest.skip(f"{CHECKOUT} does not name a checkout of TorchRec's DLRM example")
    dataset = build_demo(tmp_path)
    num_evaluation = len(presage.Dataset(dataset).select(split="evaluation"))
    for world_size in (1, 2):
        printed = run_example(world_size, checkout, dataset)
        for stage in ("val", "test"):
            assert re.search(rf"AUROC over {stage} set: 0\.[5-9]", printed)
            assert f"Number of {stage} samples: {num_evaluation}" in printed
        losses = re.search(r"6 steps, first loss (\S+), last loss (\S+)", printed)
        assert losses
        assert float(losses[2]) < float(losses[1]) - 0.05
