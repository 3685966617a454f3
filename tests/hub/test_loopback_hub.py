"""The loopback Hub behaves as the released client expects, errors included: else the other tests prove nothing."""

from hub_process import TOKEN, run_program
from loopback_hub import LoopbackHub


def test_the_released_client_creates_uploads_lists_downloads_and_is_refused(tmp_path):
    with LoopbackHub(TOKEN) as hub:
        run_program("client_program.py", hub, tmp_path)
        stored = hub.files("tester/thing")
        assert stored["model.safetensors"].lfs and not stored["empty.txt"].lfs
        uploads = [path for method, path, _ in hub.requests if method == "PUT"]
        assert len(uploads) == 1  # the large file, and nothing else, over LFS
        assert any(path.endswith("/resolve/main/model.safetensors") for _, path, _ in hub.requests)
