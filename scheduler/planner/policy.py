"""`scheduler plan`: the sizes of both pools of one job, with reasons as text, table and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import (
    SEGMENT_BATCHES,
    Grid,
    counted,
    describe_preprocessing,
    describe_sizes,
    describe_training,
    mib,
    store_bytes,
    stores_needed,
    tables_bytes,
    trainer_memory,
    worker_bytes,
)
from presage.scheduler.model.predict import Models, fit_models, segment_setting, training_setting
from presage.scheduler.model.throughput import Ints, Prediction, predict_seconds
from presage.scheduler.planner.candidates import (
    TOLERANCE,
    Candidate,
    Predictions,
    candidate_at,
    find_candidates,
    predict_candidates,
    preference,
    resolve_time_cost_exponent,
    weighted_cost,
)
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.errors import PlanError

NAMED = 3
"""Most similar jobs that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """The chosen plan and the runners-up."""

    chosen: Candidate
    other_training: Candidate | None
    """Best plan with another training pool; None if there is none."""
    other_preprocessing: Candidate | None
    """Best plan with the same training pool and another preprocessing pool."""
    unweighted: Candidate | None = None
    """The plan with the smallest time x cost; None if it is chosen, or a deadline decides."""
    num_candidates: int
    models: Models


def plan(snapshot: PlanInputs, config: ScheduleConfig) -> PlanDecision:
    """Return the best plan within the limits and the budget.

    Raises:
        PlanError: no plan fits, or none is fast enough; the message names what would work.
    """
    models = fit_models(snapshot, config)
    grid = find_candidates(snapshot, config, models)
    predictions = predict_candidates(grid, snapshot, config, models)
    order = preference(grid, predictions, config)
    best = int(order[0])
    _check_deadline(predictions, best, config)
    same = (grid.num_replicas[order] == grid.num_replicas[best]) & (
        grid.num_stores[order] == grid.num_stores[best]
    )
    return PlanDecision(
        chosen=candidate_at(grid, predictions, best),
        other_training=_first(order[~same], grid, predictions),
        other_preprocessing=_first(order[same][1:], grid, predictions),
        unweighted=_unweighted(best, grid, predictions, config),
        num_candidates=len(grid),
        models=models,
    )


def predict_chosen(
    snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision
) -> tuple[Prediction, Prediction]:
    """Return the predictions of a plan's steps and segment jobs, with their intervals."""
    models, grid = decision.models, decision.chosen.grid
    return (
        predict_seconds(models.training, training_setting(snapshot, config, grid)),
        predict_seconds(models.segments, segment_setting(models, snapshot, config, grid)),
    )


def _first(order: Ints, grid: Grid, predictions: Predictions) -> Candidate | None:
    return candidate_at(grid, predictions, int(order[0])) if len(order) else None


def _unweighted(
    best: int, grid: Grid, predictions: Predictions, config: ScheduleConfig
) -> Candidate | None:
    if config.deadline is not None or resolve_time_cost_exponent(config.budget) == 1.0:
        return None
    even = replace(config, budget=replace(config.budget, time_cost_exponent=1.0))
    other = int(preference(grid, predictions, even)[0])
    return None if other == best else candidate_at(grid, predictions, other)


def _check_deadline(predictions: Predictions, best: int, config: ScheduleConfig) -> None:
    if config.deadline is None:
        return
    deadline, fastest = config.deadline.total_seconds(), float(predictions.predicted_sec[best])
    if fastest > deadline:
        raise PlanError(
            f"deadline cannot be met within the budget: deadline={deadline:g}s; "
            f"use at least {int(np.ceil(fastest))}s, or a larger budget"
        )


# Reasons.


def reasons(snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision) -> list[str]:
    """Return one line per choice, and one on the basis of the prediction."""
    return [
        _preprocessing_reason(config, decision),
        _training_reason(config, decision),
        _balance_reason(snapshot, decision),
        _tables_reason(snapshot, config, decision),
        _rule_reason(config, decision),
        _trust_reason(snapshot, config, decision),
    ]


def confident(snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision) -> bool:
    """Return whether both pools were measured near the chosen sizes."""
    return not caveats(snapshot, config, decision)


def caveats(snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision) -> list[str]:
    """Return the inputs of the prediction that were not measured, empty if there are none."""
    fit, chosen = decision.models.training, decision.chosen
    steps, segments = predict_chosen(snapshot, config, decision)
    items: list[str] = []
    if not snapshot.facts.measured:
        items.append("sizes of the data come from the job file, not from a dataset")
    if not snapshot.history.builds:
        items.append("no build was measured")
    elif not segments.confident[0]:
        items.append(f"segment times may be {_interval(segments)} of the predicted ones")
    if not fit.num_cells:
        names = dict.fromkeys(name for name, _ in decision.models.similar_jobs)
        like = ", ".join(list(names)[:NAMED])
        items.append(f"no run was measured{like and f', similar jobs are used: {like}'}")
    elif not steps.confident[0]:
        items.append(f"step times may be {_interval(steps)} of the predicted ones")
    if chosen.num_stores:
        items.append("transfers from stores were not measured")
    return items


def _interval(prediction: Prediction) -> str:
    seconds = prediction.seconds[0]
    low, high = prediction.low[0] / seconds, prediction.high[0] / seconds
    return f"{low:.0%} to {high:.0%}"


def _preprocessing_reason(config: ScheduleConfig, decision: PlanDecision) -> str:
    chosen, other = decision.chosen, decision.other_preprocessing
    segments = counted(decision.models.num_segments, "segment")
    text = (
        f"preprocessing: {describe_preprocessing(chosen)} make {chosen.rows_per_sec:,.0f} rows/s; "
        f"the data forms {segments} of at least {SEGMENT_BATCHES} batches"
        f"{_parts(decision.models.num_parts)}"
    )
    if other is None:
        return f"{text}; the limits and the budget allow no other size"
    return f"{text}; runner-up {describe_preprocessing(other)}: {_why_not(chosen, other, config)}"


def _training_reason(config: ScheduleConfig, decision: PlanDecision) -> str:
    chosen, other = decision.chosen, decision.other_training
    text = f"training: {describe_training(chosen)} train {chosen.samples_per_sec:,.0f} samples/s"
    if other is None:
        return f"{text}; the limits and the budget allow no other size"
    return f"{text}; runner-up {describe_training(other)}: {_why_not(chosen, other, config)}"


def _balance_reason(snapshot: PlanInputs, decision: PlanDecision) -> str:
    chosen = decision.chosen
    if decision.models.num_segments == 1:
        return (
            "balance: the only segment is built and then trained, so the pools run one after the "
            "other; with more data both run at once"
        )
    share = snapshot.facts.num_train_samples / snapshot.facts.num_samples
    return (
        f"balance: {share * chosen.rows_per_sec:,.0f} training samples/s are built and "
        f"{chosen.samples_per_sec:,.0f} can be trained; training waits "
        f"{chosen.waiting_sec:,.0f} s of {chosen.predicted_sec:,.0f} s"
    )


def _tables_reason(snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision) -> str:
    facts, train, chosen = snapshot.facts, snapshot.job.train, decision.chosen
    base = decision.models.base_bytes
    alone = trainer_memory(facts, train, 1, 0, base).total_bytes
    limit = config.training.replica.memory
    rows = sum(facts.table_rows.values())
    kind = "touched" if facts.measured else "possible"
    text = f"memory: {rows:,} {kind} rows take {mib(tables_bytes(facts, train))}"
    if chosen.num_stores == 0:
        return f"{text}; a replica with them needs {mib(alone)} of its {mib(limit)}, so no store"
    least = stores_needed(facts, train, config.training.store.memory)
    held = store_bytes(facts, train, chosen.num_stores)
    return (
        f"{text}; one replica would need {mib(alone)} and has {mib(limit)}, "
        f"so {counted(chosen.num_stores, 'store')} with "
        f"{mib(held)} of {mib(config.training.store.memory)} each hold them; "
        f"{least} would suffice"
    )


def _rule_reason(config: ScheduleConfig, decision: PlanDecision) -> str:
    chosen, budget = decision.chosen, config.budget
    cpus = chosen.preprocessing_cpus + chosen.training_cpus
    memory = chosen.preprocessing_memory_bytes + chosen.training_memory_bytes
    rule = _weighting_rule(resolve_time_cost_exponent(config.budget), decision)
    if config.deadline is not None:
        spare = config.deadline.total_seconds() - chosen.predicted_sec
        rule = f"the lowest cost that meets the deadline, with {spare:,.0f} s to spare"
    return (
        f"rule: {rule}; within {TOLERANCE:.0%} the lowest price an hour; both pools at once take "
        f"{cpus:g} of {budget.cpus:g} cores and {mib(memory)} of {mib(budget.memory)}"
    )


def _weighting_rule(exponent: float, decision: PlanDecision) -> str:
    chosen, other = decision.chosen, decision.unweighted
    if exponent == 1.0:
        return "the smallest time x cost, as no deadline is set"
    rule = (
        f"the smallest time^{exponent:g} x cost, as no deadline is set: 1 % of time is worth "
        f"{exponent:g} % of cost"
    )
    if other is None:
        return f"{rule}; the smallest time x cost would be the same plan"
    sec = _percent(other.predicted_sec, chosen.predicted_sec, "more time", "less time")
    cost = _percent(other.cost, chosen.cost, "more cost", "less cost")
    return f"{rule}; the smallest time x cost would be {describe_sizes(other)}: {sec} and {cost}"


def _trust_reason(snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision) -> str:
    items = caveats(snapshot, config, decision)
    fit, builds = decision.models.training, snapshot.history.builds
    compared = f"{counted(decision.num_candidates, 'plan')} compared"
    if items:
        return f"low confidence: {'; '.join(items)}; {compared}"
    return (
        f"confident: {counted(len(builds), 'build')} and {counted(fit.num_measurements, 'step')} "
        f"were measured, the fit is {fit.error:.0%} off on average; {compared}"
    )


def _parts(num_parts: float) -> str:
    if num_parts == math.inf:
        return ""
    return f", and {counted(int(num_parts), 'part')} in each, for one worker a part"


def _why_not(chosen: Candidate, other: Candidate, config: ScheduleConfig) -> str:
    sec = _percent(other.predicted_sec, chosen.predicted_sec, "more time", "less time")
    cost = _percent(other.cost, chosen.cost, "more cost", "less cost")
    if config.deadline is not None:
        deadline = config.deadline.total_seconds()
        if other.predicted_sec > deadline:
            return f"{other.predicted_sec:,.0f} s misses the deadline of {deadline:,.0f} s"
        ratio = other.cost / chosen.cost if chosen.cost else 1.0
        text = f"also meets the deadline of {deadline:,.0f} s, {sec} and {cost}"
    else:
        exponent = resolve_time_cost_exponent(config.budget)
        product, base = (
            weighted_cost(one.predicted_sec, one.cost, exponent) for one in (other, chosen)
        )
        ratio = product / base if base else 1.0
        worse = _percent(product, base, "more time x cost", "less time x cost")
        weighed = "" if exponent == 1.0 else f" with time weighted {exponent:g} times"
        text = f"{sec} and {cost}, {worse}{weighed}"
    if ratio > 1.0 + TOLERANCE or other.cost_per_hour <= chosen.cost_per_hour:
        return text
    hourly = _percent(other.cost_per_hour, chosen.cost_per_hour, "more", "less")
    return f"{text}, as good within {TOLERANCE:.0%} but {hourly} an hour"


def _percent(value: float, base: float, more: str, less: str) -> str:
    """Return the difference of a value in per cent, as text.

    Example:
        >>> _percent(110.0, 100.0, "more time", "less time"), _percent(1.0, 1.0, "more x", "less x")
        ('10.0 % more time', 'equal x')
    """
    if value == base:
        return f"equal {more.partition(' ')[2]}"
    if base == 0.0:
        return more
    change = value / base - 1.0
    return f"{abs(change) * 100:.1f} % {more if change > 0 else less}"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Predicted peak bytes of one process of each kind; 0 for a kind that is not used."""

    worker_bytes: int
    replica_bytes: int
    store_bytes: int


def predicted_memory(snapshot: PlanInputs, decision: PlanDecision) -> ProcessMemory:
    """Return the predicted peak of one process of each kind."""
    facts, train, chosen = snapshot.facts, snapshot.job.train, decision.chosen
    rows = facts.num_samples / decision.models.num_segments
    replica = trainer_memory(
        facts, train, chosen.num_replicas, chosen.num_stores, decision.models.base_bytes
    )
    stores = chosen.num_stores
    return ProcessMemory(
        worker_bytes(facts, rows, chosen.workers_per_job),
        replica.total_bytes,
        store_bytes(facts, train, stores) if stores else 0,
    )


def plan_to_json(
    snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision
) -> dict[str, object]:
    """Return the object that `plan --json` prints."""
    chosen = decision.chosen
    memory = predicted_memory(snapshot, decision)
    return {
        "preprocessing": {
            "segment_jobs": chosen.segment_jobs,
            "workers_per_job": chosen.workers_per_job,
            "cpus": chosen.preprocessing_cpus,
            "memory_bytes": chosen.preprocessing_memory_bytes,
            "predicted_worker_bytes": memory.worker_bytes,
            "rows_per_sec": chosen.rows_per_sec,
        },
        "training": {
            "num_replicas": chosen.num_replicas,
            "num_stores": chosen.num_stores,
            "cpus": chosen.training_cpus,
            "memory_bytes": chosen.training_memory_bytes,
            "predicted_replica_bytes": memory.replica_bytes,
            "predicted_store_bytes": memory.store_bytes,
            "samples_per_sec": chosen.samples_per_sec,
        },
        "predicted_sec": chosen.predicted_sec,
        "cost": chosen.cost,
        "cost_per_hour": chosen.cost_per_hour,
        "confident": confident(snapshot, config, decision),
        "reasons": reasons(snapshot, config, decision),
    }


def plan_summary(decision: PlanDecision) -> str:
    """Return the plan in one line."""
    c = decision.chosen
    return f"{describe_sizes(c)}: {c.predicted_sec:,.0f} s, cost {c.cost:.4g}"


def explain_plan(
    snapshot: PlanInputs, config: ScheduleConfig, decision: PlanDecision
) -> RenderableType:
    """Return the plan as a table of pools and a list of reasons."""
    chosen, memory = decision.chosen, predicted_memory(snapshot, decision)
    table = Table(title=snapshot.job.name, title_justify="left")
    for column in ("", "preprocessing", "training"):
        table.add_column(column)
    stores = f", store {mib(memory.store_bytes)}" if chosen.num_stores else ""
    for row in (
        (
            "processes",
            describe_preprocessing(chosen),
            describe_training(chosen),
        ),
        ("cores", f"{chosen.preprocessing_cpus:g}", f"{chosen.training_cpus:g}"),
        (
            "memory",
            mib(chosen.preprocessing_memory_bytes),
            mib(chosen.training_memory_bytes),
        ),
        (
            "predicted",
            f"worker {mib(memory.worker_bytes)}",
            f"replica {mib(memory.replica_bytes)}{stores}",
        ),
        ("speed", f"{chosen.rows_per_sec:,.0f} rows/s", f"{chosen.samples_per_sec:,.0f} samples/s"),
    ):
        table.add_row(*row)
    prices = Text(
        f"{chosen.predicted_sec:,.0f} s from start to trained model, cost {chosen.cost:.4g} "
        f"({chosen.cost_per_hour:.4g} an hour while both pools are held)"
    )
    lines = [Text(f"- {reason}") for reason in reasons(snapshot, config, decision)]
    return Group(table, prices, *lines)
