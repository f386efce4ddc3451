"""What a resumed run loads: checkpoints of several parts; those of other runs are refused."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import METRICS
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import read_checkpoint_manifest
from presage.trainer.checkpoint.load import verify_checkpoint
from presage.trainer.evaluation.evaluate import evaluate_run
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, checkpoint_at, losses_of, run_job

pytestmark = pytest.mark.nightly

STOP, END = 17, 19


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_job(write_job(folder / "job", dtype="float32"), dataset, folder / "run", steps=END)
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped, with checkpoints of several parts, which no test changes."""
    folder = tmp_path_factory.mktemp("stopped")
    job = write_job(folder / "job", dtype="float32", every_steps="2")
    run_job(job, dataset, folder / "run", steps=STOP, embedding="cached")
    return folder / "run"


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_evaluation_reads_a_checkpoint_of_several_parts(
    dataset: Path, stopped: Path, tmp_path: Path
) -> None:
    plain, location = tmp_path / "plain", Location.parse(dataset)
    job = write_job(tmp_path / "job", dtype="float32")
    run_job(job, dataset, plain, steps=STOP)
    assert evaluate_run(job, location, stopped) == evaluate_run(job, location, plain)
    arguments = ["evaluate", str(job), "--dataset", str(dataset), "--run", str(stopped), "--json"]
    assert main(arguments) == 0


def test_run_continues_with_a_larger_identity_table(whole: Path, run: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    job.write_text(
        job.read_text().replace("num_rows: 12, rows: ident", "num_rows: 40, rows: ident")
    )
    grown = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    run_job(job, grown, run, resume=True, steps=END, embedding="cached")
    assert losses_of(run).tobytes() == losses_of(whole).tobytes()


def test_run_does_not_continue_with_a_larger_hashed_table(run: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    job.write_text(job.read_text().replace("num_rows: 300", "num_rows: 400"))
    grown = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    with pytest.raises(SchemaError, match=r"^dataset\.tables\.items\.num_rows differs from"):
        run_job(job, grown, run, resume=True)
    assert len(losses_of(run)) == STOP


ADVICE = "use the job and the dataset that it was started with"
OTHER_RUNS: dict[str, tuple[dict[str, str], str, str]] = {
    "another shape of the model": (
        {"top_layers: [16]": "top_layers: [8]"},
        "train.model.top_layers differs from that of the run: [8] instead of [16]",
        "array 'model/{array}' must be float32 ({shape}), got float32",
    ),
    "another model": (
        {"bottom_layers: [16]": "bottom_layers: [16], name: dcn"},
        "train.model.name differs from that of the run: 'dcn' instead of 'dlrm'",
        "model differs from that of the checkpoint: 'dcn' instead of 'dlrm' in ",
    ),
    "another row optimizer": (
        {"rowwise_adagrad": "adagrad"},
        "train.sparse_optimizer.name differs from that of the run: "
        "'adagrad' instead of 'rowwise_adagrad'",
        "sparse_optimizer differs from that of the checkpoint: "
        "'adagrad' instead of 'rowwise_adagrad' in ",
    ),
    "another dense optimizer": (
        {"dense_optimizer: {": "dense_optimizer: {name: sgd, "},
        "train.dense_optimizer.name differs from that of the run: 'sgd' instead of 'adam'",
        "dense_optimizer differs from that of the checkpoint: 'sgd' instead of 'adam' in ",
    ),
    "another dtype": (
        {"dtype: float32": "dtype: float64"},
        "train.dtype differs from that of the run: 'float64' instead of 'float32'",
        "tables.items.dtype differs from that of the checkpoint: "
        "'float64' instead of 'float32' in ",
    ),
    "another width of rows": (
        {"embedding_dim: 8": "embedding_dim: 16"},
        "train.embedding_dim differs from that of the run: 16 instead of 8",
        "tables.items.dim differs from that of the checkpoint: 16 instead of 8 in ",
    ),
    "another batch": (
        {"  batch_samples: 64\n": "  batch_samples: 32\n"},
        "train.batch_samples differs from that of the run: 32 instead of 64",
        "order.blocks_per_batch differs from that of the checkpoint: 2 instead of 4 in ",
    ),
}


@pytest.mark.parametrize("other", OTHER_RUNS)
def test_checkpoint_of_another_run_is_refused_with_both_sides(
    other: str, dataset: Path, run: Path, tmp_path: Path
) -> None:
    changes, message, of_checkpoint = OTHER_RUNS[other]
    job = write_job(tmp_path / "job", dtype="float32")
    for old, new in changes.items():
        assert old in job.read_text()
        job.write_text(job.read_text().replace(old, new))
    before = (run / METRICS).read_bytes()
    wanted = f"{message} in {run / 'run.json'}; {ADVICE}"
    with pytest.raises(SchemaError, match=f"^{re.escape(wanted)}$"):
        run_job(job, dataset, run, resume=True)
    assert (run / METRICS).read_bytes() == before
    strange = tmp_path / "strange"  # with the checkpoint of the other run, put there by hand
    run_job(job, dataset, strange, steps=STOP)
    shutil.rmtree(strange / "checkpoints")
    before = (strange / METRICS).read_bytes()
    shutil.copytree(run / "checkpoints", strange / "checkpoints")
    start = of_checkpoint.partition("{")[0]
    with pytest.raises(SchemaError, match=f"^{re.escape(start)}") as found:
        run_job(job, dataset, strange, resume=True)
    assert found.value.file is not None
    assert found.value.file.startswith(str(checkpoint_at(strange, STOP)))
    assert (strange / METRICS).read_bytes() == before


def test_checkpoint_of_another_dataset_is_refused_with_both_sides(
    run: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    other = make_dataset(tmp_path / "dataset", job, SEGMENTS, seed=1)
    message = (
        r"^dataset does not begin with the segments of the run: segment \w{12} instead of \w{12} "
    )
    with pytest.raises(SchemaError, match=message):
        run_job(job, other, run, resume=True)
    strange = tmp_path / "strange"
    run_job(job, other, strange, steps=STOP)
    shutil.rmtree(strange / "checkpoints")
    shutil.copytree(run / "checkpoints", strange / "checkpoints")
    message = (
        r"^segments\[0\]\.sha256 differs from that of the checkpoint: "
        r"'\w{12}' instead of '\w{12}' in .*MANIFEST"
    )
    with pytest.raises(SchemaError, match=message):
        run_job(job, other, strange, resume=True)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, r"^file must have \d+ bytes, got \d+ in {path}; {advice}$"),
    "changed": (flip, r"^file must have sha256 \w{{12}}, got \w{{12}} in {path}; {advice}$"),
    "missing": (Path.unlink, r"^file must have \d+ bytes, got none in {path}; {advice}$"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_file_is_refused_before_the_first_step_with_the_checkpoint_to_use(
    fault: str, dataset: Path, run: Path, tmp_path: Path
) -> None:
    damage, message = FAULTS[fault]
    job = write_job(tmp_path / "job", dtype="float32")
    newest = checkpoint_at(run, STOP)
    manifest = read_checkpoint_manifest(newest)
    kept = {
        step: read_checkpoint_manifest(checkpoint_at(run, step)).files for step in range(2, STOP, 2)
    }
    metrics = (run / METRICS).read_bytes()
    tried = set[str]()
    for name in manifest.files:
        kind = name.partition("/")[0] == newest.name, name.rpartition("/")[2]
        if str(kind) in tried:
            continue
        tried.add(str(kind))
        path = newest.parent / name
        whole = path.read_bytes()
        damage(path)
        without = [step for step, files in kept.items() if name not in files]
        advice = "remove this checkpoint to use the one before it"
        if not without:
            advice = "train again, as no checkpoint before it is complete"
        elif without[-1] != STOP - 1:
            advice = f"remove the checkpoints after {without[-1]:08d} to use that one"
        wanted = message.format(path=re.escape(str(path)), advice=advice)
        with pytest.raises(SchemaError, match=wanted):
            run_job(job, dataset, run, resume=True)
        assert (run / METRICS).read_bytes() == metrics
        path.write_bytes(whole)
    assert len(tried) == 2 + 2 + 2  # own and older rows, dense state and plan
    verify_checkpoint(newest)


def test_changed_byte_of_a_manifest_is_refused(run: Path) -> None:
    path = checkpoint_at(run, STOP) / MANIFEST
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            SchemaError, match=r"^manifest .* in .*MANIFEST\.json; restore it or remove this "
        ):
            read_checkpoint_manifest(path.parent)
    path.write_bytes(whole)
    read_checkpoint_manifest(path.parent)


def test_half_written_checkpoints_are_no_checkpoints(
    dataset: Path, whole: Path, run: Path, tmp_path: Path
) -> None:
    for name in ("00000099.partial", "00000098"):
        shutil.copytree(checkpoint_at(run, STOP), run / "checkpoints" / name)
    (run / "checkpoints" / "00000098" / MANIFEST).unlink()
    job = write_job(tmp_path / "job", dtype="float32")
    run_job(job, dataset, run, resume=True, steps=END)
    assert losses_of(run).tobytes() == losses_of(whole).tobytes()
