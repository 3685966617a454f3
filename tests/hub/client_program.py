"""Run by test_loopback_hub.py with HF_ENDPOINT set: the released client against the loopback server, call by call."""

import os
import sys
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get

work = Path(sys.argv[1])
api = HfApi()


def refused(error: type[Exception], call, *arguments, **options) -> None:
    try:
        call(*arguments, **options)
    except error as refusal:
        assert os.environ["HF_TOKEN"] not in str(refusal)
    else:
        raise AssertionError(f"{call.__name__}{arguments} did not raise {error.__name__}")


assert api.whoami()["name"] == "tester"
assert api.create_repo("thing", exist_ok=True).repo_id == "tester/thing"
assert api.create_repo("tester/thing", exist_ok=True).repo_id == "tester/thing"  # 409, with the address
refused(HfHubHTTPError, api.create_repo, "tester/thing")

# Regular and large files, from bytes, from a file and from a folder.
large = bytes(range(256)) * 4096
first = api.upload_file(path_or_fileobj=b"first\n", path_in_repo="notes.txt", repo_id="tester/thing")
folder = work / "folder"
(folder / "deeper").mkdir(parents=True)
(folder / "model.safetensors").write_bytes(large)
(folder / "empty.txt").write_bytes(b"")
(folder / "deeper" / "ünicode name.txt").write_text("text", encoding="utf-8")
api.upload_folder(repo_id="tester/thing", folder_path=folder)
second = api.upload_file(path_or_fileobj=b"second\n", path_in_repo="notes.txt", repo_id="tester/thing")
names = ["deeper/ünicode name.txt", "empty.txt", "model.safetensors", "notes.txt"]
assert sorted(api.list_repo_files("tester/thing")) == names
assert api.model_info("tester/thing").sha == second.oid
tree = {item.path: item for item in api.list_repo_tree("tester/thing")}
assert tree["model.safetensors"].lfs.size == len(large) and tree["notes.txt"].lfs is None

# Downloads: the newest and an older commit, whole, in part, and the same large file only once.
assert Path(hf_hub_download("tester/thing", "notes.txt")).read_bytes() == b"second\n"
assert Path(hf_hub_download("tester/thing", "notes.txt", revision=first.oid)).read_bytes() == b"first\n"
copy = Path(snapshot_download("tester/thing"))
assert (copy / "model.safetensors").read_bytes() == large and (copy / "empty.txt").read_bytes() == b""
half = work / "half.safetensors"
half.write_bytes(large[:1000])
with half.open("ab") as file:
    url = f"{os.environ['HF_ENDPOINT']}/tester/thing/resolve/main/model.safetensors"
    http_get(url, file, resume_size=1000, expected_size=len(large))
assert half.read_bytes() == large
api.delete_file("notes.txt", repo_id="tester/thing")
assert "notes.txt" not in api.list_repo_files("tester/thing")

# Missing and private repositories and files raise the error classes of the real Hub.
refused(EntryNotFoundError, hf_hub_download, "tester/thing", "absent.txt")
refused(RevisionNotFoundError, hf_hub_download, "tester/thing", "empty.txt", revision="absent")
refused(RepositoryNotFoundError, hf_hub_download, "tester/absent", "empty.txt")
api.create_repo("tester/hidden", private=True)
api.upload_file(path_or_fileobj=b"hidden", path_in_repo="a.txt", repo_id="tester/hidden")
refused(RepositoryNotFoundError, hf_hub_download, "tester/hidden", "a.txt", token=False)
assert Path(hf_hub_download("tester/hidden", "a.txt")).read_bytes() == b"hidden"
refused(HfHubHTTPError, api.upload_file, path_or_fileobj=b"", path_in_repo="a", repo_id="tester/thing", token=False)
api.delete_repo("tester/hidden")
assert not api.repo_exists("tester/hidden")
