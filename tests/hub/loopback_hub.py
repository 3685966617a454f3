"""A Hugging Face Hub on 127.0.0.1, in memory: what the real client needs to create, upload, list and download models.

It speaks the Hub's own HTTP protocol, so that tests run the released client code over real sockets: regular and LFS
uploads, commits, revisions, range requests, private repositories and the Hub's error codes. Standard library only.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".npy", ".parquet")  # what the Hub's default .gitattributes sends to LFS
LFS_SIZE = 10 * 2**20


@dataclass(frozen=True)
class Blob:
    """One version of a file. `oid` is its git name; `lfs` its SHA-256 where it is stored as a large file."""

    content: bytes
    lfs: str | None = None

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.lfs or self.oid


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)  # commit -> path -> blob, oldest first
    titles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit({}, "initial commit")

    def commit(self, files: dict[str, Blob], title: str) -> str:
        listing = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        sha = hashlib.sha1(f"{len(self.commits)} {title}\n{listing}".encode()).hexdigest()
        self.commits[sha] = files
        self.titles.append(title)
        return sha

    @property
    def head(self) -> str:
        return next(reversed(self.commits))

    def resolve(self, revision: str) -> str | None:
        if revision in ("main", "HEAD"):
            return self.head
        return revision if revision in self.commits else None


class LoopbackHub(ThreadingHTTPServer):
    """The server. Use it as a context manager: it serves on a free port of 127.0.0.1 until the block ends.

    Attributes:
        requests: (method, path, had the token) of every request, in order.
        unexpected: Requests that no route answers; a test that passes leaves it empty.
    """

    daemon_threads = True

    def __init__(self, token: str, user: str = "tester") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.user = token, user
        self.repositories: dict[str, Repository] = {}  # datasets as "datasets/owner/name"
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, bool]] = []
        self.unexpected: list[str] = []
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo_id: str) -> dict[str, Blob]:
        """The files of the newest commit."""
        repository = self.repositories[repo_id]
        return repository.commits[repository.head]

    def __enter__(self) -> "LoopbackHub":
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


_REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("DELETE", r"/api/repos/delete", "delete"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
    ("POST", r"/lfs/verify", "lfs_verify"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    ("POST", rf"/api/models/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?P<folder>/.*)?", "tree"),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "download"),
    ("HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "download"),
]


def _entry(path: str, blob: Blob) -> dict:
    entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.lfs, "size": len(blob.content), "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *arguments: object) -> None:
        pass

    def _dispatch(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = self._read_chunks()
        path = unquote(urlsplit(self.path).path).replace("/api/datasets/", "/api/models/datasets/")
        self.authorised = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        with self.server.lock:
            self.server.requests.append((self.command, path, self.authorised))
            try:
                for method, pattern, name in _ROUTES:
                    if method == self.command and (match := re.fullmatch(pattern, path)):
                        getattr(self, f"_{name}")(body, **match.groupdict())
                        return
                self.server.unexpected.append(f"{self.command} {path}")
                raise _Refusal(404, "no such route")
            except _Refusal as refusal:
                headers = {"X-Error-Message": refusal.message}
                if refusal.code:
                    headers["X-Error-Code"] = refusal.code
                self._reply(refusal.body or {"error": refusal.message}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _dispatch

    def _read_chunks(self) -> bytes:
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _reply(self, body: dict | list | bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _need_token(self) -> None:
        if not self.authorised:
            raise _Refusal(401, "Invalid username or password.")

    def _repository(self, repo: str, write: bool = False) -> Repository:
        if write:
            self._need_token()
        repository = self.server.repositories.get(repo)
        if repository is None or (repository.private and not self.authorised):
            raise _Refusal(404 if self.authorised else 401, "Repository not found", "RepoNotFound")
        return repository

    def _commit_of(self, repository: Repository, revision: str) -> str:
        sha = repository.resolve(revision)
        if sha is None:
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def _whoami(self, body: bytes) -> None:
        self._need_token()
        self._reply({"type": "user", "name": self.server.user, "orgs": [], "auth": {"type": "access_token"}})

    def _create(self, body: bytes) -> None:
        self._need_token()
        request = json.loads(body)
        repo = f"{request.get('organization') or self.server.user}/{request['name']}"
        reply = {"url": f"{self.server.endpoint}/{repo}", "name": repo}
        if repo in self.server.repositories:
            raise _Refusal(409, "You already created this model repo", body=reply)
        private = bool(request.get("private")) or request.get("visibility") == "private"
        self.server.repositories[repo] = Repository(private=private)
        self._reply(reply)

    def _delete(self, body: bytes) -> None:
        self._need_token()
        request = json.loads(body)
        repo = f"{request.get('organization') or self.server.user}/{request['name']}"
        self._repository(repo)
        del self.server.repositories[repo]
        self._reply({})

    def _validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "the card has no metadata"}]
        self._reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _preupload(self, body: bytes, repo: str, revision: str) -> None:
        files = self._repository(repo, write=True).commits[self._commit_of(self._repository(repo), revision)]
        reply = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(LFS_SUFFIXES) or file["size"] >= LFS_SIZE
            known = files.get(file["path"])
            reply.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False,
                    "oid": known.etag if known else None,
                }
            )
        self._reply({"files": reply})

    def _lfs_batch(self, body: bytes, repo: str) -> None:
        self._repository(repo, write=True)
        objects = []
        for item in json.loads(body)["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.large_files:
                endpoint = self.server.endpoint
                entry["actions"] = {
                    "upload": {"href": f"{endpoint}/lfs/{item['oid']}"},
                    "verify": {"href": f"{endpoint}/lfs/verify"},
                }
            objects.append(entry)
        self._reply({"transfer": "basic", "objects": objects})

    def _lfs_upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refusal(400, "the content does not have the promised SHA-256")
        self.server.large_files[oid] = body
        self._reply(b"")

    def _lfs_verify(self, body: bytes) -> None:
        request = json.loads(body)
        if len(self.server.large_files.get(request["oid"], b"")) != request["size"]:
            raise _Refusal(404, "the object was not uploaded")
        self._reply({})

    def _commit(self, body: bytes, repo: str, revision: str) -> None:
        repository = self._repository(repo, write=True)
        files = dict(repository.commits[self._commit_of(repository, revision)])
        title = ""
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if value["oid"] not in self.server.large_files:
                    raise _Refusal(400, f"{value['path']} points to a large file that was not uploaded")
                files[value["path"]] = Blob(self.server.large_files[value["oid"]], lfs=value["oid"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refusal(400, f"unknown entry {key!r} in a commit")
        sha = repository.commit(files, title)
        self._reply({"success": True, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{sha}", "commitOid": sha})

    def _info(self, body: bytes, repo: str, revision: str = "main") -> None:
        repository = self._repository(repo)
        sha = self._commit_of(repository, revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
        name = repo.removeprefix("datasets/")
        self._reply(
            {"_id": sha, "id": name, "modelId": name, "sha": sha, "private": repository.private, "siblings": siblings}
        )

    def _tree(self, body: bytes, repo: str, revision: str, folder: str | None) -> None:
        repository = self._repository(repo)
        prefix = f"{folder.strip('/')}/" if folder else ""
        is_recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        files = repository.commits[self._commit_of(repository, revision)]
        below = {path: blob for path, blob in sorted(files.items()) if path.startswith(prefix)}
        if prefix and not below:
            raise _Refusal(404, "Entry not found", "EntryNotFound")
        folders = {
            "/".join(parts[:depth])
            for path in below
            for parts in [path.split("/")]
            for depth in range(prefix.count("/") + 1, len(parts))
        }
        entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
        entries += [_entry(path, blob) for path, blob in below.items()]
        self._reply([one for one in entries if is_recursive or "/" not in one["path"][len(prefix) :]])

    def _paths_info(self, body: bytes, repo: str, revision: str) -> None:
        repository = self._repository(repo)
        files = repository.commits[self._commit_of(repository, revision)]
        asked = parse_qs(body.decode()).get("paths", [])
        self._reply([_entry(path, files[path]) for path in asked if path in files])

    def _download(self, body: bytes, repo: str, revision: str, path: str) -> None:
        repository = self._repository(repo)
        sha = self._commit_of(repository, revision)
        blob = repository.commits[sha].get(path)
        if blob is None:
            raise _Refusal(404, "Entry not found", "EntryNotFound")
        content, status = blob.content, 200
        headers = {
            "X-Repo-Commit": sha,
            "ETag": f'"{blob.etag}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Last-Modified": formatdate(0, usegmt=True),
        }
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.lfs}"', "X-Linked-Size": str(len(content))}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            if first >= len(content):
                raise _Refusal(416, "Requested range not satisfiable")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._reply(content, status, headers)
