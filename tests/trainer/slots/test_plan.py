"""A plan in files: every row of a step has one slot, and fetches are those of the cache plan."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import NextUses
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.oracle.cache_plan import plan_table, summarize
from presage.trainer.slots.slot_plan import SlotPlan, SlotSettings
from presage.trainer.slots.slot_planner import write_plan
from tests.trainer.slots.test_planned_slots import CACHE_ROWS, dataset

TABLES = {"items": CACHE_ROWS, "pages": 12}


def job_of(seed: int = 5) -> tuple[OpenDataset, Order]:
    opened = open_dataset(dataset())
    return opened, opened.order(32, 2, "blocks", seed, "train")


def settings_of(**changes: object) -> SlotSettings:
    values = {"cache_rows": TABLES, "num_parts": 1, "prefetch_steps": 2, "first_step": 0}
    return SlotSettings(**{**values, **changes})  # type: ignore[arg-type]


def planned(folder: Path, settings: SlotSettings) -> SlotPlan:
    """Return a plan that this process has written."""
    opened, order = job_of()
    own = settings.folder(folder, opened, order)
    own.mkdir()
    write_plan(opened, order, settings, own)
    return SlotPlan(folder, opened, order, settings)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("first_step", [0, 17])
def test_each_row_of_a_step_has_a_slot_of_its_part(
    tmp_path: Path, num_parts: int, first_step: int
) -> None:
    opened, order = job_of()
    plan = planned(tmp_path, settings_of(num_parts=num_parts, first_step=first_step))
    header, reader = plan.header, plan.reader()
    accesses = [TableAccesses(opened, table, order) for table in TABLES]
    held: dict[int, int] = {}  # key by slot
    fetched = np.zeros(len(TABLES), np.int64)
    for train_step in range(first_step, order.num_steps):
        step = reader.step(train_step)
        for key, slot in zip(step.fetched.tolist(), step.slots.tolist(), strict=True):
            assert slot not in held
            assert key not in held.values()
            held[slot] = key
        fetched += np.histogram(step.fetched, header.key_starts)[0]
        slot_of = {key: slot for slot, key in held.items()}
        for t, of_table in enumerate(accesses):
            rows = np.sort(of_table.rows[of_table.numbers(train_step)])
            first, end = header.key_starts[t : t + 2]
            keys = np.searchsorted(plan.rows[first:end], rows) + first
            assert plan.rows[keys].tolist() == rows.tolist()
            slots = np.array([slot_of[key] for key in keys.tolist()]) - header.slot_starts[t]
            part_rows = -(-opened.job.data.tables[[*TABLES][t]].num_rows // num_parts)
            assert (slots // header.tables[t].part_slots).tolist() == (rows // part_rows).tolist()
        for slot in step.evicted.tolist():
            del held[slot]
    if num_parts == 1:
        index = opened.index_for(order)
        for t, (table, of_table) in enumerate(zip(TABLES, accesses, strict=True)):
            uses = NextUses(opened, index, table, of_table.numbering)
            steps = range(first_step, order.num_steps)
            entries = map(of_table.entries, steps, uses.within(steps))
            rows = min(TABLES[table], len(of_table.rows))
            config = CacheConfig(policy="belady", prefetch_steps=2, rows=rows)
            wanted = summarize(plan_table(entries, config, first_step=first_step))
            assert fetched[t] == wanted.fetched_rows


def test_part_of_a_plan_is_that_of_the_whole(tmp_path: Path) -> None:
    plan = planned(tmp_path, settings_of(num_parts=2))
    header = plan.header
    own = np.array([[False, True], [True, False]])
    shifts = np.array([[0, 5], [7, 0]])
    whole, part = plan.reader(), plan.reader(own.ravel(), shifts.ravel())
    for train_step in (0, 1, 40, 61, 3):
        a, b = whole.step(train_step), part.step(train_step)
        for slots, shifted in ((a.slots, b.slots), (a.evicted, b.evicted)):
            table = np.searchsorted(header.slot_starts, slots, side="right") - 1
            sizes = np.array([each.part_slots for each in header.tables])[table]
            of_part = (slots - header.slot_starts[table]) // sizes
            chosen = own[table, of_part]
            expected = slots[chosen] - shifts[table, of_part][chosen]
            assert shifted.tolist() == expected.tolist()


@pytest.mark.parametrize("num_parts", [1, 2])
def test_cache_that_is_too_small_is_refused_with_the_size_that_works(
    tmp_path: Path, num_parts: int
) -> None:
    small = settings_of(cache_rows={"items": 500}, num_parts=num_parts)
    with pytest.raises(PlanError, match="cache of table 'items' is too small") as error:
        planned(tmp_path, small)
    required = error.value.required_rows
    assert required is not None
    planned(tmp_path, settings_of(cache_rows={"items": required}, num_parts=num_parts))
    with pytest.raises(PlanError):
        planned(
            tmp_path, settings_of(cache_rows={"items": required - num_parts}, num_parts=num_parts)
        )


def test_planner_runs_once_and_again_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, order = job_of()
    settings = settings_of()
    first = SlotPlan(tmp_path, opened, order, settings)
    planner = first._planner
    assert planner is not None
    os.kill(planner.pid, signal.SIGKILL)
    planner.wait()
    first._planner = None  # as if it was that of another rank
    for path in first.folder.glob("*.parquet"):
        path.unlink()
    reader = first.reader()
    assert len(reader.step(order.num_steps - 1).evicted)
    again = SlotPlan(tmp_path, opened, order, settings)
    assert again._planner is None
    first.close()


def test_refusals_of_the_planner_reach_each_rank(tmp_path: Path) -> None:
    opened, order = job_of(seed=6)
    with pytest.raises(SchemaError, match="dataset has no index for"):
        SlotPlan(tmp_path, opened, order, settings_of())
    opened, order = job_of()
    with pytest.raises(PlanError, match="use at least 1902") as error:
        SlotPlan(tmp_path, opened, order, settings_of(cache_rows={"items": 1000}))
    assert error.value.required_rows == 1902
