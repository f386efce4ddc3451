"""Plans on small machines: what they have, what processes get there, and advice that works."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from presage.scheduler.model.plan_inputs import PlanInputs, take_snapshot
from presage.scheduler.planner.machine_sizes import CLUSTER_CPUS, cluster_schedule, machine_schedule
from presage.scheduler.planner.policy import plan
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig
from presage.schemas.errors import PlanError
from presage.schemas.machine import machine_budget, num_cores

GIB = 1 << 30
HOST = {"proc/meminfo": "MemTotal:       33554432 kB\nMemFree: 1 kB\n"}
V2 = {"proc/self/cgroup": "0::/app/job\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n0::/\n"}
MACHINES = {
    "no control group": ({}, 8, 8.0, 32 * GIB),
    "version 2, nothing bounded": (
        {**V2, "sys/fs/cgroup/app/job/cpu.max": "max 100000\n",
         "sys/fs/cgroup/app/job/memory.max": "max\n"}, 8, 8.0, 32 * GIB,
    ),
    "version 2": (
        {**V2, "sys/fs/cgroup/app/job/cpu.max": "150000 100000\n",
         "sys/fs/cgroup/app/job/memory.max": f"{4 * GIB}\n"}, 8, 1.5, 4 * GIB,
    ),
    "version 2, a limit above it": (
        {**V2, "sys/fs/cgroup/app/cpu.max": "200000 100000\n",
         "sys/fs/cgroup/app/job/cpu.max": "max 100000\n",
         "sys/fs/cgroup/app/memory.max": f"{2 * GIB}\n"}, 8, 2.0, 2 * GIB,
    ),
    "version 2, seen as the root": (
        {**V2, "sys/fs/cgroup/cpu.max": "50000 100000\n",
         "sys/fs/cgroup/memory.max": f"{GIB}\n"}, 1, 0.5, GIB,
    ),
    "version 1": (
        {**V1, "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000\n",
         "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
         "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{6 * GIB}\n"}, 8, 3.0, 6 * GIB,
    ),
    "version 1, seen as the root, nothing bounded": (
        {**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
         "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
         "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        2, 2.0, 32 * GIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "cores", "cpus", "memory"), MACHINES.values(), ids=MACHINES)
def test_machine_has_what_its_control_groups_leave(
    files: dict[str, str], cores: int, cpus: float, memory: int, tmp_path: Path
) -> None:
    for name, text in {**HOST, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_budget(tmp_path, cores) == BudgetConfig(cpus=cpus, memory=memory)
    assert num_cores(tmp_path, cores) == max(1, math.floor(cpus))


def test_this_machine_has_something() -> None:
    budget = machine_budget()
    assert 0 < budget.cpus < 10_000
    assert 1 << 20 < budget.memory < 1 << 50


@pytest.fixture(scope="module")
def demo(repository: Path) -> PlanInputs:
    return take_snapshot(repository / "schemas" / "demo" / "job.yaml", None, None)


@pytest.mark.parametrize("cpus", [0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("memory", [4 * GIB, 24 * GIB])
def test_demo_is_planned_on_small_machines(demo: PlanInputs, cpus: float, memory: int) -> None:
    config, changes = machine_schedule(
        demo, BudgetConfig(cpus=cpus, memory=memory), allow_oversubscription=True
    )
    chosen = plan(demo, config).chosen
    assert chosen.preprocessing_cpus + chosen.training_cpus <= cpus + 1e-9
    assert chosen.preprocessing_memory_bytes + chosen.training_memory_bytes <= memory
    if cpus <= 2:
        assert chosen.num_replicas == 1
    if cpus < 2:
        assert changes[0] == (
            f"preprocessing.worker has {cpus / 2:.3g} instead of 1 cores: this machine has "
            f"{cpus:g} for both pools"
        )


def wide(snapshot: PlanInputs, **facts: float) -> PlanInputs:
    """A job whose worker needs more than its 2 GiB, as of a log of text with long lists."""
    return replace(snapshot, facts=replace(snapshot.facts, **facts))  # pyright: ignore[reportArgumentType]: of a table


def test_worker_that_needs_more_than_its_memory_gets_it_where_no_second_fits(
    demo: PlanInputs,
) -> None:
    budget = BudgetConfig(cpus=2.0, memory=24 * GIB)
    demo = replace(demo, facts=replace(demo.facts, row_bytes=8_000.0))
    with pytest.raises(PlanError, match=r"use at least cpus=3 .*workers=2, replicas=1"):
        plan(demo, replace(demo.job.schedule, budget=budget))
    config, changes = machine_schedule(demo, budget, allow_oversubscription=True)
    assert plan(demo, config).chosen.num_replicas == 1
    assert changes == ("preprocessing.worker has 2182MiB instead of 2048MiB, which the data need",)


def test_replica_that_needs_more_than_its_memory_gets_it_instead_of_a_store(
    demo: PlanInputs,
) -> None:
    needing = wide(demo)
    needing = replace(
        needing, facts=replace(needing.facts, table_rows={"items": 30_000_000}, measured=True)
    )
    budget = BudgetConfig(cpus=2.0, memory=24 * GIB)
    config, changes = machine_schedule(needing, budget, allow_oversubscription=True)
    chosen = plan(needing, config).chosen
    assert (chosen.num_replicas, chosen.num_stores) == (1, 0)
    assert changes[-1].startswith("training.replica has ")


def advised_budget(message: str) -> BudgetConfig:
    """The budget that a refusal says would do."""
    named = re.search(r"use at least cpus=([\d.]+) and memory=(\d+)MiB", message)
    assert named is not None, message
    return BudgetConfig(cpus=float(named[1]), memory=int(named[2]) << 20)


REFUSED: dict[str, tuple[dict[str, float], BudgetConfig]] = {
    "one core by name": ({}, BudgetConfig(cpus=1.0, memory=8 * GIB)),
    "little memory": ({}, BudgetConfig(cpus=2.0, memory=GIB)),
    "wide rows, two cores": (
        {"num_samples": 4_000_000, "row_bytes": 2_000.0}, BudgetConfig(cpus=2.0, memory=8 * GIB)
    ),
    "wide rows, one core by name": (
        {"num_samples": 4_000_000, "row_bytes": 2_000.0}, BudgetConfig(cpus=1.0, memory=8 * GIB)
    ),
    "wide rows, many cores": (
        {"num_samples": 40_000_000, "row_bytes": 2_000.0}, BudgetConfig(cpus=8.0, memory=8 * GIB)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "budget"), REFUSED.values(), ids=REFUSED)
def test_budget_that_a_refusal_advises_is_enough(
    demo: PlanInputs, facts: dict[str, float], budget: BudgetConfig
) -> None:
    snapshot = wide(demo, **facts)
    config, _ = machine_schedule(snapshot, budget, allow_oversubscription=False, num_segments=1)
    snapshot = replace(snapshot, facts=replace(snapshot.facts, measured=True))
    with pytest.raises(PlanError) as refused:
        plan(snapshot, config)
    config, _ = machine_schedule(
        snapshot, advised_budget(str(refused.value)), allow_oversubscription=False
    )
    chosen = plan(snapshot, config).chosen
    assert chosen.predicted_sec > 0


def test_pods_keep_what_is_declared() -> None:
    assert cluster_schedule(ScheduleConfig()).budget.cpus == CLUSTER_CPUS
    named = ScheduleConfig(budget=BudgetConfig(cpus=3.0))
    assert cluster_schedule(named).budget == BudgetConfig(cpus=3.0, memory=64 * GIB)
