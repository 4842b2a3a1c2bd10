"""Tests of the live page's server: real HTTP requests, the command, and a run on an object store."""

import contextlib
import http.client
import json
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from failing_storage import CREDENTIALS, S3Server, storage_path, wait_for
from page_samples import make_group, metric_rows, write_run
from watched_runs import request, serving, state_of, watch_command

from grpo_ray import cli
from grpo_ray.pages.report.read import open_run
from grpo_ray.pages.watch import api
from grpo_ray.pages.watch import refresher as refresher_module
from grpo_ray.pages.watch.server import HEADERS, MAX_CONNECTIONS, WatchServer
from grpo_ray.storage.records.rollout_files import write_rollouts

HANGING = """
import sys, time
from grpo_ray import cli
from grpo_ray.pages.watch import api

def hang(snapshot, given):
    print("hangs", flush=True)
    time.sleep(86400)

api.ANSWERS["groups"] = hang
sys.exit(cli.main())
"""
"""The command, with storage from which no group is ever read."""

INTERRUPTED = """
import signal, sys, threading
from grpo_ray import cli
from grpo_ray.pages.watch import api, server

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def interrupt_this_thread(snapshot, given):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    return {}

def wait(server):
    Interrupted()
    waits(server)

if sys.argv.pop() == "destructor":
    waits, server.WatchServer.wait = server.WatchServer.wait, wait
else:
    api.ANSWERS["groups"] = interrupt_this_thread
sys.exit(cli.main())
"""
"""The command, with the signal of Ctrl-C where the main thread's wait is not interrupted: in a destructor that this
thread runs, or in the thread of a request."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    with serving(write_run(tmp_path)) as server:
        yield server


def test_server_page_has_strict_policy_and_loads_nothing(server: WatchServer) -> None:
    port = server.port
    for path in ("/", "/watch.js", "/watch.css", "/contents", "/more-curves", "/api/state", "/nothing"):
        response, body = request(port, path)
        assert response.status == (404 if path == "/nothing" else 200), path
        assert body and response.headers["X-Content-Type-Options"] == "nosniff"
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    page = request(port, "/")[1].decode()
    assert "http" not in page and "<style" not in page and "onclick" not in page
    script = request(port, "/watch.js")[1].decode()
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert name not in script


def test_server_listens_on_loopback_only(server: WatchServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::1]"]
)
def test_server_foreign_host_name_is_refused(server: WatchServer, host: str) -> None:
    for path in ("/", "/api/state", "/contents"):
        response, body = request(server.port, path, host=host)
        assert response.status == 403 and b"no other name" in body


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1:1", "LOCALHOST"])
def test_server_loopback_name_with_any_port_is_served(server: WatchServer, host: str) -> None:
    """A tunnel may have another port on the user's machine."""
    assert request(server.port, "/api/state", host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_server_only_reads(server: WatchServer, method: str) -> None:
    response, _ = request(server.port, "/api/state", method)
    assert response.status == 405 and set(response.headers["Allow"].split(", ")) == {"GET", "HEAD"}


def test_server_head_has_no_body(server: WatchServer) -> None:
    response, body = request(server.port, "/", "HEAD")
    assert response.status == 200 and body == b"" and int(response.headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../config.yaml", 404),
        ("/%2e%2e/config.yaml", 404),
        ("/static/watch.js", 404),
        ("/api/state/", 404),
        ("/api/groups?order=x", 400),
        ("/api/groups?" + "&".join(f"a{number}=1" for number in range(50)), 400),
        ("/api/group?step=1&problem=%00%ff", 404),
    ],
)
def test_server_wrong_request_is_an_error_in_json(server: WatchServer, path: str, status: int) -> None:
    response, body = request(server.port, path)
    assert response.status == status and json.loads(body)["error"]


def test_server_garbage_does_not_stop_it(server: WatchServer) -> None:
    send_garbage(server.port)
    assert state_of(server)["number"] == 1


def test_server_connections_are_bounded_and_free_again(server: WatchServer) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 20):  # idle ones, none of which takes a thread
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        wait_for(lambda: request(server.port, "/api/state")[0].status == 503, "the refusal")
        response, _ = request(server.port, "/api/state")
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        assert threading.active_count() <= threads
    wait_for(lambda: request(server.port, "/api/state")[0].status == 200, "a connection")


def test_server_client_that_does_not_read_holds_up_nobody(server: WatchServer) -> None:
    with client_that_does_not_read(server.port):
        for _ in range(20):
            assert state_of(server)["number"] == 1


def test_server_long_answer_does_not_delay_others(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ends = threading.Event(), threading.Event()

    def search(snapshot: object, given: object) -> dict[str, bool]:
        began.set()
        return {"ends": ends.wait(60)}

    monkeypatch.setitem(api.ANSWERS, "groups", search)
    with client(server.port, b"GET /api/groups HTTP/1.1\r\nHost: localhost\r\n\r\n") as searching:
        assert began.wait(60) and state_of(server)["number"] == 1
        ends.set()
        assert searching.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_server_error_of_the_program_is_an_answer_and_logged(
    server: WatchServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(api.ANSWERS, "groups", lambda snapshot, given: {"share": 1 / 0})
    response, body = request(server.port, "/api/groups")
    assert response.status == 500 and "see its terminal: ZeroDivisionError" in json.loads(body)["error"]
    assert response.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    wait_for(lambda: "ZeroDivisionError: division by zero" in caplog.text, "the traceback")
    assert state_of(server)["number"] == 1


@contextlib.contextmanager
def client(port: int, data: bytes) -> Iterator[socket.socket]:
    """Connect and send data."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        yield connection


def client_that_does_not_read(port: int) -> contextlib.AbstractContextManager[socket.socket]:
    """Ask for more megabytes than the buffers of the system hold, and read none."""
    return client(port, 1000 * b"GET /watch.js HTTP/1.1\r\nHost: localhost\r\n\r\n")


def send_garbage(port: int) -> None:
    """Send requests that are malformed, or too long, and read the responses."""
    for data in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET " + b"a" * 70_000 + b"\r\n\r\n"):
        with contextlib.suppress(ConnectionError), client(port, data) as connection:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def ask_and_go_away(port: int) -> None:
    """Reset the connection before the response can be sent."""
    with client(port, b"GET /contents HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_server_growing_run_has_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresher_module, "LOCAL_SECONDS", 0.01)
    folder = write_run(tmp_path, metrics=metric_rows(20))
    with serving(folder) as server:
        before = request(server.port, "/contents")[1]
        with open(folder.path("metrics.jsonl"), "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in metric_rows(40)[20:]))
        wait_for(lambda: state_of(server)["step"] == 40, "the new steps")
        assert request(server.port, "/contents")[1] != before
        write_rollouts(folder, [make_group(40, "d" * 16, (1.0, 0.0), texts=("a", "b"))])
        wait_for(lambda: state_of(server)["last_group_step"] == 40, "the new groups")


def test_server_s3_run_is_read(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresher_module, "REMOTE_SECONDS", 0.01)
    key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    where = storage_path(s3_process.port, user=f"{key}:{secret}@")
    folder = write_run(where, "watched", metrics=metric_rows(20))
    path, _, query = where.partition("?")
    with serving(open_run(f"{path}/watched?{query}")) as server:
        port = server.port
        assert state_of(server)["step"] == 20
        groups = json.loads(request(port, "/api/groups?text=boxed")[1])["groups"]
        assert [group["excerpt"] for group in groups] == ["\\boxed{4}"]
        folder.write_text("".join(json.dumps(row) + "\n" for row in metric_rows(30)), "metrics.jsonl")
        wait_for(lambda: state_of(server)["step"] == 30, "the new steps")
        everything = b"".join(request(port, path)[1] for path in ("/contents", "/api/state", "/api/groups"))
        assert secret.encode() not in everything


@pytest.mark.main_path
def test_watch_command_serves_until_interrupted(tmp_path: Path) -> None:
    with watch_command(write_run(tmp_path)) as (process, url):
        assert request(int(url.split(":")[2].strip("/")), "/")[0].status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""
    files = {path.name for path in tmp_path.rglob("*")}
    assert "report.html" not in files  # it only reads


def test_watch_command_with_bad_clients_is_silent_and_ends(tmp_path: Path) -> None:
    with watch_command(write_run(tmp_path)) as (process, url):
        port = int(url.split(":")[2].strip("/"))
        send_garbage(port)
        for _ in range(20):
            ask_and_go_away(port)
        with client_that_does_not_read(port):
            assert request(port, "/")[0].status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""


def test_watch_command_ends_while_storage_hangs(tmp_path: Path) -> None:
    with watch_command(write_run(tmp_path), ("-c", HANGING)) as (process, url):
        port = int(url.split(":")[2].strip("/"))
        wait_for(lambda: json.loads(request(port, "/api/state")[1])["number"] == 1, "the first reading")
        with client(port, b"GET /api/groups HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            assert process.stdout is not None and process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("place", ["destructor", "thread"])
def test_watch_command_signal_that_interrupts_no_wait_ends_it(tmp_path: Path, place: str) -> None:
    with watch_command(write_run(tmp_path), ("-c", INTERRUPTED), place) as (process, url):
        if place == "thread":
            port = int(url.split(":")[2].strip("/"))
            wait_for(lambda: json.loads(request(port, "/api/state")[1])["number"] == 1, "the first reading")
            with contextlib.suppress(ConnectionError, http.client.HTTPException):  # it may end before the response
                request(port, "/api/groups")
        assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""


def test_watch_command_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ([str(tmp_path)], f"{tmp_path} is not a run folder"),
            ([str(tmp_path / "none")], "is not a run folder"),
            ([str(folder.local), "--port", str(port)], f"--port {port}: cannot be used"),
            ([str(folder.local), "--port", "70000"], "--port must be between 0"),
        ):
            assert cli.main(["watch", *arguments]) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1
