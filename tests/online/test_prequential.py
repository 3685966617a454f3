"""Records of a stream: a file that a resumed run continues, and a plot."""

import resource

import pytest

from hf_recurrent import PrequentialRecord, plot_records, read_records
from hf_recurrent.online.prequential import RecordFile, check_records


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


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "7",
        "null",
        "[]",
        "{}",
        '{"bytes_read": 150}',
        '{"bytes_read": "150", "updates": 1}',
        '{"bytes_read": -1, "updates": 1}',
        '{"bytes_read": 150, "updates": true}',
        '{"bytes_read": 150, "updates": 1, "bits_per_byte": NaN}',
        '{"bytes_read": 150, "updates": 1, "bits_per_byte": 1e999}',
        '{"bytes_read": 150, "updates": 1, "bits_per_byte": "8"}',
        '{"bytes_read": 150, "updates": 1, "temperature": 1}',
        f'{{"bytes_read": 1{"0" * 400}, "updates": 1}}',
        "[" * 50_000,
        "x" * 200_000,
        "\0" * 20,
        "\xff",
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.write(record(100))
        file.write(record(200))
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + line.encode("latin-1") + b"\n" + lines[1]
    path.write_bytes(damaged)
    for action in (lambda: RecordFile(path, 200), lambda: check_records(path, 200), lambda: list(read_records(path))):
        with pytest.raises(ValueError, match=r"records\.jsonl`, line 2, is not a record of a stream: .*\.$") as error:
            action()
        assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert path.read_bytes() == damaged
    with RecordFile(path, 50):  # the damaged line is later than the checkpoint
        pass
    assert path.read_bytes() == b""


def test_records_are_not_written_through_a_link(tmp_path):
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "records.jsonl").symlink_to(tmp_path / "letter")
    with pytest.raises(OSError, match=r"records\.jsonl"):
        RecordFile(tmp_path / "records.jsonl", -1)
    assert (tmp_path / "letter").read_text() == "dear"


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.write(record(100))
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                file.write(record(200))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        file.write(record(200))
    assert list(read_records(path)) == [record(100), record(200)]


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    records = [PrequentialRecord(0, 0, None, None, held_out_bits_per_byte=8.0), *map(record, range(1, 50))]
    plot_records(records, tmp_path / "a.png")
    plot_records([], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
