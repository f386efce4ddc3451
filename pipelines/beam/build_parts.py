"""Beam transforms of the parts of a segment: layout, files, statistics."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.transforms.window import GlobalWindows

from presage.pipelines.beam.grouping import SendSamples
from presage.pipelines.beam.stage_transforms import Counted
from presage.pipelines.clustering.part import PARTS_PER_SUM, PartResult, build_part, sum_statistics
from presage.pipelines.clustering.storage_layout import SegmentLayout, choose_segment_layout
from presage.pipelines.histories.parts import (
    BuiltPart,
    SampleElements,
    build_part_with_histories,
    decode_events,
)
from presage.pipelines.shuffle import ReceivedSamples, to_ipc
from presage.pipelines.stages import SAMPLES, BuildContext
from presage.pipelines.transforms.fit import FITTED
from presage.schemas.dataset.fitted import FittedValues, load_fitted
from presage.schemas.layout import BLOCK, HISTORIES

BLOCKS = "blocks"


# Write parts.


class _SmallestPartition(beam.DoFn):
    """Keeps the elements of the smallest partition of each bundle, so all of the smallest one."""

    def start_bundle(self) -> None:
        self.number = -1
        self.elements: list[bytes] = []

    def process(self, sent: tuple[int, bytes]) -> None:
        number, element = sent
        if not self.elements or number < self.number:
            self.number, self.elements = number, []
        if number == self.number:
            self.elements.append(element)

    def finish_bundle(self) -> Any:
        for element in self.elements:
            yield GlobalWindows.windowed_value((self.number, element))


def _choose_layout(
    samples: tuple[int, Iterable[Any]], first: int, files: Mapping[str, str], context: BuildContext
) -> Iterator[SegmentLayout]:
    """Yield the layout by the samples of the first partition."""
    if samples[0] == first:
        fitted = load_fitted(context.segment_root / FITTED, files, context.data)
        rows = ReceivedSamples(samples[1])
        yield choose_segment_layout(rows, context.data, fitted, context.num_parts)


class _BuildPart(Counted):
    fitted: FittedValues | None = None

    def process(
        self, samples: tuple[int, Iterable[Any]], layout: SegmentLayout, files: Mapping[str, str]
    ) -> Iterator[Any]:
        (number, sent), context = samples, self.context
        root, data, features = context.segment_root, context.data, context.features
        if self.fitted is None:
            self.fitted = load_fitted(root / FITTED, files, data)
        started = time.perf_counter()
        if not data.histories:
            rows = ReceivedSamples(sent)
            built = BuiltPart(build_part(root, number, rows, data, layout, features, self.fitted))
        else:
            built = self._with_histories(number, sent, layout)
        self.counters["msec"].inc(round(1000 * (time.perf_counter() - started)))
        if data.histories:
            yield pvalue.TaggedOutput(HISTORIES, built.histories)
        result = built.result
        if result is None:
            return
        self.counters["in-rows"].inc(result.num_samples)
        self.counters["out-bytes"].inc(sum(file.num_bytes for file in result.files))
        yield result.file_index // PARTS_PER_SUM, serialize_result(result)
        yield pvalue.TaggedOutput(BLOCKS, encode_blocks(result))

    def _with_histories(
        self, number: int, sent: Iterable[bytes], layout: SegmentLayout
    ) -> BuiltPart:
        context = self.context
        return build_part_with_histories(
            context.segment_root,
            number,
            ReceivedSamples(SampleElements(sent)),
            decode_events(sent),
            context.data,
            layout,
            context.features,
            self.fitted,
            context.end,
        )


def serialize_result(result: PartResult) -> bytes:
    """Return a result as bytes.

    Beam traverses every element to estimate its size; for 70 results this took 13 s.
    """
    return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


def deserialize_results(results: Iterable[bytes]) -> list[PartResult]:
    """Undo `serialize_result` for results in any order; return them in the order of parts."""
    return sorted((pickle.loads(r) for r in results), key=lambda r: r.file_index)


def encode_blocks(result: PartResult) -> bytes:
    """Return the columns of a part's blocks that determine the training order, as bytes."""
    return to_ipc(result.blocks.select([BLOCK, "split", "window"]))


@dataclass  # not frozen: Beam assigns to its transforms
class BuildParts(beam.PTransform):
    """Samples to parts: group by partition, cluster by session, deduplicate per block, write.

    Results of parts for the commit are in `SAMPLES` (`serialize_result`), blocks in
    `BLOCKS` (`encode_blocks`), counts of events in `HISTORIES`.
    """

    context: BuildContext
    fitted: beam.PCollection | None = None
    """Files of fitted transforms, one mapping of path to sha256; None without transforms to fit."""
    events: beam.PCollection | None = None
    """Events of histories, from `EventsOfJob`; None without histories."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Group samples by partition, determine the layout from the first, write all."""
        context = self.context
        files = {} if self.fitted is None else pvalue.AsSingleton(self.fitted)
        samples: Any = input_or_inputs | "SendSamples" >> SendSamples(context)
        sent = samples
        if self.events is not None:
            sent = (samples, self.events) | "samples and events" >> beam.Flatten()
        parts = sent | "cluster by session" >> beam.GroupByKey()
        smallest = beam.ParDo(_SmallestPartition()).with_output_types(tuple[int, bytes])
        candidates = samples | "smallest partition" >> smallest
        first: Any = (
            candidates
            | "partition numbers" >> beam.Keys()
            | "first partition" >> beam.CombineGlobally(min).without_defaults()
        )
        number = pvalue.AsSingleton(first, default_value=None)
        layout_stage = beam.FlatMap(_choose_layout, number, files, context)
        layout: Any = (
            candidates
            | "group candidates" >> beam.GroupByKey()
            | "choose layout" >> layout_stage.with_output_types(SegmentLayout)
        )
        layout_input = pvalue.AsSingleton(layout, default_value=None)
        stage = beam.ParDo(_BuildPart(context, "BuildParts"), layout_input, files)
        built = parts | "build part" >> stage.with_output_types(tuple[int, bytes]).with_outputs(
            BLOCKS, HISTORIES, main=SAMPLES
        )
        results: Any = (
            built[SAMPLES]
            | "group results" >> beam.GroupByKey()
            | "sum statistics" >> beam.FlatMapTuple(_sum_statistics).with_output_types(bytes)
        )
        return {SAMPLES: results, BLOCKS: built[BLOCKS], HISTORIES: built[HISTORIES]}


def _sum_statistics(_: int, results: Iterable[bytes]) -> Iterator[bytes]:
    """Return the results of the parts of a sum, in any order, with the sum in the first."""
    return map(serialize_result, sum_statistics(deserialize_results(results)))
