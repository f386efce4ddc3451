"""The choice of sizes of one job, and the weight of time against cost."""

import itertools
import math
import re
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from presage.scheduler.model.past_runs import BuildRecord, History
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import Grid, store_bytes, trainer_memory, worker_bytes
from presage.scheduler.model.predict import TRAINER_START_SEC, fit_models, training_setting
from presage.scheduler.model.throughput import (
    WORKERS_EXPONENT,
    SegmentSetting,
    TrainingSetting,
    Window,
    observe,
)
from presage.scheduler.planner.candidates import (
    NOTICE_SEC,
    TIME_COST_EXPONENT,
    TOLERANCE,
    Candidate,
    build_timeline,
    find_candidates,
    objective,
    predict_candidates,
    weighted_cost,
)
from presage.scheduler.planner.policy import plan, reasons
from presage.schemas.config.job import load_job
from presage.schemas.config.schedule import (
    BudgetConfig,
    PreprocessingPoolConfig,
    ScheduleConfig,
    TrainingPoolConfig,
    WorkerConfig,
)
from presage.schemas.errors import PlanError, SchemaError
from tests.scheduler.small_job import FACTS, GIB, make_run, snapshot, write_job

Sizes = tuple[int, int, int, int]

workers = st.builds(
    WorkerConfig,
    cpus=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    memory=st.sampled_from([2 * GIB, 4 * GIB, 8 * GIB]),
)
schedules = st.builds(
    ScheduleConfig,
    budget=st.builds(
        BudgetConfig,
        cpus=st.floats(4.0, 40.0),
        memory=st.integers(8 * GIB, 128 * GIB),
        cpu_hour_price=st.floats(0.0, 1.0),
        gib_hour_price=st.floats(0.0, 0.1),
    ),
    preprocessing=st.builds(
        PreprocessingPoolConfig,
        worker=workers,
        min_workers=st.integers(1, 3),
        max_workers=st.integers(3, 8),
    ),
    training=st.builds(
        TrainingPoolConfig,
        replica=workers,
        store=workers,
        min_replicas=st.integers(1, 2),
        max_replicas=st.integers(2, 6),
        max_stores=st.integers(1, 4),
    ),
    deadline=st.one_of(st.none(), st.timedeltas(timedelta(seconds=60), timedelta(hours=4))),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> PlanInputs:
    """A job of one million samples without a history."""
    return snapshot(tmp_path_factory.mktemp("job"), ScheduleConfig())


def brute_force(demo: PlanInputs, config: ScheduleConfig) -> dict[Sizes, tuple[float, float]]:
    """Return (seconds, cost) of every size that fits, one by one with plain loops."""
    facts, train, models = demo.facts, demo.job.train, fit_models(demo, config)
    pre, pool, budget = config.preprocessing, config.training, config.budget
    found: dict[Sizes, tuple[float, float]] = {}
    for jobs, each, replicas, stores in itertools.product(
        range(1, pre.max_workers + 1),
        range(1, pre.max_workers + 1),
        range(pool.min_replicas, pool.max_replicas + 1),
        range(pool.max_stores + 1),
    ):
        total = jobs * each
        if jobs > models.num_segments or not pre.min_workers <= total <= pre.max_workers:
            continue
        rows = facts.num_samples / models.num_segments
        needs = [
            (worker_bytes(facts, rows, each), pre.worker.memory),
            (
                trainer_memory(facts, train, replicas, stores, models.base_bytes).total_bytes,
                pool.replica.memory,
            ),
            (store_bytes(facts, train, stores) if stores else 0, pool.store.memory),
        ]
        if any(need > has for need, has in needs):
            continue
        cpus = [total * pre.worker.cpus, replicas * pool.replica.cpus + stores * pool.store.cpus]
        memory = [
            total * pre.worker.memory,
            replicas * pool.replica.memory + stores * pool.store.memory,
        ]
        if sum(cpus) > budget.cpus + 1e-9 or sum(memory) > budget.memory:
            continue
        moved = 2 * facts.rows_per_step * train.embedding_dim * 4
        block, threads = demo.job.data.block_samples, max(1, int(pool.replica.cpus))
        blocks = math.ceil(train.batch_samples / block / replicas)
        share = math.ceil(blocks / threads) * threads * block
        step = models.training.seconds(
            TrainingSetting(
                unique_rows=facts.rows_per_step,
                fetched_rows=facts.rows_per_step,
                moved_bytes=moved,
                num_replicas=replicas,
                num_stores=stores,
                replica_cpus=pool.replica.cpus,
                store_cpus=pool.store.cpus,
                batch_samples=replicas * share,
            )
        )[0]
        busy = min(each, math.ceil(rows / 4_000))
        segment = SegmentSetting(
            rows=rows,
            workers=busy,
            worker_cpus=min(
                pre.worker.cpus * (each / busy) ** WORKERS_EXPONENT, max(pre.worker.cpus, 1.0)
            ),
            segment_jobs=jobs,
        )
        times = build_timeline(
            models.segments.seconds(segment)[0] + NOTICE_SEC,
            models.num_segments,
            jobs,
            facts.num_train_samples / models.num_segments / (train.batch_samples / step),
            train.epochs,
            (TRAINER_START_SEC if replicas > 1 else 0.0)
            + TRAINER_START_SEC / min(1.0, pool.replica.cpus),
        )
        prices = [
            c * budget.cpu_hour_price + m / GIB * budget.gib_hour_price
            for c, m in zip(cpus, memory, strict=True)
        ]
        memory = float(times.built_sec), float(times.end_sec - times.first_sec)
        cost = sum(p * s for p, s in zip(prices, memory, strict=True)) / 3600
        found[(jobs, each, replicas, stores)] = float(times.end_sec), cost
    return found


def hour_price(sizes: Sizes, config: ScheduleConfig) -> float:
    """Return what all processes of a plan cost in one hour."""
    jobs, each, replicas, stores = sizes
    pool, budget = config.training, config.budget
    counted = [
        (jobs * each, config.preprocessing.worker),
        (replicas, pool.replica),
        (stores, pool.store),
    ]
    return sum(
        n * (w.cpus * budget.cpu_hour_price + w.memory / GIB * budget.gib_hour_price)
        for n, w in counted
    )


def sizes_of(candidate: Candidate) -> Sizes:
    return (
        candidate.segment_jobs,
        candidate.workers_per_job,
        candidate.num_replicas,
        candidate.num_stores,
    )


@pytest.mark.slow
@given(config=schedules)
def test_plan_is_the_best_of_all_that_fit(demo: PlanInputs, config: ScheduleConfig) -> None:
    found = brute_force(demo, config)
    wanted = math.inf if config.deadline is None else config.deadline.total_seconds()
    in_time = {k: v for k, v in found.items() if v[0] <= wanted}
    if not in_time:
        with pytest.raises(PlanError):
            plan(demo, config)
        return
    decision = plan(demo, config)
    sec, cost = found[sizes_of(decision.chosen)]
    assert decision.chosen.predicted_sec == pytest.approx(sec)
    assert decision.chosen.cost == pytest.approx(cost)
    assert decision.num_candidates == len(found)
    assert sec <= wanted
    k = TIME_COST_EXPONENT
    value = {
        sizes: c if config.deadline else (s**k * c) ** (2.0 / (1.0 + k))
        for sizes, (s, c) in in_time.items()
    }
    near = (1 + TOLERANCE) * min(value.values())
    assert value[sizes_of(decision.chosen)] <= near * (1 + 1e-9)
    cheapest = min(hour_price(k, config) for k in value if value[k] <= near * (1 - 1e-9))
    assert decision.chosen.cost_per_hour <= cheapest * (1 + 1e-9)


@given(config=schedules)
def test_plan_never_exceeds_the_budget_or_a_limit(demo: PlanInputs, config: ScheduleConfig) -> None:
    try:
        decision = plan(demo, config)
    except PlanError:
        reject()
    for c in (decision.chosen, decision.other_training, decision.other_preprocessing):
        if c is None:
            continue
        pool, total = config.training, c.segment_jobs * c.workers_per_job
        assert c.preprocessing_cpus + c.training_cpus <= config.budget.cpus + 1e-9
        memory = c.preprocessing_memory_bytes + c.training_memory_bytes
        assert memory <= config.budget.memory
        assert memory == (
            total * config.preprocessing.worker.memory
            + c.num_replicas * pool.replica.memory
            + c.num_stores * pool.store.memory
        )
        assert config.preprocessing.min_workers <= total <= config.preprocessing.max_workers
        assert pool.min_replicas <= c.num_replicas <= pool.max_replicas
        assert 0 <= c.num_stores <= pool.max_stores


@given(config=schedules, cpus=st.floats(0.1, 6.0), memory=st.integers(GIB, 16 * GIB))
def test_plan_with_the_named_smallest_budget_works_and_with_less_does_not(
    demo: PlanInputs, config: ScheduleConfig, cpus: float, memory: int
) -> None:
    config = replace(config, budget=BudgetConfig(cpus=cpus, memory=memory), deadline=None)
    message = refusal(demo, config)
    named = re.search(r"use at least cpus=([\d.e+-]+) and memory=(\d+)MiB", message)
    if named is None:
        assert "budget" not in message
        reject()
    least = BudgetConfig(cpus=float(named[1]), memory=int(named[2]) << 20)
    assert refusal(demo, replace(config, budget=least)) == ""
    for less in (
        replace(least, cpus=least.cpus - 0.01),
        replace(least, memory=least.memory - (1 << 20)),
    ):
        assert refusal(demo, replace(config, budget=less)).startswith("budget does not hold")


def refusal(demo: PlanInputs, config: ScheduleConfig) -> str:
    """Return why there is no plan, or nothing when there is one."""
    try:
        plan(demo, config)
    except PlanError as error:
        return str(error)
    return ""


def test_plan_with_too_small_a_budget_says_so_in_one_line(demo: PlanInputs) -> None:
    config = ScheduleConfig(budget=BudgetConfig(cpus=1.0, memory=GIB))
    message = (
        "budget does not hold the smallest pools: cpus=1 and memory=1024MiB; use at least "
        "cpus=2 and memory=4096MiB (workers=1, replicas=1, stores=0)"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        plan(demo, config)


def fastest_sec(demo: PlanInputs) -> int:
    """Return the smallest deadline that the planner says it can meet, in whole seconds."""
    with pytest.raises(PlanError, match="deadline cannot be met") as caught:
        plan(demo, ScheduleConfig(deadline=timedelta(seconds=1)))
    found = re.search(r"use at least (\d+)s", str(caught.value))
    assert found is not None
    return int(found[1])


def test_plan_with_the_named_deadline_works_and_with_less_does_not(demo: PlanInputs) -> None:
    least = fastest_sec(demo)
    chosen = plan(demo, ScheduleConfig(deadline=timedelta(seconds=least))).chosen
    assert least - 1 < chosen.predicted_sec <= least
    with pytest.raises(PlanError, match="deadline cannot be met"):
        plan(demo, ScheduleConfig(deadline=timedelta(seconds=least - 1)))


@pytest.mark.slow
def test_plan_with_a_tighter_deadline_costs_no_less(demo: PlanInputs) -> None:
    least = fastest_sec(demo)
    loose = plan(demo, ScheduleConfig(deadline=timedelta(days=30))).chosen
    before = loose.cost
    for seconds in np.geomspace(loose.predicted_sec, least, 8):
        deadline = timedelta(seconds=float(seconds) + 1)
        chosen = plan(demo, ScheduleConfig(deadline=deadline)).chosen
        assert chosen.predicted_sec <= deadline.total_seconds()
        assert chosen.cost >= before / (1 + TOLERANCE)
        before = max(before, chosen.cost)
    assert before > loose.cost * (1 + TOLERANCE)


@pytest.mark.parametrize("flops", [2, 40], ids=["light model", "heavy model"])
def test_plan_that_follows_lets_neither_pool_wait_long(demo: PlanInputs, flops: int) -> None:
    """With many segments the pools keep step, whichever of the two has more to do."""
    facts = replace(demo.facts, num_samples=10**8, num_train_samples=10**8)
    train = demo.job.train
    model = replace(train.model, top_layers=(flops * 16, 64))
    job = replace(demo.job, train=replace(train, model=model))
    limits = TrainingPoolConfig(
        replica=WorkerConfig(cpus=1.0, memory=4 * GIB), max_replicas=32, max_stores=4
    )
    budget = BudgetConfig(cpus=64.0, memory=1024 * GIB)
    decision = plan(
        replace(demo, facts=facts, job=job), ScheduleConfig(training=limits, budget=budget)
    )
    c = decision.chosen
    assert c.waiting_sec < 0.25 * c.predicted_sec
    assert 0.5 < c.rows_per_sec / c.samples_per_sec < 2.0


def test_plan_of_tables_larger_than_a_replica_takes_stores(demo: PlanInputs) -> None:
    facts = replace(FACTS, table_rows={"users": 50_000_000})
    training = TrainingPoolConfig(replica=WorkerConfig(memory=4 * GIB), max_stores=16)
    decision = plan(replace(demo, facts=facts), ScheduleConfig(training=training))
    stores = decision.chosen.num_stores
    assert stores > 1
    assert store_bytes(facts, demo.job.train, stores) <= 2 * GIB


def test_plan_of_tables_larger_than_all_stores_names_how_many_are_needed(demo: PlanInputs) -> None:
    large = replace(demo, facts=replace(FACTS, table_rows={"users": 50_000_000}))
    few = TrainingPoolConfig(max_stores=1)
    message = (
        "training.max_stores is too small for the tables: 1 of 2048MiB; use 3 stores, or replica"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        plan(large, ScheduleConfig(training=few))
    enough = TrainingPoolConfig(max_stores=3, min_replicas=2)
    chosen = plan(large, ScheduleConfig(training=enough)).chosen
    assert chosen.num_stores == 3
    assert chosen.num_replicas >= 2


REFUSED = {
    "no room for one worker's shard": (
        ScheduleConfig(preprocessing=PreprocessingPoolConfig(worker=WorkerConfig(memory=1 << 20))),
        "preprocessing.worker.memory is too small for a worker's shard: 1MiB",
    ),
    "fewest workers above most": (
        ScheduleConfig(preprocessing=PreprocessingPoolConfig(min_workers=9, max_workers=8)),
        "preprocessing.max_workers must be at least 1 and min_workers, got max_workers=8",
    ),
    "fewest replicas above most": (
        ScheduleConfig(training=TrainingPoolConfig(min_replicas=3, max_replicas=2)),
        "training.max_replicas must be at least 1 and min_replicas, got max_replicas=2",
    ),
    "no room for a trainer": (
        ScheduleConfig(training=TrainingPoolConfig(replica=WorkerConfig(memory=1 << 20))),
        "training.replica.memory is too small for a replica: 1MiB; use at least",
    ),
    "replicas that hold all rows": (
        ScheduleConfig(
            training=TrainingPoolConfig(min_replicas=2, replica=WorkerConfig(memory=950 << 20))
        ),
        "training.replica.memory is too small for a replica: 950MiB; use at least 954MiB",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_plan_that_cannot_fit_names_the_limit(
    demo: PlanInputs, config: ScheduleConfig, message: str
) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}") as caught:
        plan(demo, config)
    assert "\n" not in str(caught.value)


def test_plan_twice_is_equal(tmp_path: Path) -> None:
    demo = snapshot(tmp_path, ScheduleConfig())
    assert plan(demo, demo.job.schedule) == plan(demo, demo.job.schedule)


@pytest.mark.parametrize(("part_rows", "busy"), [(None, 3), (10_000.0, 1), (6_000.0, 2)])
def test_predict_leaves_workers_without_a_part_idle(
    demo: PlanInputs, part_rows: float | None, busy: int
) -> None:
    """A segment of 10,000 rows keeps no more workers busy than it has parts."""
    facts = replace(FACTS, num_samples=10_000, num_train_samples=10_000, part_rows=part_rows)
    small, config = replace(demo, facts=facts), ScheduleConfig()
    models = fit_models(small, config)
    assert models.num_segments == 1
    one = np.ones(3, np.int64)
    found = predict_candidates(Grid(one, np.array([1, 2, 3]), one, 0 * one), small, config, models)
    assert len(np.unique(found.rows_per_sec)) == busy


def test_replicas_without_a_block_of_the_batch_change_nothing_but_the_exchange(
    demo: PlanInputs,
) -> None:
    blocks = demo.job.train.batch_samples // demo.job.data.block_samples
    config, models = ScheduleConfig(), fit_models(demo, ScheduleConfig())
    counts = np.array([blocks // 2, blocks - 1, blocks, 2 * blocks])
    one = np.ones(4, np.int64)
    setting = training_setting(demo, config, Grid(one, one, counts, 0 * one))
    compute = setting.design()[:, 0].tolist()
    assert compute[0] == compute[1] == 2 * compute[2] == 2 * compute[3]
    assert (np.diff(models.training.seconds(setting)[2:]) > 0).all()


def test_start_of_training_is_predicted_until_it_trains(demo: PlanInputs) -> None:
    config = ScheduleConfig()
    models = replace(fit_models(demo, config), num_segments=1)
    one = np.ones(2, np.int64)
    grid = Grid(one, one, np.array([1, 2]), 0 * one)
    before = predict_candidates(grid, demo, config, models).predicted_sec
    after = predict_candidates(grid, demo, config, replace(models, is_training=True)).predicted_sec
    assert (before - after).tolist() == pytest.approx([TRAINER_START_SEC, 2 * TRAINER_START_SEC])


def test_fit_models_of_a_run_that_took_more_memory_raises_the_base(demo: PlanInputs) -> None:
    run = make_run([(1, 256, 0.1)])
    before = fit_models(demo, ScheduleConfig())
    peak = trainer_memory(FACTS, demo.job.train, 1, 0).total_bytes + GIB
    run = replace(run, summary=replace(run.summary, peak_rss_bytes=peak))
    after = fit_models(replace(demo, history=History((), (run,))), ScheduleConfig())
    assert after.base_bytes == before.base_bytes + GIB
    memory = trainer_memory(FACTS, demo.job.train, 1, 0, after.base_bytes).total_bytes
    assert memory == peak


def test_fit_models_of_a_running_job_trusts_its_own_steps_over_its_history(
    demo: PlanInputs,
) -> None:
    history = History((BuildRecord(100_000, 1.0, 10_000.0),), (make_run([(1, 256, 0.1)] * 40),))
    before = fit_models(replace(demo, history=history), ScheduleConfig())
    one = np.ones(1, np.int64)
    setting = training_setting(demo, ScheduleConfig(), Grid(one, one, one, 0 * one))
    assert before.training.seconds(setting)[0] == pytest.approx(0.1)
    steps = observe(Window(), setting, [0.4], 10.0)
    built = observe(Window(), SegmentSetting(rows=100_000), [44.0], 10.0)
    after = fit_models(replace(demo, history=history), ScheduleConfig(), steps, built)
    assert after.training.seconds(setting)[0] == pytest.approx(0.4)
    assert after.segments.seconds(SegmentSetting(rows=100_000))[0] == pytest.approx(44.0)


BUDGET = BudgetConfig(cpus=24.0, memory=96 * GIB)
AMOUNTS = st.floats(1e-6, 1e9)


def weighted(exponent: float | None) -> ScheduleConfig:
    """Return limits of an owner with an exponent."""
    return ScheduleConfig(budget=replace(BUDGET, time_cost_exponent=exponent))


@given(AMOUNTS, AMOUNTS)
def test_weigh_alike_is_time_x_cost_to_the_bit(seconds: float, cost: float) -> None:
    assert weighted_cost(seconds, cost, 1.0) == seconds * cost


@given(AMOUNTS, AMOUNTS, st.floats(0.0, 100.0), st.floats(0.01, 1.0))
def test_weigh_scales_alike_for_any_exponent(
    seconds: float, cost: float, exponent: float, share: float
) -> None:
    smaller = weighted_cost(share * seconds, share * cost, exponent)
    assert smaller == pytest.approx(share**2 * weighted_cost(seconds, cost, exponent))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0, 8.0, 100.0])
def test_objective_is_least_where_time_to_the_power_x_cost_is(
    demo: PlanInputs, exponent: float
) -> None:
    config = weighted(exponent)
    models = fit_models(demo, config)
    grid = find_candidates(demo, config, models)
    found = predict_candidates(grid, demo, config, models)
    logs = exponent * np.log(found.predicted_sec) + np.log(found.cost)
    wanted = objective(found, config)
    assert logs[wanted.argmin()] == pytest.approx(logs.min(), abs=1e-9)
    np.testing.assert_allclose(np.log(wanted), logs * 2.0 / (1.0 + exponent), atol=1e-9)


def test_plan_of_a_larger_exponent_takes_no_longer_and_costs_no_less(demo: PlanInputs) -> None:
    chosen = [plan(demo, weighted(exponent)).chosen for exponent in (0.0, 1.0, 8.0, 60.0)]
    for slow, fast in pairwise(chosen):
        # Two plans that are as good within TOLERANCE may come in either order.
        assert fast.predicted_sec <= slow.predicted_sec * (1 + TOLERANCE) ** 2
        assert fast.cost >= slow.cost / (1 + TOLERANCE) ** 2
    assert chosen[-1].predicted_sec < 0.8 * chosen[0].predicted_sec
    assert chosen[-1].cost > 1.2 * chosen[0].cost


def test_plan_without_an_exponent_has_the_measured_one(demo: PlanInputs) -> None:
    assert plan(demo, weighted(None)).chosen == plan(demo, weighted(TIME_COST_EXPONENT)).chosen


def test_plan_names_what_time_x_cost_would_have_chosen(demo: PlanInputs) -> None:
    even, fast = plan(demo, weighted(1.0)), plan(demo, weighted(20.0))
    assert even.unweighted is None
    assert fast.unweighted == even.chosen != fast.chosen
    text = reasons(demo, weighted(20.0), fast)
    assert "rule: the smallest time^20 x cost, as no deadline is set: 1 % of time " in text[-2]
    assert "is worth 20 % of cost; the smallest time x cost would be " in text[-2]
    assert f"{even.chosen.num_replicas} replica" in text[-2]
    assert re.search(r"the smallest time x cost would be .* more time and .* less cost; ", text[-2])
    assert "time x cost with time weighted 20 times" in text[1]
    assert "rule: the smallest time x cost, as" in reasons(demo, weighted(1.0), even)[-2]


def test_plan_of_a_pool_of_one_says_that_the_exponent_changes_nothing(demo: PlanInputs) -> None:
    config = ScheduleConfig(budget=BudgetConfig(cpus=2.0, memory=8 * GIB, time_cost_exponent=8.0))
    text = reasons(demo, config, plan(demo, config))
    assert "the smallest time x cost would be the same plan" in text[-2]


def test_job_file_sets_the_exponent(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, "  budget: {time_cost_exponent: 2.5}"))
    assert job.schedule.budget.time_cost_exponent == 2.5
    for wrong in ("-1", "101"):
        with pytest.raises(SchemaError, match=r"time_cost_exponent must be in \[0, 100\], got "):
            load_job(write_job(tmp_path, f"  budget: {{time_cost_exponent: {wrong}}}"))
