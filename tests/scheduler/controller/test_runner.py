"""Workers of segment jobs where the Beam runner limits them."""

import pytest

from presage.scheduler.controller.events import BudgetSet
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import GIB, submitted

WIDE = "  preprocessing: {min_workers: 4, max_workers: 4}"


def limited(largest: int) -> BudgetSet:
    return BudgetSet(time_sec=0.0, cpus=8.0, memory_bytes=32 * GIB, largest_job=largest)


@pytest.mark.parametrize(("num_segments", "largest"), [(1, 2), (2, 1), (3, 1), (3, 2)])
def test_handle_plans_no_more_workers_of_one_job_than_it_may_have(
    num_segments: int, largest: int
) -> None:
    bench = Bench(limited(largest), submitted("first", num_segments, WIDE))
    sizes = bench.job.sizes
    assert sizes is not None
    jobs = min(4 // largest, num_segments)  # 4 workers are wanted
    assert (sizes.segment_jobs, sizes.workers_per_job) == (jobs, largest)


def test_handle_starts_no_segment_job_with_more_workers_than_its_runner_allows() -> None:
    bench = Bench(limited(2), submitted("first", 3, WIDE))
    bench.send(limited(1))  # the running job keeps its workers
    (first,) = bench.job.of_pool("segment")
    started = [a for a in bench.built(0) if a.process.startswith("segment")]
    assert first.workers == 2
    assert {a.values["workers"] for a in started} == {1}
