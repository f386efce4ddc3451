"""Other commands read runs of `PlannedSlots`, and new runs start from them."""

# torch documents `save` of distributed checkpoints, but does not export it for types.
# pyright: reportPrivateImportUsage=false

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import presage
from presage.schemas.config.job import load_job
from presage.schemas.config.train import SparseOptimizerConfig
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB
from presage.schemas.rows import initial_rows, rows_of_ids
from presage.schemas.run.model_file import open_model
from presage.schemas.run.scoring import load_model
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.dense_state import state_of
from presage.trainer.checkpoint.format import from_bytes
from presage.trainer.checkpoint.load import (
    read_dense,
    require_checkpoint,
    table_rows,
    verify_checkpoint,
)
from presage.trainer.checkpoint.read_rows import verified_chunks
from presage.trainer.embedding.collections import EmbeddingBagCollection
from presage.trainer.run.folder import read_identity
from presage.trainer.run.warm_start import open_warm_start
from presage.trainer.serve.export import open_checkpoint
from presage.trainer.slots.slot_checkpoints import read_model
from presage.trainer.stores.store import TableLayout
from tests.shared import hard_links, json_of, make_once, refusal_of
from tests.trainer.daily import DATES, make_days
from tests.trainer.runs import parts_of, rows_in, run_job
from tests.trainer.slots.test_planned_slots import (
    FEATURES,
    Found,
    assert_same_bits,
    found_of_two_ranks,
    two_ranks,
)
from tests.trainer.slots.torchrec_run import SEED, Case, Model, opened, run

OPTIONS: dict[str, Any] = {"epochs": 1, "seed": 5}
SOME = [feature for feature in FEATURES if feature != "age"]
"""All features but those of users, and one dense feature."""
TABLES = ("items", "pages", "users")


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/g", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def slots(name: str, base: Path, **options: Any) -> Case:
    """Return a run of slots of one rank on days of the dataset, with all features."""
    own = {"cache_rows": 300, "folder": str(base / "rows" / name), "run": str(base / name)}
    return Case(name=name, dataset=str(base / "dataset"), **{**OPTIONS, **own, **options})


def warm(name: str, base: Path, **options: Any) -> Case:
    """Return a run of slots on the second day, from that of the first."""
    start = {"days": DATES[1:2], "warm_start": str(base / "day"), "features": SOME}
    return slots(name, base, **{**start, **options})


def _runs(folder: Path) -> None:
    make_days(folder, dtype="float32")
    cases = [
        slots("all", folder, days=DATES[:1], save_at=[11, 12]),
        slots("day", folder, days=DATES[:1], features=SOME, save_at=[12]),
        warm("next", folder),
        warm("next-log", folder, store="log"),
        Case(
            name="whole",
            dataset=str(folder / "dataset"),
            days=DATES[:2],
            features=SOME,
            **OPTIONS,
        ),
    ]
    with one_rank():
        for case in cases:
            np.savez(folder / f"{case.name}.npz", **run(case))  # type: ignore[arg-type]


def runs() -> Path:
    """Return the folder of a dataset of days and runs of it; no test changes it."""
    return make_once(_runs)


def found_of(name: str) -> Found:
    return dict(np.load(runs() / f"{name}.npz"))


def rows_of(checkpoint: Path, table: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a table of slots in a checkpoint, ascending, with their records."""
    manifest, name = verify_checkpoint(checkpoint), f"{table}_rows"
    layout = TableLayout(**manifest.fingerprint["tables"][name])
    chunks = [
        chunk
        for part in manifest.parts[name]
        for chunk in verified_chunks(checkpoint, manifest, part, layout)
    ]
    rows = np.concatenate([rows for rows, _ in chunks])
    block = np.concatenate([records.block for _, records in chunks])
    return rows[np.argsort(rows)], block[np.argsort(rows)]


# ---- Warm start ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["next", "next-log"])
def test_run_that_starts_from_another_has_the_bits_of_full_tables_on_both_days(name: str) -> None:
    assert_same_bits([found_of("whole")], [found_of(name)])
    assert len(found_of(name)["losses"]) == 4
    rows, _ = rows_of(require_checkpoint(runs() / "day"), "items")
    assert len(np.setdiff1d(rows, found_of(name)["rows/items"])) == 0, "rows of the first day stay"


@pytest.mark.slow
def test_start_is_in_the_lineage_of_the_run() -> None:
    origin = read_identity(runs() / "next").origin
    assert origin is not None
    assert (origin.run, origin.train_step, origin.steps_before) == ("../day", 12, 12)
    assert origin.trained == read_identity(runs() / "day").segments
    rows, _ = rows_of(require_checkpoint(runs() / "day"), "items")
    assert origin.tables["items"]["kept"] == len(rows)
    assert list((runs() / "next" / "checkpoints").iterdir()) == [
        runs() / "next" / "checkpoints" / "00000000"
    ]


@pytest.mark.slow
def test_started_run_continues_after_its_own_checkpoint_without_the_other(tmp_path: Path) -> None:
    copy = hard_links(runs() / "next", tmp_path / "next")
    with one_rank():
        case = warm("next", runs(), folder=str(tmp_path / "rows"), run=str(copy))
        found = run(replace(case, warm_start=str(tmp_path / "removed")))
    assert_same_bits([found_of("whole")], [found])


REFUSED_STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "wider layers": ({"hidden": 24}, "Size mismatch"),
    "optimizer": (
        {"optimizer": "adagrad"},
        "tables.items_rows.state_width differs from that of the checkpoint: 8 instead of 1",
    ),
    "features": ({"features": None}, "tables.users_rows differs from that of the checkpoint"),
    "run of a job": (
        {"warm_start": "job"},
        "expected a run of PlannedSlots to start from, got one of a job",
    ),
    "folder": ({"run": "job"}, "run to continue is of a job in"),
    "started": ({"run": "day"}, "run to continue has no warm start in"),
    "no run": ({"run": None}, "needs a run; pass run=... as well"),
    "other layers": (
        {"hidden": 0},
        "is of another model or optimizer: top.2.bias is not in the model",
    ),
}


@pytest.mark.slow
def test_what_a_run_cannot_start_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    run_job(runs() / "job" / JOB, runs() / "dataset", tmp_path / "job", segments=DATES[:1], steps=1)
    hard_links(runs() / "day", tmp_path / "day")
    for name, (options, message) in REFUSED_STARTS.items():
        case = warm(name, runs(), folder=str(tmp_path / "rows" / name), run=str(tmp_path / name))
        places = {
            key: str(tmp_path / value)
            for key, value in options.items()
            if key in ("run", "warm_start") and value is not None
        }
        case = replace(case, **{**options, **places})
        with one_rank(), pytest.raises((SchemaError, ValueError), match=r"\S") as raised:
            opened(case)
        assert message in str(raised.value), name
        assert "\n" not in str(raised.value), name
    case = warm("again", runs(), folder=str(tmp_path / "rows"))
    with one_rank():  # the run that was refused last, whose objects still exist, is not locked
        opened(replace(case, run=str(tmp_path / "other layers")))


@pytest.mark.slow
def test_run_of_a_job_starts_from_the_rows(tmp_path: Path) -> None:
    job, dataset, old = runs() / "job" / JOB, runs() / "dataset", runs() / "all"
    command = ["train", str(job), "--dataset", str(dataset), "--output", str(tmp_path / "run")]
    command += ["--start-from", str(old), "--json"]
    line = refusal_of(main, command)
    assert line.startswith(
        "dense layers of the run to start from are those of a loop of presage.PlannedSlots in "
    )
    assert "; add --rows-only to take its rows" in line
    summary = json_of(main, [*command, "--rows-only"])
    assert summary["start"]["segments"] == ["000000000001-5a11", "000000000002-5a11"]
    assert summary["num_steps"] == 7
    first = tmp_path / "run" / "checkpoints" / "00000000"
    for table in TABLES:
        rows, block = rows_of(require_checkpoint(old), table)
        assert summary["start"]["tables"][table]["kept"] == len(rows) > 0
        held = rows_in(first)
        np.testing.assert_array_equal(held[f"{table}/rows.npy"], rows)
        np.testing.assert_array_equal(held[f"{table}/values.npy"], block[:, :8])
        np.testing.assert_array_equal(held[f"{table}/state.npy"], block[:, 8:])
    components = parts_of(job, dataset)
    for name, array in state_of(components.model, components.optimizer).items():
        np.testing.assert_array_equal(read_dense(first)[name], array)
    assert read_identity(tmp_path / "run").origin is not None


@pytest.mark.slow
def test_rows_alone_of_a_run_of_a_job_fit_another_model(tmp_path: Path) -> None:
    job, dataset = runs() / "job" / JOB, runs() / "dataset"
    old = tmp_path / "old"
    run_job(job, dataset, old, segments=DATES[:1])
    text = job.read_text().replace("top_layers: [16]", "top_layers: [8]")
    other = shutil.copytree(job.parent, tmp_path / "other") / JOB
    other.write_text(text)
    with pytest.raises(SchemaError, match="array 'model/"):
        run_job(other, dataset, tmp_path / "new", start_from=old)
    run_job(other, dataset, tmp_path / "new", start_from=old, rows_only=True, steps=1)
    held, before = (
        rows_in(checkpoint)
        for checkpoint in (tmp_path / "new/checkpoints/00000000", require_checkpoint(old))
    )
    for name, array in before.items():
        np.testing.assert_array_equal(held[name], array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rowwise_adagrad", "adagrad"), "train.sparse_optimizer.name differs from that of the"),
        (("embedding_dim: 8", "embedding_dim: 4"), "tables.users_rows.dim differs"),
        (("dtype: float32", "dtype: float64"), "tables.users_rows.dtype differs"),
    ],
)
def test_rows_that_do_not_fit_a_job_are_refused(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    other = shutil.copytree(runs() / "job", tmp_path / "job") / JOB
    other.write_text(other.read_text().replace(*change))
    with pytest.raises(SchemaError, match=message):
        run_job(
            other, runs() / "dataset", tmp_path / "run", start_from=runs() / "all", rows_only=True
        )


@pytest.mark.slow
def test_tables_without_slots_are_not_left_out_in_silence(tmp_path: Path) -> None:
    job, dataset = runs() / "job" / JOB, runs() / "dataset"
    with pytest.raises(SchemaError, match="tables differs from that of the checkpoint"):
        run_job(job, dataset, tmp_path / "run", start_from=runs() / "day", rows_only=True)
    with pytest.raises(ValueError, match="--rows-only needs --start-from"):
        run_job(job, dataset, tmp_path / "run", rows_only=True)


@pytest.mark.slow
def test_table_that_has_become_smaller_is_refused(tmp_path: Path) -> None:
    copy = hard_links(runs() / "all", tmp_path / "all")
    text = (copy / JOB).read_text().replace("num_rows: 12", "num_rows: 13")
    (copy / JOB).unlink()
    (copy / JOB).write_text(text)
    with pytest.raises(SchemaError, match="table 'pages' has 12 rows, fewer than the 13 of"):
        run_job(
            runs() / "job" / JOB,
            runs() / "dataset",
            tmp_path / "run",
            start_from=copy,
            rows_only=True,
        )


@pytest.mark.slow
def test_run_that_is_not_finished_is_started_from_by_name_only(tmp_path: Path) -> None:
    copy = hard_links(runs() / "all", tmp_path / "all")
    shutil.rmtree(copy / "checkpoints" / "00000012")
    with open_warm_start(copy) as start:
        assert (start.manifest.train_step, start.num_steps) == (11, 12)


# ---- Erasing ----


@pytest.mark.slow
def test_erased_ids_have_initial_rows_in_all_checkpoints(tmp_path: Path) -> None:
    copy = hard_links(two_ranks() / "runs" / "row_wise", tmp_path / "run")
    config, checkpoint = load_job(copy / JOB).data.tables["items"], require_checkpoint(copy)
    before, block = rows_of(checkpoint, "items")
    rows_of_all = rows_of_ids(np.arange(300), "items", config)
    ids = np.flatnonzero(np.isin(rows_of_all, before))[::7][:3]
    gone = np.unique(rows_of_all[ids])
    assert len(gone) == 3
    (tmp_path / "ids").write_text("".join(f"{each}\n" for each in ids))
    words = ["erase", str(copy), "--ids", str(tmp_path / "ids"), "--table"]
    found = json_of(main, [*words, "items", "--json"])
    assert found["checkpoints"] == {"00000020": 3}
    rows, left = rows_of(checkpoint, "items")
    np.testing.assert_array_equal(rows, np.setdiff1d(before, gone))
    np.testing.assert_array_equal(left, block[np.isin(before, rows)])
    layout = TableLayout(**verify_checkpoint(checkpoint).fingerprint["tables"]["items_rows"])
    table = table_rows(checkpoint, verify_checkpoint(checkpoint), layout)
    erased = table.fetch(gone)
    np.testing.assert_array_equal(erased.values, layout.initial_values(gone))
    assert not erased.state.any()
    assert "--table has no slots in the run: 'users'" in refusal_of(main, [*words, "users"])


@pytest.mark.slow
def test_run_continues_with_initial_rows_of_erased_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = hard_links(runs() / "day", tmp_path / "day")
    rows, _ = rows_of(require_checkpoint(copy), "pages")
    (tmp_path / "ids").write_text(f"{rows[0]}\n")
    words = ["erase", str(copy), "--ids", str(tmp_path / "ids"), "--table", "pages"]
    assert main(words) == 0
    assert "rows may be left in the directory of PlannedSlots on each machine" in caplog.text
    case = warm("next", runs(), folder=str(tmp_path / "rows"), run=str(tmp_path / "next"))
    with one_rank():
        _, planned, *_ = opened(replace(case, warm_start=str(copy)))
        assert planned is not None
        held = np.concatenate([rows for rows, _ in planned.contents("pages")])
        assert rows[0] not in held
        assert len(held) == len(rows) - 1
        assert refusal_of(main, [*words[:1], str(tmp_path / "next"), *words[2:]]).startswith(
            "run is in use: pid"
        )
        planned.close()
    assert json_of(main, [*words[:1], str(tmp_path / "next"), *words[2:], "--json"])


# ---- Export ----


@pytest.mark.slow
def test_export_has_the_rows_and_the_parameters(tmp_path: Path) -> None:
    found = found_of_two_ranks()["row_wise"]
    old = two_ranks() / "runs" / "row_wise"
    summary = json_of(main, ["export", str(old), "--output", str(tmp_path / "model"), "--json"])
    model, checkpoint = open_model(tmp_path / "model"), require_checkpoint(old)
    for table in ("items", "pages"):
        rows, block = rows_of(checkpoint, table)
        assert summary["num_rows"][table] == len(rows)
        np.testing.assert_array_equal(model.rows_of(table, rows), block[:, :8])
        strangers = np.setdiff1d(np.arange(6000 if table == "items" else 12), rows)
        expected = initial_rows(
            strangers, table=f"{table}_rows", seed=SEED, dim=8, dtype=np.float32
        )
        np.testing.assert_array_equal(model.rows_of(table, strangers), expected)
    inputs = model.manifest.inputs
    assert inputs.dense == ("price", "age")
    assert inputs.sparse == dict.fromkeys(("clicked", "item", "viewed"), "items") | {
        "page": "pages"
    }
    assert model.manifest.lineage.train_step == 20
    parameters = from_bytes(model.read("dense.safetensors"))
    assert {f"dense/{name}" for name in parameters} == {
        n for n in found[0] if n.startswith("dense")
    }
    with pytest.raises(SchemaError, match="model has no program, since it is of PlannedSlots"):
        load_model(tmp_path / "model")


@pytest.mark.slow
def test_parameters_are_those_of_the_model_and_whole_tables_are_among_them(tmp_path: Path) -> None:
    found = found_of("all")
    for name, array in read_model(require_checkpoint(runs() / "all")).items():
        np.testing.assert_array_equal(array, found[f"dense/{name}"])
    checkpoint = require_checkpoint(two_ranks() / "runs" / "sequences")
    pages = read_model(checkpoint)["rows.embeddings.pages_rows.weight"]
    assert pages.shape == (12, 8)
    assert np.ptp(pages, axis=1).all()


@pytest.mark.slow
def test_parameters_that_numpy_lacks_are_refused(tmp_path: Path) -> None:
    model = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save({"dense": {"model": model}}, checkpoint_id=tmp_path / "distributed", no_dist=True)
    with pytest.raises(SchemaError, match="parameter 'b' is bfloat16, which NumPy lacks"):
        read_model(tmp_path)


@pytest.mark.slow
def test_export_reads_the_columns_that_the_loader_read() -> None:
    inputs = open_checkpoint(runs() / "day").inputs
    assert inputs.dense == ("price",)
    assert list(inputs.sparse) == ["clicked", "item", "page", "viewed"]


@pytest.mark.slow
def test_published_changes_give_the_newer_export(tmp_path: Path) -> None:
    old = str(runs() / "all")
    for step in (11, 12):
        model = str(tmp_path / f"model-{step}")
        assert main(["export", old, "--checkpoint", str(step), "--output", model]) == 0
    changes = ["--changes", str(tmp_path / "changes")]
    words = ["publish", old, "--since", "11", "--output", str(tmp_path / "changes"), "--json"]
    published = json_of(main, words)
    for table in TABLES:
        (_, before), (_, after) = (
            rows_of(runs() / "all" / "checkpoints" / f"{step:08d}", table) for step in (11, 12)
        )
        num_changed = int((before[:, :8] != after[:, :8]).any(1).sum())
        assert published["num_changed"][table] == num_changed > 0
    words = ["apply", str(tmp_path / "model-11"), *changes, "--output", str(tmp_path / "applied")]
    assert main(words) == 0
    assert (tmp_path / "applied").read_bytes() == (tmp_path / "model-12").read_bytes()
    assert (tmp_path / "applied").read_bytes() != (tmp_path / "model-11").read_bytes()


# ---- Our own trainer ----


@pytest.mark.slow
def test_commands_that_need_the_model_of_a_job_say_so(tmp_path: Path) -> None:
    job, old = str(runs() / "job" / JOB), str(runs() / "all")
    data = ["--dataset", str(runs() / "dataset")]
    message = "expected a run of a job, got one of presage.PlannedSlots in "
    for words in (
        ["train", job, *data, "--output", old, "--resume"],
        ["evaluate", job, *data, "--run", old],
        ["evaluate", job, *data, "--run", old, "--segments", DATES[0]],
    ):
        assert refusal_of(main, words).startswith(message), words
    assert "no run of presage train" in refusal_of(main, ["verify", old])
    assert "no run of presage train" in refusal_of(main, ["diff", old, old])


@pytest.mark.slow
def test_own_loop_continues_rows_with_their_state(tmp_path: Path) -> None:
    copy = hard_links(runs() / "all", tmp_path / "all")
    shutil.rmtree(copy / "checkpoints" / "00000012")
    day = presage.Dataset(runs() / "dataset", days=DATES[:1])
    loader = presage.DataLoader(day, batch_samples=64, seed=5, deduplicated=False)
    optimizer = SparseOptimizerConfig(name="rowwise_adagrad", learning_rate=0.05)
    with one_rank(), presage.open_rows(loader, "mmap", tmp_path / "rows") as rows:
        configs = loader.embedding_bag_configs(8)
        collection = EmbeddingBagCollection(configs, optimizer=optimizer, seed=SEED, source=rows)
        model: Any = Model(collection, 8 * 5 + 2, sequences=False, hidden=16)
        state = rows.load(copy)
        assert state is not None
        loader.load_state_dict(state["loader"])
        arrays = read_model(require_checkpoint(copy)).items()
        layers = {name: torch.from_numpy(array) for name, array in arrays}
        assert not model.load_state_dict(layers, strict=False).unexpected_keys
        batch = next(iter(loader))
        assert batch.step == 11
        rows.advance(batch)
        loss, (own, _) = model(batch)
        loss.backward()
        assert own.numpy() == pytest.approx(found_of("all")["losses"][11], rel=1e-5)
        rows.save(copy, {})
        for table in TABLES:
            held, block = rows_of(require_checkpoint(runs() / "all"), table)
            found = rows.read({f"{table}_rows": held})[f"{table}_rows"]
            np.testing.assert_allclose(found.block, block, rtol=1e-4, atol=1e-6)
            before = rows_of(runs() / "all" / "checkpoints" / "00000011", table)[1]
            assert np.abs(before - block[: len(before)]).max() > 1e-3, "the step matters"
    with pytest.raises(SchemaError, match="as a loop of presage\\.open_rows saved it"):
        read_model(require_checkpoint(copy))
