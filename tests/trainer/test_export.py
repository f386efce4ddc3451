"""An exported model scores as the trainer does; a file that is not whole or not safe is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.layout import SCHEMA
from presage.schemas.rows import initial_rows
from presage.schemas.run.model_file import open_model
from presage.schemas.run.model_inputs import PADDING, build_inputs
from presage.schemas.run.scoring import load_model, probabilities
from presage.trainer.__main__ import main
from presage.trainer.serve.export import export_run
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, checkpoint_at, rows_in, run_job
from tests.trainer.served import MODELS, evaluation_logits, evaluation_table

WEIGHTS = ", clicked_weights"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    job = write_job(folder / "job", weights=WEIGHTS)
    return make_dataset(folder / "dataset", job, SEGMENTS)


@pytest.fixture(scope="module")
def exported(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its export."""
    folder = tmp_path_factory.mktemp("exported")
    run_job(write_job(folder / "job", weights=WEIGHTS), dataset, folder / "run", steps=6)
    export_run(folder / "run", folder / "model.presage")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("attention", "float32"),
        pytest.param("attention", "float64", marks=pytest.mark.nightly),
        ("dcn", "float64"),
        ("deepfm", "float32"),
        ("dlrm", "float32"),
        ("wide_deep", "float64"),
    ],
)
def test_exported_model_has_the_bits_of_the_trainers_expanded_evaluation(
    model: str, dtype: str, dataset: Path, tmp_path: Path
) -> None:
    pooling = "sum" if dtype == "float64" else "mean"
    job = write_job(
        tmp_path / "job", model=MODELS[model], dtype=dtype, weights=WEIGHTS, pooling=pooling
    )
    run_job(job, dataset, tmp_path / "run", steps=6)
    export_run(tmp_path / "run", tmp_path / "model.presage")
    served, table = load_model(tmp_path / "model.presage"), evaluation_table(dataset)
    checkpoint = checkpoint_at(tmp_path / "run", 6)
    wanted = evaluation_logits(job, dataset, checkpoint, expanded=True)
    shared = evaluation_logits(job, dataset, checkpoint, expanded=False)
    first = 0
    for own, once in zip(wanted, shared, strict=True):
        got = served.logits(table.slice(first, len(own)))
        assert got.dtype == own.dtype == dtype
        assert np.array_equal(got, own), "the same bits, one bag per sample"
        # what the trainer computes once per unique tuple is summed in another order
        assert got == pytest.approx(once, rel=0, abs=1e-5 if dtype == "float32" else 1e-13)
        first += len(own)
    assert first == table.num_rows == 80
    assert np.std(np.concatenate(wanted)) > 1e-3, "logits must differ for this to say anything"


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2, 15, 17, 80])
def test_any_number_of_samples_is_scored_the_same(
    count: int, exported: Path, dataset: Path
) -> None:
    served, table = load_model(exported / "model.presage"), evaluation_table(dataset)
    found = served.score(table.slice(0, count))
    assert found.shape == (count,)
    assert found == pytest.approx(served.score(table)[:count], rel=1e-12)
    assert np.array_equal(found, probabilities(served.logits(table.slice(0, count))))


def test_samples_that_look_nothing_up_are_scored(exported: Path, dataset: Path) -> None:
    served, table = load_model(exported / "model.presage"), evaluation_table(dataset).slice(0, 3)
    nothing = pa.table({n: pa.nulls(3, table[n].type) for n in served.file.manifest.inputs.columns})
    found = served.score(nothing)
    assert np.isfinite(found).all()
    assert len(set(found.tolist())) == 1


def test_rows_are_those_of_the_checkpoint_and_others_have_first_values(exported: Path) -> None:
    model, run = open_model(exported / "model.presage"), exported / "run"
    for table, _ in model.manifest.inputs.features_of.items():
        held = rows_in(checkpoint_at(run, 6))
        rows, values = held[f"{table}/rows.npy"], held[f"{table}/values.npy"]
        assert len(rows) > 5
        assert np.array_equal(model.rows_of(table, rows), values)
        strangers = np.setdiff1d(np.arange(40), rows)
        wanted = initial_rows(strangers, table=table, seed=0, dim=8, dtype="float64")
        both = np.concatenate([rows[:5], strangers])
        assert np.array_equal(model.rows_of(table, both), np.concatenate([values[:5], wanted]))


def test_look_ups_are_those_of_a_loop_over_samples(exported: Path, dataset: Path) -> None:
    model, table = open_model(exported / "model.presage"), evaluation_table(dataset)
    spec = model.manifest.inputs
    found = build_inputs(spec, table, lambda _, rows: rows[:, None].astype(np.float64))
    for feature, name in spec.sparse.items():
        first = 0
        rows, positions = found[f"rows/{name}"][:, 0], found[f"positions/{feature}"]
        for sample, ids in enumerate(table[feature].to_pylist()):
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            last = first + int(found[f"lengths/{feature}"][sample])
            assert last - first == len(ids)
            if spec.tables[name].rows == "identity":
                assert rows[positions[first:last]].tolist() == ids
            first = last
        assert first + PADDING == len(positions)


@pytest.mark.slow
def test_export_of_the_command_line_makes_the_same_bytes_again(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = exported / "again.presage"
    assert main(["export", str(exported / "run"), "--output", str(again), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert again.read_bytes() == (exported / "model.presage").read_bytes()
    assert found["train_step"] == 6
    assert found["num_bytes"] == again.stat().st_size
    assert set(found["num_rows"]) == {"users", "items", "pages"}


def test_nothing_of_this_machine_is_in_the_file(exported: Path) -> None:
    data = (exported / "model.presage").read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in data
    assert str(exported).encode() not in data


def refused(exported: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", *words, "--output", str(exported / "none.presage")]) == 1
    assert not (exported / "none.presage").exists()
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_export_without_a_run_or_checkpoint_is_refused_with_advice(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported / "run"
    line = refused(exported, capsys, str(tmp_path))
    assert line == f"error: found no run in {tmp_path}; train first"
    line = refused(exported, capsys, str(run), "--checkpoint", "5")
    assert line == (
        f"error: run has no checkpoint of step 5: it has [6] in {run}; use one of these"
    )
    schema = (run / SCHEMA).read_bytes()
    (run / SCHEMA).unlink()
    line = refused(exported, capsys, str(run))
    (run / SCHEMA).write_bytes(schema)
    assert line.startswith(f"error: run has no {SCHEMA} in {run}; ")


def test_samples_without_a_column_are_refused_by_name(exported: Path, dataset: Path) -> None:
    served, table = load_model(exported / "model.presage"), evaluation_table(dataset)
    renamed = table.rename_columns(["itm" if n == "item" else n for n in table.column_names])
    message = "samples lack column 'item'; did you mean 'itm'?"
    with pytest.raises(SchemaError, match=re.escape(message)):
        served.score(renamed)
