"""Start and stop processes until the pools of all jobs have their target sizes.

Called after every event. A process is started only if its request fits the budget minus all live
processes, terminating ones included. A task (a segment, the coordinator, a replica, a store) never
has two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from presage.scheduler.controller.slots import stores_present, stores_ready, update_members
from presage.scheduler.controller.state import Action, JobState, PoolName, PoolProcess, State
from presage.scheduler.model.pools import MIB, PoolSizes, counted, mib
from presage.scheduler.planner.correction import MEMORY_HEADROOM, MIN_GAIN, end_change

RESIZE_RETRY_SEC = 300.0
"""Time after which a node that refused a resize is asked again."""


def reconcile(state: State) -> tuple[State, list[Action]]:
    """Start and stop processes until pools have their sizes, as far as the budget allows."""
    cpus, memory = state.used
    reconciler = Reconciler(
        now_sec=state.now_sec,
        cpus=state.budget.cpus - cpus,
        memory_bytes=state.budget.memory - memory,
        resizes=state.resizes,
        largest_job=state.largest_job,
    )
    jobs: Mapping[str, JobState] = dict(state.jobs)
    for job in state.jobs.values():
        if job.phase in ("drained", "finished", "failed") and job.processes:
            verb = "has" if job.phase == "failed" else "is"
            jobs[job.name] = _end_all(job, reconciler, f"the job {verb} {job.phase}")
    for job in state.by_priority:
        reconciler.shortage = ""
        job = _end_settled_change(_reconcile_job(job, reconciler), state.now_sec)
        if job.shortage != reconciler.shortage:
            job = replace(job, shortage=reconciler.shortage)
        jobs[job.name] = job
    if reconciler.lacks_memory:
        jobs = _release_memory(jobs, reconciler)
    return replace(state, jobs=jobs), reconciler.actions


@dataclass(slots=True)
class Reconciler:
    """One pass over all jobs: the free part of the budget, and the actions so far."""

    now_sec: float
    cpus: float
    memory_bytes: int
    largest_job: int | None = None
    resizes: bool = False
    lacks_memory: bool = False
    """Whether a process was not started for lack of memory only (its cores fit)."""
    shortage: str = ""
    """What a process of the current job lacks."""
    actions: list[Action] = field(default_factory=list[Action])

    def fits(self, cpus: float, memory_bytes: int) -> bool:
        """Return whether so much is free."""
        return cpus <= self.cpus + 1e-9 and memory_bytes <= self.memory_bytes

    def has_room(self, task_id: str, cpus: float, memory_bytes: int) -> bool:
        """Return whether so much is free for a process; if not, note what is lacking."""
        if self.fits(cpus, memory_bytes):
            return True
        self.lacks_memory |= self.fits(cpus, 0)
        free_cpus, free_memory = max(0.0, self.cpus), max(0, self.memory_bytes)
        self.shortage = (
            f"{task_id} needs {_count_cores(cpus)} and {mib(memory_bytes)}; only "
            f"{_count_cores(free_cpus)} and {free_memory // MIB}MiB are free "
            "(draining processes still count)"
        )
        return False

    def end(
        self, job: JobState, process: PoolProcess, reason: str, *, stop: bool = False
    ) -> JobState:
        """Drain or kill a process, unless it is leaving already."""
        if process.status == "leaving":
            return job
        verb = "stop" if stop else "drain"
        self.actions.append(Action(verb=verb, job=job.name, process=process.name, reason=reason))
        return job.with_process(replace(process, status="leaving"))

    def raise_memory(
        self,
        job: JobState,
        process: PoolProcess,
        memory_bytes: int,
        reason: str,
        *,
        stop: bool = False,
    ) -> JobState:
        """Raise the memory of a process in place, or end it to be restarted with more."""
        before = process.memory_before or process.memory_bytes
        raised = replace(process, memory_bytes=memory_bytes, memory_before=before)
        more = raised.held_memory - process.held_memory
        in_place = self.resizes and process.status == "running" and not process.fixed
        if not in_place or not self.fits(0.0, more):
            return self.end(job, process, reason, stop=stop)
        self.memory_bytes -= more
        return self._resize(job, raised, reason, {"memory_bytes": float(memory_bytes)})

    def lower_memory(self, job: JobState, process: PoolProcess, memory_bytes: int) -> JobState:
        """Lower the memory of a process, if the driver supports in-place resize of Pod resources.

        The difference is free for others once the node has confirmed the resize.
        """
        refused_at = process.mem_shrink_refused_at
        early = refused_at is not None and self.now_sec < refused_at + RESIZE_RETRY_SEC
        resident = process.readings[-1][1] if process.readings else 0
        lowest, highest = int(MEMORY_HEADROOM * resident), (1.0 - MIN_GAIN) * process.memory_bytes
        in_place = self.resizes and process.status == "running" and not early
        if not in_place or not lowest <= memory_bytes <= highest:
            return job
        if process.memory_before is not None:
            return job
        reason = f"its memory becomes {memory_bytes:,} bytes instead of {process.memory_bytes:,}"
        lowered = replace(process, memory_bytes=memory_bytes, memory_before=process.memory_bytes)
        return self._resize(job, lowered, reason, {"memory_bytes": float(memory_bytes)})

    def change_cpus(self, job: JobState, process: PoolProcess, cpus: float) -> JobState:
        """Change the cores of a running process in place, as far as they are free.

        If the driver supports in-place resize of Pod resources, cores that it loses are free once
        the node has confirmed the resize; otherwise only the booking changes.
        """
        refused_at = process.cpu_resize_refused_at
        early = refused_at is not None and self.now_sec < refused_at + RESIZE_RETRY_SEC
        if process.status != "running" or cpus == process.cpus or early:
            return job
        changed = replace(process, cpus=cpus, cpu_resize_refused_at=None)
        if self.resizes:
            before = process.cpus if process.cpus_before is None else process.cpus_before
            changed = replace(changed, cpus_before=before)
        more = changed.held_cpus - process.held_cpus
        if more > 0.0 and not self.fits(more, 0):
            return job
        self.cpus -= more
        if not self.resizes:
            return job.with_process(changed)
        reason = f"it gets {cpus:.2f} cores instead of {process.cpus:.2f}"
        return self._resize(job, changed, reason, {"cpus": cpus})

    def _resize(
        self, job: JobState, process: PoolProcess, reason: str, values: Mapping[str, float]
    ) -> JobState:
        action = Action(
            verb="resize", job=job.name, process=process.name, reason=reason, values=values
        )
        self.actions.append(action)
        return job.with_process(process)

    def start(
        self,
        job: JobState,
        pool: PoolName,
        number: int,
        reason: str,
        workers: int = 1,
    ) -> JobState:
        """Start a process, unless its task has one, is backing off, or does not fit."""
        task_id = f"{pool}-{number}"
        backoff = job.backoffs.get(task_id)
        runs = any(p.task_id == task_id for p in job.processes.values())
        early = backoff is not None and self.now_sec < backoff.retry_sec
        cpus, memory_bytes = required_resources(job, pool, workers)
        if runs or early or not self.has_room(task_id, cpus, memory_bytes):
            return job
        attempt = job.attempts.get(task_id, 0) + 1
        process = PoolProcess(
            name=f"{task_id}.{attempt}",
            pool=pool,
            number=number,
            status="starting",
            cpus=cpus,
            memory_bytes=memory_bytes,
            workers=workers,
            began_sec=self.now_sec,
        )
        self.cpus -= cpus
        self.memory_bytes -= memory_bytes
        values = {"workers": float(workers), "memory_bytes": float(memory_bytes)}
        if pool == "coordinator":
            values["has_replicas"] = float(job.has_replicas)
        self.actions.append(
            Action(
                verb="start",
                job=job.name,
                process=process.name,
                reason=reason if attempt == 1 else f"{reason}, attempt {attempt}",
                values=values,
            )
        )
        return replace(job.with_process(process), attempts={**job.attempts, task_id: attempt})


def _count_cores(cpus: float) -> str:
    return "1 core" if cpus == 1.0 else f"{cpus:g} cores"


def required_resources(job: JobState, pool: PoolName, workers: int = 1) -> tuple[float, int]:
    """Return the cores and bytes of one process; a coordinator beside replicas needs none."""
    config = job.snapshot.job.schedule
    if pool == "segment":
        return workers * config.preprocessing.worker.cpus, workers * job.worker_memory
    if pool == "store":
        return job.store_cpus, job.store_memory
    if pool == "coordinator" and job.has_replicas:
        return 0.0, 0
    return job.replica_cpus, job.replica_memory


def _release_memory(jobs: Mapping[str, JobState], reconciler: Reconciler) -> Mapping[str, JobState]:
    """End one trainer that has more memory than its successor gets, for a process that lacks it.

    One at a time, and only while nothing else is leaving. Segment jobs are left alone, as they lose
    their work.
    """
    if any(p.status == "leaving" for job in jobs.values() for p in job.processes.values()):
        return jobs
    for job in jobs.values():
        for process in job.trainers:
            more = process.memory_bytes - job.replica_memory
            if more > 0 and process.status == "running" and process.memory_before is None:
                why = f"it has {more:,} bytes more than its successor gets, and others need them"
                return {**jobs, job.name: reconciler.end(job, process, why)}
    return jobs


def _reconcile_job(job: JobState, reconciler: Reconciler) -> JobState:
    if job.phase == "draining":
        job = _end_all(job, reconciler, "the job is drained")
        return job if job.processes else replace(job, phase="drained")
    if job.sizes is None:
        return _end_all(job, reconciler, "the job is queued")
    sizes = job.sizes
    job = _resize_running(_reconcile_training(job, sizes, reconciler), reconciler)
    return _reconcile_segments(job, sizes, reconciler)


def _end_all(job: JobState, reconciler: Reconciler, reason: str) -> JobState:
    """Stop segment jobs; drain one pool per call, in the order replicas, coordinator, stores.

    Replicas need the coordinator to save, and both need the stores.
    """
    for process in job.of_pool("segment"):
        job = reconciler.end(job, process, reason, stop=True)
    pools: tuple[PoolName, ...] = ("replica", "coordinator", "store")
    for pool in pools:
        processes = job.of_pool(pool)
        for process in processes:
            job = reconciler.end(job, process, reason)
        if processes:
            break
    return job


def _reconcile_training(job: JobState, sizes: PoolSizes, reconciler: Reconciler) -> JobState:
    """Run the stores, the coordinator and the replicas, once the first segment is built."""
    if not job.built:
        return job
    if job.num_stores is None:
        job = replace(job, num_stores=sizes.num_stores)
    if job.num_stores:
        job = _reconcile_stores(job, sizes, reconciler)
    coordinator = next(iter(job.of_pool("coordinator")), None)
    if coordinator is not None and job.has_replicas and coordinator.trains_alone:
        why = "restarted as coordinator of several replicas, after a checkpoint"
        return reconciler.end(job, coordinator, why)
    more_memory = f"its memory becomes {job.replica_memory:,} bytes"
    if coordinator is not None and 0 < coordinator.memory_bytes < job.replica_memory:
        return reconciler.raise_memory(job, coordinator, job.replica_memory, more_memory)
    replicas = job.of_pool("replica")
    if coordinator is None and replicas:
        for process in replicas:  # they are connected to the previous coordinator
            job = reconciler.end(job, process, "its coordinator ended", stop=True)
        return job
    if coordinator is None and stores_ready(job):
        verb = "restart" if "coordinator-0" in job.attempts else "start"
        what = "coordinator" if job.has_replicas else "trainer"
        job = reconciler.start(job, "coordinator", 0, f"{verb} the {what}")
    if not job.has_replicas or coordinator is None or coordinator.status != "running":
        return job
    for process in reversed(replicas):
        if process.number >= sizes.num_replicas:
            why = f"scaled down to {counted(sizes.num_replicas, 'replica')}"
            job = reconciler.end(job, process, why)
    short = [p for p in job.of_pool("replica") if p.memory_bytes < job.replica_memory]
    if short and all(p.status == "running" for p in job.of_pool("replica")):  # one by one
        job = reconciler.raise_memory(job, short[0], job.replica_memory, more_memory)
    running = {p.number for p in replicas}
    reason = f"the job trains in {counted(sizes.num_replicas, 'replica')}"
    for number in range(sizes.num_replicas):
        if number not in running:
            job = reconciler.start(job, "replica", number, reason)
    return job


def _reconcile_stores(job: JobState, sizes: PoolSizes, reconciler: Reconciler) -> JobState:
    job = update_members(job, sizes)
    running = {p.number for p in job.of_pool("store")}
    for number in job.stores:
        if number in running:
            continue
        job = reconciler.start(job, "store", number, "it holds rows of the tables")
    for process in job.of_pool("store"):
        if process.number not in job.stores:
            job = reconciler.end(job, process, "it is surplus and owns no slots")
    return job


def _resize_running(job: JobState, reconciler: Reconciler) -> JobState:
    for process in (*job.trainers, *job.of_pool("store")):
        if process.pool == "coordinator" and not process.trains_alone:
            continue  # a coordinator beside replicas, which computes nothing
        cpus, memory_bytes = required_resources(job, process.pool)
        job = reconciler.change_cpus(job, process, cpus)
        if process.pool != "store":  # the memory of stores is not forecast
            job = reconciler.lower_memory(job, job.processes[process.name], memory_bytes)
    return job


def _reconcile_segments(job: JobState, sizes: PoolSizes, reconciler: Reconciler) -> JobState:
    """Build the segments in order; the first one alone, as the others depend on its result."""
    for process in job.of_pool("segment"):
        needed = process.workers * job.worker_memory
        if process.memory_bytes < needed:
            why = f"the memory of its workers becomes {job.worker_memory:,} bytes"
            job = reconciler.raise_memory(job, process, needed, why, stop=True)
    building = [p.number for p in job.of_pool("segment")]
    most = sizes.segment_jobs if job.built else 1
    unbuilt = [n for n in range(job.num_segments) if n not in job.built]
    for number in unbuilt:
        if number in building:
            continue
        if len(building) >= most:
            break
        workers = min(sizes.workers_per_job, reconciler.largest_job or sizes.workers_per_job)
        resources = required_resources(job, "segment", workers)
        if not reconciler.has_room(f"segment-{number}", *resources):
            break
        before = len(job.processes)
        reason = f"segment {number} of {job.num_segments} is to be built"
        if workers < sizes.workers_per_job:
            reason += f" by {counted(workers, 'worker')}: the runner's file allows no more"
        job = reconciler.start(job, "segment", number, reason, workers)
        if len(job.processes) == before:
            break  # it is backing off, and later segments wait for it anyway
        building.append(number)
    if unbuilt and unbuilt[0] not in building and len(building) >= most:
        last = job.of_pool("segment")[-1]
        why = f"segment {unbuilt[0]} is to be built first: later ones wait for it"
        job = reconciler.end(job, last, why, stop=True)
    return job


def is_settled(job: JobState) -> bool:
    """Return whether the pools have their target sizes, and every process runs."""
    if job.sizes is None:
        return not job.processes
    if any(p.status != "running" or _lacks_memory(job, p) for p in job.processes.values()):
        return False
    wanted = min(job.sizes.segment_jobs if job.built else 1, job.remaining_segments)
    if len(job.of_pool("segment")) != wanted:
        return False
    if not job.built:
        return True
    if job.stores and not stores_present(job, job.sizes):
        return False
    replicas = job.sizes.num_replicas if job.has_replicas else 0
    return len(job.of_pool("coordinator")) == 1 and len(job.of_pool("replica")) == replicas


def _lacks_memory(job: JobState, process: PoolProcess) -> bool:
    if process.is_changing:
        return True
    needed = {"segment": process.workers * job.worker_memory, "replica": job.replica_memory}
    return process.memory_bytes < needed.get(process.pool, 0)


def _end_settled_change(job: JobState, now_sec: float) -> JobState:
    if job.correction.in_flight is None or not is_settled(job):
        return job
    return replace(job, correction=end_change(job.correction, now_sec))
