"""Elements that take long to encode arrive whole when workers are threads."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, time
import apache_beam as beam
from pathlib import Path
from pipelines.beam.runner import run_pipeline

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

class Slow:
    def __init__(self, number):
        self.number = number
    def __reduce__(self):
        time.sleep(1.2)  # longer than Beam waits before it sends what it has
        return Slow, (self.number,)

def make(pipeline):
    numbers = pipeline | beam.Create(range(2)) | beam.Reshuffle()
    return {"slow": numbers | beam.Map(Slow)}

if __name__ == "__main__":
    threads = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]
    found = run_pipeline(make, threads, Path(sys.argv[1]))["slow"]
    print(sorted(s.number for s in found))
"""


@pytest.mark.slow
def test_an_element_is_not_sent_before_it_is_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split("\n")[-2:] == ["[0, 1]", ""], done.stderr[-2000:]
