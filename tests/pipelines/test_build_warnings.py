"""Warnings of a build: empty splits, and groups that save nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from presage.pipelines.build import label_warnings, warnings_of
from presage.pipelines.cli import main
from presage.schemas.config.job import SplitConfig
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.layout import EVALUATION, STATISTICS, TRAIN
from tests.pipelines.logs import write_job, write_log
from tests.shared import error_of, output_of

LATE = datetime(2027, 1, 1)
NO_EVALUATION = (
    "no sample is for evaluation: samples are of 2026-01-01 00:00:00 to 2026-01-01 00:09:57, "
    "data.split.evaluation_from is 2027-01-01 00:00:00; set it to an earlier time, or to null to "
    "train on all samples"
)
NO_TRAINING = (
    "no sample is for training: samples are of 2026-01-01 00:00:00 to 2026-01-01 00:09:57, "
    "data.split.evaluation_from is 2027-01-01 00:00:00; set it to a later time, or append segments "
    "that are before it"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenDataset, list[str]]:
    """A dataset whose job holds nothing back, with a group of single items, and what was said."""
    folder = tmp_path_factory.mktemp("warned")
    write_log(folder / "log")
    job = write_job(folder / "job")
    text = job.read_text().replace("2026-01-01 00:08:00", "2027-01-01")
    job.write_text(text.replace("user, history]}", "user, history], items: [item]}"))
    given = ["build", str(job), "--input", str(folder / "log"), "--output", str(folder / "dataset")]
    given += ["--runner=InProcess", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr("presage.pipelines.cli._progress", messages.append)
        assert main(given) == 0
    return open_dataset(folder / "dataset"), messages


def test_build_says_what_to_correct(built: tuple[OpenDataset, list[str]]) -> None:
    dataset, messages = built
    factor = dataset.segments[0].manifest.groups["items"].dedup_factor
    assert [line for line in messages if line.startswith("warning: ")] == [
        f"warning: {NO_EVALUATION}",
        f"warning: group 'items' hardly repeats: its dedup factor is {factor:.3g}, so it saves "
        "nothing and costs its inverse indices; remove it from data.groups, its columns are "
        "stored with the samples then",
    ]


def of_splits(dataset: OpenDataset, *splits: str) -> OpenDataset:
    """Return a dataset with a segment for each text, which has the splits that it names."""
    (one,) = dataset.segments
    kept = {"user": one.manifest.groups["user"]}

    def segment(number: int, names: str) -> object:
        result = {name: (0, 1) for name in names.split()}
        reference = replace(one.reference, id=str(number))
        manifest = replace(one.manifest, splits=result, groups=kept)
        return replace(one, reference=reference, manifest=manifest)

    return replace(dataset, segments=tuple(segment(*each) for each in enumerate(splits)))  # type: ignore[arg-type]


BOTH = f"{TRAIN} {EVALUATION}"
AT = SplitConfig(evaluation_from=LATE)
IN_DAY = SplitConfig(evaluation_from=LATE, evaluation_last=timedelta(hours=2))
CASES: dict[str, tuple[tuple[str, ...], SplitConfig, list[str]]] = {
    "both are there": ((BOTH,), AT, []),
    "nothing is to be held back": ((TRAIN,), SplitConfig(), []),
    "nothing is for evaluation": ((TRAIN,), AT, [NO_EVALUATION]),
    "nothing is for training": ((EVALUATION,), AT, [NO_TRAINING]),
    "another segment is for training": ((TRAIN, EVALUATION), AT, []),
    "another segment is for evaluation": ((EVALUATION, TRAIN), AT, []),
    "no segment is for evaluation": ((TRAIN, TRAIN), AT, [NO_EVALUATION]),
    "the day holds nothing back": (
        (BOTH, TRAIN),
        IN_DAY,
        [
            "no sample is for evaluation: samples are of 2026-01-01 00:00:00 to 2026-01-01 "
            "00:09:57, data.split.evaluation_last=2:00:00 begins at 2027-01-01 00:00:00; set it to "
            "a longer time, or to null to train on all samples"
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_empty_split_is_said_where_no_segment_has_it(
    case: str, built: tuple[OpenDataset, list[str]]
) -> None:
    splits, config, expected = CASES[case]
    dataset = of_splits(built[0], *splits)
    assert list(warnings_of(dataset, dataset.segments[-1], config)) == expected


def test_times_that_are_not_stored_with_the_samples_are_left_out(
    built: tuple[OpenDataset, list[str]], tmp_path: Path
) -> None:
    dataset = of_splits(built[0], TRAIN)
    (segment,) = dataset.segments
    files = {STATISTICS: segment.files[STATISTICS]}
    vars(segment)["files"] = files  # what it would read
    (line,) = warnings_of(dataset, segment, AT)
    assert line.startswith("no sample is for evaluation: data.split.evaluation_from is 2027")


@pytest.mark.parametrize(
    ("labels", "extremes", "expected"),
    [
        ([], None, "schema.pbtxt tags 0 features as label"),
        (["clicked", "bought"], None, "schema.pbtxt tags 2 features as label"),
        (["clicked"], (0.0, 0.0), "label 'clicked' is 0 in every sample"),
        (["clicked"], (0.0, 1.0), None),
        (["clicked"], None, None),
    ],
)
def test_label_that_teaches_nothing_is_said(
    labels: list[str], extremes: tuple[float, float] | None, expected: str | None
) -> None:
    assert [line.partition(":")[0] for line in label_warnings(labels, extremes)] == [
        *filter(None, [expected])
    ]


@pytest.mark.slow
def test_build_and_preview_say_that_the_label_never_changes(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 60)
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("clicked AS label", "1::TINYINT AS label"))
    given = [str(job), "--input", str(tmp_path / "log"), "--json"]
    assert "label 'label' is 1 in every sample" in output_of(main, ["preview", *given])
    build = ["build", *given, "--runner=InProcess", "--output", str(tmp_path / "dataset")]
    assert "warning: label 'label' is 1 in every sample" in error_of(main, build, 0)
