"""A dataset of the Hub in sharded Parquet files, streamed: the run is continued at the very episode and byte."""

import hashlib
import io

import pytest
from hub_process import TOKEN, run_program
from loopback_hub import Blob, LoopbackHub, Repository

pytest.importorskip("datasets")
SHARDS, ROWS = 3, 60


def shard(number):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stories = [f"shard {number}, story {row}" + " and so on" * (row % 7) for row in range(ROWS)]
    file = io.BytesIO()
    parquet.write_table(arrow.table({"text": stories, "id": list(range(ROWS))}), file, row_group_size=25)
    return file.getvalue()


@pytest.mark.long
def test_a_streamed_dataset_is_continued_by_other_processes_and_workers(tmp_path):
    files = {f"data/train-{number:05d}-of-{SHARDS:05d}.parquet": shard(number) for number in range(SHARDS)}
    with LoopbackHub(TOKEN) as hub:
        repository = hub.repositories["datasets/tester/stories"] = Repository()
        blobs = {path: Blob(content, lfs=hashlib.sha256(content).hexdigest()) for path, content in files.items()}
        repository.commit(blobs, "stories")
        output = run_program("stream_program.py", hub, tmp_path, token=False)
        assert "continued at the very episode" in output
        for path in files:
            assert any(asked.endswith(path) for method, asked, _ in hub.requests if method == "GET")
