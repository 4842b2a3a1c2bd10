"""Server with the part of the Hugging Face hub's HTTP interface that uploading a model uses.

It keeps repositories in memory, and checks what the hub checks: the token, the owner of a repository, sizes and
checksums. Large files arrive through git LFS or through Xet, whichever the client uses; of Xet it keeps the chunks, and
puts files together from them as their metadata says. Faults are answered as the hub or a broken network would.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pyarrow as pa
from http_server import Server, serving

REGULAR_BYTES = 1024
"""Size from which a file is uploaded as a large one; the hub's is larger, and also depends on the suffix."""


@dataclass
class Repo:
    """Model repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Summary of each commit."""
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> files, of a public repository that is only read."""


@dataclass
class Fault:
    """Wrong answer to some requests."""

    request: str
    """Pattern of method and path, such as `PUT /lfs/`."""
    status: int | None = 503
    """Status of the answer; None: the connection is closed without one."""
    times: int = 1
    """Requests that it applies to."""


@dataclass
class FakeHub:
    """State of the server."""

    users: dict[str, str] = field(default_factory=lambda: {"good-token-of-alice": "alice"})
    """Token -> user."""
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Checksum -> large file that has arrived."""
    xorbs: dict[str, list[bytes]] = field(default_factory=dict)
    """Xet: name of a pack of chunks -> its chunks."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    faults: list[Fault] = field(default_factory=list)
    seen_tokens: set[str] = field(default_factory=set)
    """Values of the header `authorization` that arrived at the store of large files, which must get none."""
    pause_before: Callable[[str], None] = lambda request: None
    """Called with method and path before a request is handled."""
    endpoint: str = ""

    def count(self, pattern: str) -> int:
        """Return the number of requests so far that match a pattern."""
        return sum(bool(re.match(pattern, request)) for request in self.requests)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a server on a free port."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = Server(Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield hub


def closed_port() -> str:
    """Return an address at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for a condition. Raises TimeoutError after a limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


class _Refused(Exception):
    """Answer with an error status."""

    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    """Routes of the interface: each method of `ROUTES` gets the groups of its path."""

    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_HEAD = do_GET

    def _handle(self) -> None:
        request = f"{self.command} {self.path.partition('?')[0]}"
        self.state.requests.append(request)
        try:
            body = self._read_body()
            self.state.pause_before(request)
            if fault := next(
                (each for each in self.state.faults if each.times and re.match(each.request, request)), None
            ):
                fault.times -= 1
                if fault.status is None:
                    self.close_connection = True
                    return
                raise _Refused(fault.status, "planted fault")
            for pattern, method in ROUTES.items():
                if match := re.fullmatch(pattern, request):
                    self._answer(200, method(self, body, *match.groups()))
                    return
            raise _Refused(404, f"no route for {request}")
        except _Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._answer(refused.status, {"error": refused.message, "errors": [{"message": refused.message}]}, headers)
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().strip(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (
            {"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
        ).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def _user(self) -> str:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.state.users:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return self.state.users[token]

    def _writable(self, name: str) -> Repo:
        user = self._user()
        if name not in self.state.repos:
            raise _Refused(404, "Repository not found", "RepoNotFound")
        if name.partition("/")[0] != user:
            raise _Refused(403, f"{user} has no write access to {name}")
        return self.state.repos[name]

    def whoami(self, body: bytes) -> Any:
        return {"type": "user", "name": self._user(), "orgs": []}

    def info(self, body: bytes, name: str) -> Any:
        user = self._user()
        repo = self.state.repos.get(name)
        if repo is None or (repo.private and name.partition("/")[0] != user):
            raise _Refused(404, "Repository not found", "RepoNotFound")
        siblings = [{"rfilename": path} for path in repo.files]
        sha = hashlib.sha1(json.dumps(repo.commits).encode()).hexdigest()
        return {"_id": name, "id": name, "private": repo.private, "sha": sha, "siblings": siblings, "tags": []}

    def revision(self, body: bytes, name: str, commit: str) -> Any:
        files = self.state.repos[name].revisions.get(commit)
        if files is None:
            raise _Refused(404, f"Invalid rev id: {commit}", "RevisionNotFound")
        blobs = {path: hashlib.sha1(f"blob {len(each)}\0".encode() + each).hexdigest() for path, each in files.items()}
        siblings = [{"rfilename": path, "blobId": blob} for path, blob in blobs.items()]
        return {"_id": name, "id": name, "private": False, "sha": commit, "siblings": siblings, "tags": []}

    def create(self, body: bytes) -> Any:
        user, wanted = self._user(), json.loads(body)
        owner = wanted["organization"] or user
        if owner != user:
            raise _Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        name = f"{owner}/{wanted['name']}"
        if name in self.state.repos:
            raise _Refused(409, "You already created this model repo")
        self.state.repos[name] = Repo(private=wanted["visibility"] == "private")
        return {"url": f"{self.state.endpoint}/{name}", "name": name}

    def validate(self, body: bytes) -> Any:
        if not json.loads(body)["content"].startswith("---\n"):
            raise _Refused(400, "no metadata")
        return {"errors": [], "warnings": []}

    def preupload(self, body: bytes, name: str) -> Any:
        repo = self._writable(name)
        answers = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["size"] >= REGULAR_BYTES else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if content := repo.files.get(file["path"]):
                git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
                answers[-1]["oid"] = hashlib.sha256(content).hexdigest() if mode == "lfs" else git
        return {"files": answers}

    def batch(self, body: bytes, name: str) -> Any:
        self._writable(name)
        objects = []
        for each in json.loads(body)["objects"]:
            answer = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.state.large:
                upload = {"href": f"{self.state.endpoint}/lfs/{each['oid']}?signature=short-lived"}
                verify = {"href": f"{self.state.endpoint}/verify"}
                answer["actions"] = {"upload": upload, "verify": verify}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def put(self, body: bytes, oid: str) -> Any:
        self._note_token()
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "wrong checksum")
        self.state.large[oid] = body
        return {}

    def _note_token(self) -> None:
        if token := self.headers.get("authorization"):
            self.state.seen_tokens.add(token)

    def xet_token(self, body: bytes, name: str) -> Any:
        self._writable(name)
        return {"accessToken": XET_TOKEN, "exp": int(time.time()) + 3600, "casUrl": self.state.endpoint}

    def known_chunk(self, body: bytes, digest: str) -> Any:
        raise _Refused(404, "no chunk is known from other uploads")

    def xorb(self, body: bytes, digest: str) -> Any:
        self._note_token()
        is_new = digest not in self.state.xorbs
        self.state.xorbs[digest] = read_xorb(body)
        return {"was_inserted": is_new}

    def shard(self, body: bytes) -> Any:
        self._note_token()
        for parts in read_shard(body):
            content = b"".join(chunk for digest, first, end in parts for chunk in self.state.xorbs[digest][first:end])
            self.state.large[hashlib.sha256(content).hexdigest()] = content
        return {"result": 1}

    def verify(self, body: bytes) -> Any:
        wanted = json.loads(body)
        if len(self.state.large.get(wanted["oid"], b"")) != wanted["size"]:
            raise _Refused(404, "not there")
        return {}

    def commit(self, body: bytes, name: str) -> Any:
        repo = self._writable(name)
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(repo.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.state.large:
                    raise _Refused(400, "the large file has not arrived")
                files[value["path"]] = self.state.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repo.files = files
        repo.commits.append(lines[0]["value"]["summary"])
        oid = hashlib.sha1(body).hexdigest()
        return {"commitOid": oid, "commitUrl": f"{self.state.endpoint}/{name}/commit/{oid}", "success": True}


XET_TOKEN = "short-lived-token-of-xet"


def read_xorb(data: bytes) -> list[bytes]:
    """Return the chunks of a Xet pack. Each has a header: version, size, compression, size when unpacked."""
    chunks, position = [], 0
    while position < len(data) and data[position : position + 7] != b"XETBLOB":  # the footer
        size = int.from_bytes(data[position + 1 : position + 4], "little")
        compression = data[position + 4]
        unpacked = int.from_bytes(data[position + 5 : position + 8], "little")
        chunk = data[position + 8 : position + 8 + size]
        if compression:
            chunk = pa.decompress(chunk, unpacked, codec="lz4", asbytes=True)
        if compression == 2:  # bytes grouped by their position modulo 4
            groups, start, ordered = [], 0, bytearray(unpacked)
            for offset in range(4):
                length = len(range(offset, unpacked, 4))
                groups.append(chunk[start : start + length])
                start += length
            for offset, group in enumerate(groups):
                ordered[offset::4] = group
            chunk = bytes(ordered)
        assert len(chunk) == unpacked
        chunks.append(chunk)
        position += 8 + size
    return chunks


def read_shard(data: bytes) -> Iterator[list[tuple[str, int, int]]]:
    """Yield the parts of each file in a Xet shard: name of the pack, first chunk, end of the chunks."""
    position = 48  # the header
    while data[position : position + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", data, position + 32)
        entries = [data[position + 48 * number : position + 48 * (number + 1)] for number in range(1, count + 1)]
        yield [(xet_name(entry[:32]), *struct.unpack_from("<II", entry, 40)) for entry in entries]
        has_verification, has_checksum = bool(flags & 1 << 31), bool(flags & 1 << 30)
        position += 48 * (1 + count * (1 + has_verification) + has_checksum)


def xet_name(digest: bytes) -> str:
    """Return a Xet hash as text: its four numbers of 8 bytes, each in hexadecimal."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))


ROUTES: dict[str, Callable[..., Any]] = {
    r"GET /api/whoami-v2": _Handler.whoami,
    r"GET /api/models/([^/]+/[^/]+)(?:/revision/main)?": _Handler.info,
    r"GET /api/models/([^/]+/[^/]+)/revision/([0-9a-f]{40})": _Handler.revision,
    r"POST /api/repos/create": _Handler.create,
    r"POST /api/validate-yaml": _Handler.validate,
    r"POST /api/models/([^/]+/[^/]+)/preupload/main": _Handler.preupload,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": _Handler.batch,
    r"PUT /lfs/([0-9a-f]{64})": _Handler.put,
    r"POST /verify": _Handler.verify,
    r"GET /api/models/([^/]+/[^/]+)/xet-write-token/main": _Handler.xet_token,
    r"GET /v1/chunks/default(?:-merkledb)?/([0-9a-f]{64})": _Handler.known_chunk,
    r"POST /v1/xorbs/default/([0-9a-f]{64})": _Handler.xorb,
    r"POST /(?:v1/)?shards": _Handler.shard,
    r"POST /api/models/([^/]+/[^/]+)/commit/main": _Handler.commit,
}
