"""Old logs are decided by the rules that they were written by."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.controller.events import ORIGINAL_RULES, RULES, BudgetSet, Event
from scheduler.controller.handle import handle
from scheduler.controller.log import (
    Log,
    event_from_json,
    event_to_json,
    read_log,
    recover,
    replay,
    to_decision,
)
from scheduler.controller.state import Action, State
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, GIB, World, run, submitted

LARGE = BudgetSet(time_sec=0.0, cpus=16.0, memory_bytes=64 * GIB)


def sizes(budget: BudgetSet, schedule: str = "  priority: 0") -> Any:
    """Return what a lone job is given."""
    return Bench(budget, submitted("first", 2, schedule)).job.sizes


def test_handle_of_rules_before_the_exponent_takes_the_smallest_time_x_cost() -> None:
    old, even = replace(LARGE, rules=ORIGINAL_RULES), replace(LARGE, time_cost_exponent=1.0)
    assert sizes(old) == sizes(even) != sizes(replace(LARGE, time_cost_exponent=8.0))


def test_handle_prefers_the_exponent_of_the_budget_over_that_of_the_job() -> None:
    own = "  budget: {time_cost_exponent: 1}"
    assert sizes(LARGE, own) == sizes(replace(LARGE, time_cost_exponent=1.0))
    assert sizes(replace(LARGE, time_cost_exponent=30.0), own) == sizes(
        replace(LARGE, time_cost_exponent=30.0)
    )
    assert sizes(replace(LARGE, time_cost_exponent=30.0), own) != sizes(LARGE, own)


def test_event_of_a_budget_that_says_no_rules_has_the_first_ones() -> None:
    body = event_to_json(LARGE)
    assert event_from_json(body) == LARGE
    assert body["rules"] == RULES
    del body["rules"], body["haste"]
    assert event_from_json(body) == replace(LARGE, rules=ORIGINAL_RULES)


@pytest.mark.slow
def test_replay_of_a_log_without_rules_gives_its_own_decisions(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.jsonl"
    jobs = [submitted("first", 3), submitted("second", 2, "  priority: 1", 5.0)]
    with Log(path) as log:

        def tell(state: State, event: Event) -> tuple[State, list[Action]]:
            state, actions = handle(state, event)
            log.append(event, [to_decision(action, state.now_sec) for action in actions])
            return state, actions

        first = replace(BUDGET, rules=ORIGINAL_RULES)
        run(World(jobs), State(), tell, np.random.default_rng(3), [first, *jobs])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("event") == "BudgetSet":
            del line["rules"], line["haste"]  # as it was written before
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = replay(read_log(path))
    assert found.difference is None
    assert found.num_decisions > 20
    # Whoever goes on with it says by which rules from then on.
    state, _ = handle(recover(path).state, replace(BUDGET, time_sec=1e6))
    assert state.rules == RULES


def test_event_of_rules_that_only_later_code_knows_is_refused() -> None:
    body = {**event_to_json(LARGE), "rules": RULES + 1}
    with pytest.raises(ValueError, match=re.escape(f"rules must be in [1, {RULES}], got")):
        event_from_json(body)
