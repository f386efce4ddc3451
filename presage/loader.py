"""Batches of a dataset for any training loop, with a state and a share for each rank."""

from __future__ import annotations

import hashlib
import multiprocessing
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, Protocol, cast

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from presage.batch import Batch, batch_of
from presage.schemas.config.histories import feature_of_history
from presage.schemas.config.job import load_job
from presage.schemas.dataset.history_windows import HistorySpec, history_spec
from presage.schemas.dataset.opened import OpenDataset, open_dataset, reading_histories
from presage.schemas.dataset.order import Order
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.layout import EVALUATION, TRAIN
from presage.schemas.rows import TORCHREC_SUFFIX
from presage.schemas.storage.leases import Lease
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions
from presage.trainer.components import order_of
from presage.trainer.data.decode import BatchSpec, spec_of, with_histories
from presage.trainer.data.overlaps import StepOverlaps
from presage.trainer.data.reader import Reader, prefetch
from presage.trainer.evaluation.metrics import columns_of
from presage.trainer.growing.follow import check_continues, directories_of

Split = Literal["train", "evaluation"]
_MAX_WORKERS = 256
"""Worker processes of a loader that are told apart."""


class Selection(Protocol):
    """A part of a dataset, such as a `presage.Dataset`."""

    opened: OpenDataset
    split: str | None


AnyDataset = Selection | OpenDataset | Path | Location | str
Window = int | tuple[int, int] | None
"""Newest events of a history that a sample sees, or length and step; None for all."""


class DataLoader(IterableDataset[Batch]):
    """The batches of all epochs, in an order that depends on the arguments alone.

    One iteration is the whole run: `epochs` passes over the training split, or one over the
    evaluation split. It starts at the beginning, or after the batch of a loaded state. The order
    does not depend on ranks or worker processes.

    Example:
        >>> loader = DataLoader("demo/dataset", batch_samples=4096)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     logits = model(batch.dense_features, batch.sparse_features)
    """

    def __init__(
        self,
        dataset: AnyDataset,
        *,
        batch_samples: int,
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        split: Split | None = None,
        rank: int = 0,
        world_size: int = 1,
        equal_batches: bool = False,
        deduplicated: bool = True,
        features: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        dtype: Literal["float32", "float64"] = "float32",
        histories: Mapping[str, Window] | None = None,
        lookups: bool = False,
        overlap_steps: int = 0,
        follow: bool = False,
        read_ahead: int = 2,
    ) -> None:
        """Open the dataset; no data file is read yet.

        Args:
            dataset: path or URL, or an open dataset, whose days, segments or split may be selected.
            batch_samples: of a global batch, for all ranks; a multiple of the block size.
            epochs: passes over the training split.
            shuffle: permute the row groups of each segment, and blocks within 16, in every epoch.
            seed: of the permutation.
            split: `evaluation` is passed once, without a shuffle. None for the selected split of
                `presage.Dataset`, or `train`.
            rank: of this process; it gets its blocks of every global batch, nearly an equal part
                of the work.
            world_size: number of ranks.
            equal_batches: give all ranks equally many samples: equally many blocks, and samples of
                weight 0 where one has fewer.
            deduplicated: one bag per unique tuple and inverse indices, or one bag per sample.
            features: sparse and dense features to read, and of `histories` columns with a table,
                such as `plays.song`, as lists; None for all but those.
            keep: columns of `Batch.kept`; None for the keys of sessions and users, and times.
            dtype: of labels, weights and dense features.
            histories: by name, the newest events that a sample sees in `Batch.histories`, or
                (length, step) as in `train.histories`; None for all events.
            lookups: prepare the look-ups of `presage.trainer.embedding.collections` in the reading
                thread.
            overlap_steps: mark in `Batch.overlaps_next` and `Batch.overlaps_previous` the rows that
                this many of the following, or of the preceding global batches use; 0: leave both
                out. The dataset needs the index of the order.
            follow: wait for further segments until the dataset is sealed.
            read_ahead: batches that a thread reads ahead of the loop.

        Raises:
            ValueError: an argument is out of range, or of another type.
            SchemaError: the dataset is invalid or empty, lacks a column, or has no index of this
                order, which `overlap_steps` needs; the message says how to build it.
        """
        self.batch_samples = _integer("batch_samples", batch_samples, 1)
        self.epochs = _integer("epochs", epochs, 1)
        self.shuffle = _boolean("shuffle", shuffle)
        self.seed = _integer("seed", seed, -(1 << 63))
        self.rank = _integer("rank", rank, 0)
        self.world_size = _integer("world_size", world_size, 1)
        self.follow = _boolean("follow", follow)
        self.read_ahead = _integer("read_ahead", read_ahead, 1)
        self._equal_batches = _boolean("equal_batches", equal_batches)
        self._deduplicated = _boolean("deduplicated", deduplicated)
        self._lookups = _boolean("lookups", lookups)
        self._overlap_steps = _integer("overlap_steps", overlap_steps, 0)
        self._dataset, selected = _open(dataset)
        self.split = (selected or TRAIN) if split is None else split
        self._check_arguments(selected)
        of_samples, specs = _histories(self._dataset, histories or {}, features)
        spec = _spec_of(self._dataset, dtype, of_samples, keep)
        self._spec = with_histories(spec, self._dataset, specs)
        self._windows = {s.name: (s.num_events or 0, s.step) for s in specs if s.sparse}
        self._dataset = reading_histories(self._dataset, self._windows)
        self._order = self._order_of(self._dataset)
        self._check_dataset()
        self._start: int | None = None
        """First step of the next iteration, if a state was loaded in this worker process."""
        self._loaded = torch.zeros(3 + _MAX_WORKERS, dtype=torch.int64).share_memory_()
        """In memory that worker processes share: the number of states that the main process has
        loaded, the first step after the last one, the iteration that starts there, and by worker
        the state that it used."""
        self._num_used = 0
        """States that this process has used, or that were replaced before it was asked."""
        self._last = -1
        """Step of the last batch that this process delivered."""

    @classmethod
    def from_job(
        cls,
        job: Path | Location | str,
        dataset: AnyDataset,
        *,
        split: Split | None = None,
        **options: Any,
    ) -> DataLoader:
        """Return a loader with the batch size, the epochs, the order and the type of a job.

        `options` are further arguments of the constructor.
        """
        config, (opened, selected) = load_job(job), _open(dataset)
        split = split or selected or TRAIN
        order = order_of(config, opened, trains=split == TRAIN)
        if split == TRAIN:
            shuffle = order.config.shuffle == "blocks"
            options = {"epochs": order.epochs, "shuffle": shuffle, **options}
        return cls(
            opened,
            split=split,
            **{
                "batch_samples": config.train.batch_samples,
                "seed": order.config.seed,
                "dtype": config.train.dtype,
                **options,
            },
        )

    @property
    def opened(self) -> OpenDataset:
        """The open dataset."""
        return self._dataset

    @property
    def deduplicated(self) -> bool:
        """Whether a batch has one bag per unique tuple, and inverse indices."""
        return self._deduplicated

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Dense features of a batch, in the order of their columns."""
        return self._spec.dense

    @property
    def order(self) -> Order:
        """The order of the batches."""
        return self._order

    def __len__(self) -> int:
        """Return the number of steps of an iteration that starts at the beginning."""
        if self.follow:
            raise TypeError("a DataLoader that follows a dataset has no length")
        return self._order.num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank; in a worker process, every n-th of them.

        Raises:
            SchemaError: a file is missing, its checksum differs, or its content does not fit.
        """
        worker, num_workers = _worker()
        if num_workers > 1:
            _check_in_order()
        start = self._take_loaded() if self._start is None else self._start
        first, self._start = start + worker, None
        self._last = first - num_workers
        return self._batches(first, num_workers)

    def first_batch(self) -> Batch:
        """Return the first batch of this rank; the state of the loader does not change."""
        return self._reading()(0)

    def embedding_bag_configs(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Return TorchRec's config of each table that the sparse features of a batch look up.

        A table has the number of rows that the dataset's job gives it, and the job's name with
        `_rows` at its end, since TorchRec refuses names such as `items`.
        """
        used: dict[str, list[str]] = {name: [] for name in self._dataset.job.data.tables}
        for feature in self._spec.sparse:
            used[self._spec.table_of[feature]].append(feature)
        return [
            EmbeddingBagConfig(
                name=f"{name}{TORCHREC_SUFFIX}",
                num_embeddings=self._dataset.job.data.tables[name].num_rows,
                embedding_dim=embedding_dim,
                feature_names=features,
            )
            for name, features in used.items()
            if features
        ]

    # ---- State ----
    #
    # A state is the epoch and step of the last batch that was delivered, equal in all ranks, and
    # what the order depends on. Workers deliver every n-th batch, and the state of each of them
    # belongs to that worker; without the mark of a worker it is the state of the whole loader.

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: after the last batch that this process got from the loader.

        With worker processes, or with batches in flight in a pipeline, use `state_after`.
        """
        worker, num_workers = _worker()
        mark = {"worker": worker, "num_workers": num_workers} if num_workers > 1 else {}
        return {**self._position_of(self._last), **self._identity(), **mark}

    def state_after(self, batch: Batch) -> dict[str, Any]:
        """Return the state of a loop that has trained a batch of this loader."""
        while batch.epoch and self._may_grow():  # only worker processes have followed the dataset
            self._wait_for_segments()
        return {"epoch": batch.epoch, "step": batch.step, **self._identity()}

    def state_at(self, train_step: int) -> dict[str, Any]:
        """Return the state of a loop that has trained a number of steps since the start."""
        return {**self._position_of(train_step - 1), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration after the batch of a state, of any rank and world size.

        Worker processes start there as well, also those that have started already; an iteration
        that has begun continues.

        Raises:
            SchemaError: the state is of another order, or of other worker processes.
        """
        self._check_state(state)
        stride, worker = state.get("num_workers", 1), state.get("worker", 0)
        self._last = state["epoch"] * self._order.steps_per_epoch + state["step"]
        start = self._last + stride - worker
        if get_worker_info() is None:
            self._loaded[:3] = torch.tensor([int(self._loaded[0]) + 1, start, 0])
        else:
            self._start = start

    def _take_loaded(self) -> int:
        """Return the first step of an iteration of this process; a state is used by one of all."""
        count, start, iteration = self._loaded[:3].tolist()
        info = get_worker_info()
        # the seed of an iteration's workers; those that start in each iteration have used no state
        own, worker = (1, 0) if info is None else (info.seed - info.id, info.id % _MAX_WORKERS)
        is_used = count == self._num_used or count == self._loaded[3 + worker]
        self._num_used = count
        if is_used or iteration not in (0, own):
            return 0
        self._loaded[2], self._loaded[3 + worker] = own, count
        return start

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for spawned workers."""
        _check_in_order()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loaded.share_memory_()  # a plain copy does not share it

    def _position_of(self, train_step: int) -> dict[str, int]:
        if train_step < 0:  # before the first batch
            return {"epoch": 0, "step": train_step}
        epoch, step = divmod(train_step, self._order.steps_per_epoch)
        return {"epoch": epoch, "step": step}

    def _identity(self) -> dict[str, Any]:
        num_segments = len(self._dataset.segments)
        return {
            "split": self.split,
            "batch_samples": self.batch_samples,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else 0,
            "num_segments": num_segments,
            "segments_sha256": _hash_segments(self._dataset, num_segments),
        }

    def _check_state(self, state: dict[str, Any]) -> None:
        advice = "pass what its state_dict() returned"
        if not isinstance(state, dict):
            raise SchemaError(f"state must be that of a DataLoader, got {state!r}; {advice}")
        missing = [name for name in ("epoch", "step", *self._identity()) if name not in state]
        if missing:
            raise SchemaError(f"state of a DataLoader lacks {', '.join(missing)}; {advice}")
        for name in ("epoch", "step", "num_segments"):
            if not isinstance(state[name], int):
                raise SchemaError(f"{name} must be an integer, got {state[name]!r}; {advice}")
        self._check_order(state)
        first = 0 if state["epoch"] else -state.get("num_workers", 1)  # before the first batch
        if state["epoch"] < 0 or not first <= state["step"] < self._order.steps_per_epoch:
            raise SchemaError(
                f"state is after step {state['step']} of epoch {state['epoch']}, but an epoch has "
                f"steps 0 to {self._order.steps_per_epoch - 1}; {advice}"
            )
        if state["epoch"] >= self.epochs:
            raise SchemaError(
                f"state is in epoch {state['epoch']}, counted from 0, but epochs={self.epochs}; "
                "raise epochs"
            )
        worker, num_workers = state.get("worker", 0), state.get("num_workers", 1)
        if num_workers > 1 and (worker, num_workers) != _worker():
            raise SchemaError(
                f"state is of worker process {worker} of {num_workers}; load it by a "
                f"StatefulDataLoader with num_workers={num_workers}"
            )

    def _check_order(self, state: dict[str, Any]) -> None:
        expected, count = self._identity(), state["num_segments"]
        if state["epoch"] == 0 and count < expected["num_segments"]:
            # Steps of the first epoch do not change when segments are appended.
            expected["num_segments"] = count
            expected["segments_sha256"] = _hash_segments(self._dataset, count)
        different = [name for name, value in expected.items() if state[name] != value]
        if different:
            theirs = ", ".join(f"{name}={state[name]}" for name in different)
            ours = ", ".join(f"{name}={expected[name]}" for name in different)
            raise SchemaError(
                f"state is of another order of batches: {theirs}, but the loader has {ours}; make "
                "the loader with the same arguments on the same segments",
                file=str(self._dataset.directory),
            )

    # ---- Reading ----

    def _batches(self, first: int, stride: int) -> Iterator[Batch]:
        train_step = first
        with Lease(self._dataset.directory, f"loader {gethostname()}:{os.getpid()}") as lease:
            while True:
                lease.hold(directories_of(self._dataset))
                steps = range(train_step, self._end_step(), stride)
                with closing(prefetch(self._reading(), steps, self.read_ahead)) as batches:
                    for step, batch in zip(steps, batches, strict=True):
                        self._last = step
                        yield batch
                train_step += len(steps) * stride
                if not self._may_grow():
                    return
                self._wait_for_segments()

    def _reading(self) -> Callable[[int], Batch]:
        """Return a function of one thread that reads the batch of a step."""
        reader = Reader(
            self._dataset,
            self._order,
            self._spec,
            split=self.split,
            expanded=not self._deduplicated,
            lookups=self._lookups,
            equal_batches=self._equal_batches,
            num_sharing=max(self.world_size, _worker()[1]),
        )
        if not self._overlap_steps:
            return partial(self._read, reader)
        overlaps = StepOverlaps(self._dataset, self._order, self._spec, self._overlap_steps)

        def read(train_step: int) -> Batch:
            batch = self._read(reader, train_step)
            following, previous = overlaps.masks(train_step, batch.sparse_features)
            return replace(batch, overlaps_next=following, overlaps_previous=previous)

        return read

    def _read(self, reader: Reader, train_step: int) -> Batch:
        num_padding = 0
        if self._equal_batches:
            counts = reader.samples_per_rank(train_step, self.world_size)
            num_padding = max(counts) - counts[self.rank]
        return batch_of(
            reader.read_rank(train_step, self.rank, self.world_size, num_padding),
            num_padding=num_padding,
            total_weight=reader.total_weight(train_step),
            **self._position_of(train_step),
        )

    def _order_of(self, dataset: OpenDataset) -> Order:
        shuffle = "blocks" if self.shuffle else "none"
        return dataset.order(self.batch_samples, self.epochs, shuffle, self.seed, self.split)

    def _may_grow(self) -> bool:
        return self.follow and not self._dataset.manifest.sealed

    def _end_step(self) -> int:
        """Return one after the last known step; later epochs follow the last segment."""
        return self._order.steps_per_epoch if self._may_grow() else self._order.num_steps

    def _wait_for_segments(self) -> None:
        """Open the next version of the dataset, and wait until there is one."""
        old, versions = self._dataset, Versions(self._dataset.directory)
        poll_sec = old.job.train.follow.poll.total_seconds()
        number = versions.newest_number()
        while (new := open_dataset(old.directory)).manifest == old.manifest:
            while versions.newest_number() == number:
                _check_parent()
                time.sleep(poll_sec)
            number = versions.newest_number()
        check_continues(old.manifest, new.manifest, old.directory)
        self._dataset = reading_histories(new, self._windows)
        self._order = self._order_of(new)

    # ---- Checks ----

    def _check_arguments(self, selected: Split | None) -> None:
        if self.seed >= 1 << 63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}; lower it")
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be in [0, {self.world_size}), got {self.rank}; pass world_size, too"
            )
        if self.split not in (TRAIN, EVALUATION):
            raise ValueError(f"split must be {TRAIN!r} or {EVALUATION!r}, got {self.split!r}")
        if selected is not None and self.split != selected:
            raise ValueError(
                f"split must be {selected!r}, the selected split of the dataset, got "
                f"{self.split!r}; leave it out"
            )
        if self.split == EVALUATION and (self.epochs > 1 or self.shuffle or self.follow):
            raise ValueError(
                "the evaluation split is passed once, unshuffled; leave out epochs, shuffle "
                "and follow"
            )
        if self._overlap_steps and (self.split != TRAIN or self.follow):
            raise ValueError(
                "overlap_steps needs the index of a loader of the train split without follow, got "
                f"split={self.split!r}, follow={self.follow}; leave it out"
            )

    def _check_dataset(self) -> None:
        file = str(self._dataset.directory)
        if self.follow and self._dataset.unselected:
            raise SchemaError("a selection of segments cannot be followed", file=file)
        if self._order.num_steps == 0 and not self._may_grow():
            selected = self._dataset.unselected
            advice = "change data.split.evaluation_from, and build it again"
            raise SchemaError(
                f"{'selection' if selected else 'dataset'} has no samples in its {self.split} "
                f"split; {'select other segments' if selected else advice}",
                file=file,
            )
        if self._overlap_steps:
            self._dataset.index_for(self._order)


def _open(dataset: AnyDataset) -> tuple[OpenDataset, Split | None]:
    if isinstance(dataset, OpenDataset):
        return dataset, None
    if isinstance(dataset, str | os.PathLike):
        return open_dataset(dataset), None
    return dataset.opened, cast("Split | None", dataset.split)


def _spec_of(
    dataset: OpenDataset, dtype: str, features: Sequence[str] | None, keep: Sequence[str] | None
) -> BatchSpec:
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    for argument, names in (("features", features), ("keep", keep)):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{argument} must be a list of names, got {names!r}")
    if not dataset.features.with_role("label"):
        raise SchemaError(
            "dataset has no label, so nothing can be trained on it; tag a column `label` in its "
            "schema.pbtxt and build it again, or read it by presage.Dataset",
            file=str(dataset.directory),
        )
    if keep is None:
        columns = columns_of(dataset, dataset.job.train).kept
        keep = [name for name in columns if name in dataset.features]
    spec = spec_of(dataset, dtype, tuple(keep))
    if features is None:
        return spec
    for name in features:
        if name not in (*spec.sparse, *spec.dense):
            advice = suggest_name(name, (*spec.sparse, *spec.dense))
            raise SchemaError(f"no sparse or dense feature is called {name!r}; {advice}")
    sparse = tuple(f for f in spec.sparse if f in features)
    if not sparse:
        advice = f"add one of {', '.join(spec.sparse)}"
        raise SchemaError(f"features must include a sparse feature; {advice}")
    return replace(
        spec,
        sparse=sparse,
        dense=tuple(f for f in spec.dense if f in features),
        weighted=tuple(f for f in spec.weighted if f in features),
    )


def _histories(
    dataset: OpenDataset, wanted: Mapping[str, Window], features: Sequence[str] | None
) -> tuple[Sequence[str] | None, list[HistorySpec]]:
    """Return the features of samples, and the histories with those that are their columns."""
    specs: list[HistorySpec] = []
    named: set[str] = set()
    wanted_features = () if features is None or isinstance(features, str) else features
    for name, window in wanted.items():
        count, step = window if isinstance(window, tuple) else (window, 1)
        if count is not None:
            count, step = (_integer(f"histories[{name!r}]", n, 1) for n in (count, step))
        spec = replace(history_spec(dataset.job.data, name, count), step=step)
        chosen = [c for c in spec.tables if feature_of_history(name, c) in wanted_features]
        if chosen and count is None:
            raise ValueError(
                f"histories[{name!r}] must be a number of events, as features has "
                f"{feature_of_history(name, chosen[0])!r}, got None"
            )
        specs.append(replace(spec, sparse=tuple(chosen), runs="window" if chosen else "key"))
        named |= set(specs[-1].features.values())
    return [f for f in wanted_features if f not in named] if named else features, specs


def _integer(name: str, value: Any, lowest: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {number}; raise it")
    return number


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):  # `shuffle: none` of a job is no false value
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _worker() -> tuple[int, int]:
    """Return the index of this worker process and their number; 0 and 1 in the main process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _check_in_order() -> None:
    """Raise ValueError if torch starts worker processes whose batches arrive in any order."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        started_by = frame.f_locals.get("loader") if frame.f_code.co_name == "__init__" else None
        if isinstance(started_by, TorchLoader) and not getattr(started_by, "in_order", True):
            raise ValueError(
                "in_order must be True in torch's DataLoader, got False: the state of a loop that "
                "has trained batches in any order would lose some; leave it out"
            )


def _check_parent() -> None:
    """End a worker process whose parent was killed; torch checks only between batches."""
    parent = multiprocessing.parent_process()
    if get_worker_info() is not None and parent is not None and not parent.is_alive():
        raise SystemExit("the process of this worker's loop has ended")


def _hash_segments(dataset: OpenDataset, count: int) -> str:
    """Return a hash of the first segments, on which the order of batches depends."""
    hashes = [segment.reference.manifest_sha256 for segment in dataset.segments[:count]]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()
