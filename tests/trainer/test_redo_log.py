"""Records are whole or absent, whatever cuts the file."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from trainer.stores.remote.ownership import ShardControl
from trainer.stores.remote.wal import RecordLog, entry_to_buffers, read_entries, read_records


def payloads_of(path: Path) -> list[bytes]:
    return [bytes(payload) for payload in read_records(path)]


def write_log(path: Path, payloads: list[bytes]) -> list[int]:
    """Append payloads and return where each record ends."""
    log, ends = RecordLog(path, sync=False), []
    for payload in payloads:
        log.append([payload[:3], b"", payload[3:]])
        ends.append(path.stat().st_size)
    log.close()
    return ends


@given(payloads=st.lists(st.binary(max_size=60), max_size=6), data=st.data())
def test_log_cut_anywhere_replays_its_whole_records_and_goes_on(
    payloads: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.bin"
    ends = write_log(path, payloads)
    written = path.read_bytes()
    cut = data.draw(st.integers(0, path.stat().st_size))
    with path.open("r+b") as file:
        file.truncate(cut)
        if data.draw(st.booleans()):  # a file system may have made room that was never filled
            file.seek(0, 2)
            file.write(bytes(data.draw(st.integers(0, 40))))
    left = path.read_bytes()  # a record that ends in zeros may be whole again
    whole = sum(left[:end] == written[:end] for end in ends)
    assert payloads_of(path) == payloads[:whole]
    assert path.stat().st_size == ([0, *ends][whole])
    write_log(path, [b"more"])
    assert payloads_of(path) == [*payloads[:whole], b"more"]


def test_log_damaged_before_a_good_record_is_refused_by_its_place(tmp_path: Path) -> None:
    for place in range(80):
        path = tmp_path / f"{place}.bin"
        ends = write_log(path, [b"first record", b"second record", b"third record"])
        data = bytearray(path.read_bytes())
        data[place] ^= 0x55
        path.write_bytes(data)
        if place >= ends[1]:
            assert payloads_of(path) == [b"first record", b"second record"]
            continue
        start = 0 if place < ends[0] else ends[0]
        message = (
            f"damaged record before an intact one in {path}:byte {start}; restore the file, or "
            "resume the run from its checkpoint with an empty directory"
        )
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            payloads_of(path)
        assert path.read_bytes() == data


def test_log_of_another_release_is_refused(tmp_path: Path) -> None:
    [text] = entry_to_buffers(ShardControl())
    write_log(tmp_path / "log.bin", [bytes(text).replace(b"newest_step", b"newest_stop")])
    with pytest.raises(SchemaError, match=r"^log is of another release; start the store with an "):
        list(read_entries([tmp_path / "log.bin"]))
