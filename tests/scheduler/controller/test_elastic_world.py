"""Whatever happens as stores come and go: none with rows ever leaves, and every job ends."""

from dataclasses import replace

import numpy as np
import pytest

from presage.scheduler.controller.events import Drained, LoadKnown, Submitted
from presage.scheduler.controller.slots import NUM_RANGES
from presage.scheduler.controller.state import ENDED_PHASES
from tests.scheduler.controller.elastic_world import ElasticWorld, Kind
from tests.scheduler.controller.test_elastic import AMPLE, STORES
from tests.scheduler.controller.world import STEPS_PER_SEGMENT, submitted

NUM_SEGMENTS = 12
NUM_WILD = 250
"""Events until nothing disturbs any more, so that the end is reached."""
NUM_CALM = 6000
"""Events after that by which every job must have ended."""
CPUS = (2.0, 3.0, 5.0, 16.0)
"""Cores of the budgets that change."""

KINDS = {
    "stores become more and fewer": Kind(deaths=False),
    "processes die": Kind(),
    "the budget changes": Kind(budgets=True),
    "the job is drained and goes on": Kind(budgets=True, drains=True),
    "three jobs share the budget": Kind(budgets=True, num_jobs=3),
    "failed moves may have moved ranges": Kind(deaths=False, torn_moves=True),
}
"""What happens, beside numbers of stores that change."""


def jobs_of(kind: Kind) -> list[Submitted]:
    """Return the jobs of a world, the first one first."""
    jobs = [
        submitted(f"job{number}", NUM_SEGMENTS, f"{STORES}  priority: {number}\n")
        for number in range(kind.num_jobs)
    ]
    return [replace(job, facts=replace(job.facts, window_rows=1000)) for job in jobs]


def resize_stores(world: ElasticWorld) -> None:
    """Let most jobs that have stores want another number of them."""
    for name, job in world.state.jobs.items():
        if job.sizes is not None and job.num_stores and world.rng.random() < 0.7:
            world.set_num_stores(name, int(world.rng.integers(1, 5)))


def change_budget(world: ElasticWorld) -> None:
    """Change the cores of all jobs together."""
    cpus = float(world.rng.choice(CPUS))
    world.send(replace(AMPLE, time_sec=world.now, cpus=cpus))


def learn_loads(world: ElasticWorld) -> None:
    """Let the oracle tell of loads that lie unevenly."""
    loads = 10 * (1 + world.rng.pareto(1.0, NUM_RANGES))
    num_steps, slots = NUM_SEGMENTS * STEPS_PER_SEGMENT, tuple(int(load) for load in loads)
    world.send(
        LoadKnown(
            time_sec=world.now, job="job0", num_steps=num_steps, slots=(slots,), touched_rows=(1,)
        )
    )


def disturb(world: ElasticWorld, waiting: list[Submitted]) -> None:
    """Let what is no process's doing happen, each now and then."""
    kind, rng = world.kind, world.rng
    if rng.random() < 0.1:
        resize_stores(world)
    if kind.budgets and rng.random() < 0.03:
        change_budget(world)
    if waiting and rng.random() < 0.03:
        world.send(replace(waiting.pop(0), time_sec=world.now))
    if kind.drains and rng.random() < 0.02:
        world.send(Drained(time_sec=world.now, job="job0"))
    if rng.random() < 0.03:
        learn_loads(world)


def submit_drained(world: ElasticWorld, jobs: list[Submitted], chance: float) -> None:
    """Submit jobs again that are drained."""
    for job in jobs:
        state = world.state.jobs.get(job.job)
        if state is not None and state.phase == "drained" and world.rng.random() < chance:
            world.send(replace(job, time_sec=world.now))


def has_ended(world: ElasticWorld) -> bool:
    """Tell whether every job has ended for good, and no process is left."""
    phases = {job.phase for job in world.state.jobs.values()}
    return phases <= set(ENDED_PHASES) - {"drained"} and not world.children


def run_world(world: ElasticWorld) -> None:
    """Disturb the world for a while, then let it go on until every job has ended."""
    jobs = jobs_of(world.kind)
    world.send(AMPLE)
    world.send(jobs[0])
    waiting = jobs[1:]
    for _ in range(NUM_WILD):
        disturb(world, waiting)
        submit_drained(world, jobs, 0.1)
        world.send(world.next_event(calm=False))
    for event in (AMPLE, *waiting):
        world.send(replace(event, time_sec=world.now))
    for _ in range(NUM_CALM):
        submit_drained(world, jobs, 1.0)
        if has_ended(world):
            return
        world.send(world.next_event(calm=True))
    raise AssertionError("jobs must end")


def check_world(name: str, seed: int) -> None:
    """Play a world; when a law is broken, tell what happened before."""
    world = ElasticWorld(np.random.default_rng(seed), KINDS[name])
    try:
        run_world(world)
    except AssertionError as error:
        error.add_note(world.event_texts())
        raise


def worlds(few: range, many: range) -> list[tuple[str, int]]:
    """Return names and seeds of worlds: few of those with several jobs, which take longest."""
    return [(name, n) for name, kind in KINDS.items() for n in (few if kind.num_jobs > 1 else many)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), worlds(range(0), range(2)))
def test_no_store_leaves_with_rows_and_every_job_ends_where(name: str, seed: int) -> None:
    check_world(name, seed)


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "seed"), worlds(range(4), range(2, 8)))
def test_no_store_leaves_with_rows_and_every_job_ends_at_more_seeds_where(
    name: str, seed: int
) -> None:
    check_world(name, seed)
