"""Records of a stream: a file that a resumed run continues, and a plot."""

import pytest

from hf_recurrent import PrequentialRecord, plot_records, read_records
from hf_recurrent.online.prequential import RecordFile


def record(number, **others):
    return PrequentialRecord(number, number // 2, 8.0 - number / 100, 7.0, **others)


def test_a_file_of_records_continues_at_the_checkpoint(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.write(PrequentialRecord(0, 0, None, None, held_out_bits_per_byte=8.0))
        for number in (100, 200, 300):
            file.write(record(number, bytes_per_second=10.0))
    with open(path, "ab") as file:
        file.write(b'{"bytes_read": 40')
    with RecordFile(path, 200) as file:
        file.write(record(300))
    assert list(read_records(path)) == [
        PrequentialRecord(0, 0, None, None, held_out_bits_per_byte=8.0),
        record(100, bytes_per_second=10.0),
        record(200, bytes_per_second=10.0),
        record(300),
    ]
    with RecordFile(path, -1):
        pass
    assert path.read_bytes() == b""
    path.write_text('{"bytes": 3}\n')
    with pytest.raises(ValueError, match="line 1, is not a record"):
        list(read_records(path))


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    records = [PrequentialRecord(0, 0, None, None, held_out_bits_per_byte=8.0), *map(record, range(1, 50))]
    plot_records(records, tmp_path / "a.png", marks={20: "Python"})
    plot_records([], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
