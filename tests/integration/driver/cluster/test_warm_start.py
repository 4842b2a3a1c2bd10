"""Tests of warm starts: real servers and clients, first with a tiny preload, then under a real Ray cluster."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.driver.cluster.warm_start import LOG, SOCKETS, Preload, warm_executable

ROOT = Path(__file__).parents[4]
SECONDS = 60
"""Limit on every wait; none is reached unless something is wrong."""

WORKER = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "marked": os.environ.get("MARK"), "heavy": "colorsys" in sys.modules,
    "light": "json.tool" in sys.modules, "parent": os.getppid(), "process": os.getpid(),
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd")), "path": sys.path[0],
    "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "name": __name__,
}), flush=True)
print("to stderr", file=sys.stderr, flush=True)
if "wait" in sys.argv:
    sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "default_worker.py"
    script.write_text(WORKER)
    return script


DRIVER = """
import subprocess, sys
from grpo_ray.driver.cluster.warm_start import Preload, warm_executable

plain = sys.executable
with warm_executable({"VLLM_CPU_KVCACHE_SPACE": "1"}, plain, Preload(["json"], ["json.tool"]),
                     Preload([], ["colorsys"])) as client:
    print(client, flush=True)
subprocess.run([plain, *sys.argv[1:]])
"""
RAYLET = """
import json, signal, subprocess, sys

waiting = []
for line in sys.stdin:
    order = json.loads(line)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    with open(order["errors"], "w") as errors:
        process = subprocess.Popen(
            order["command"], env=order["env"], cwd=order["cwd"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    waiting.append(process)  # keeps its standard input open
    output = process.stdout.readline()
    print(json.dumps({"output": output, "status": process.wait()}), flush=True)
"""
"""Process with the raylet's place: a child of the driver that starts workers."""


class Servers:
    """Servers of a separate driver, and the process that starts workers for it.

    `json.tool` marks the light server, `colorsys` the heavy one.
    """

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "errors"
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, "-c", RAYLET],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.driver.stdin is not None and self.driver.stdout is not None
        self.input, self.output = self.driver.stdin, self.driver.stdout
        self.client = self.output.readline().strip()
        self.folder = Path(self.client).parent
        wait_until(lambda: all((self.folder / name).exists() for name in SOCKETS))

    def close(self) -> None:
        self.input.close()
        self.driver.wait(SECONDS)
        self.output.close()
        wait_until(lambda: not self.folder.exists())

    def run(self, *arguments: str | Path, client: str | None = None, **settings: object) -> dict[str, Any]:
        """Have the raylet run a command that prints JSON, in an environment that is the same for every call."""
        order = {
            "command": [client or self.client, *map(str, arguments)],
            "env": os.environ | {"MARK": "a"},
            "cwd": None,
            "blocked": [],
            "errors": str(self.errors),
        }
        self.input.write(json.dumps(order | settings) + "\n")
        self.input.flush()
        result = json.loads(self.output.readline())
        assert result["status"] == 0
        wait_until(lambda: self.errors.read_text() == "to stderr\n")
        return json.loads(result["output"])

    @property
    def log(self) -> str:
        return (self.folder / LOG).read_text()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.close()


def test_client_served_child_is_like_a_plain_process(servers: Servers, worker: Path, tmp_path: Path) -> None:
    plain = servers.run(worker, "--one=1", "two words", cwd=str(tmp_path), client=sys.executable)
    warm = servers.run(worker, "--one=1", "two words", cwd=str(tmp_path))
    assert warm["light"] and not plain["light"]
    own = {"light", "process", "parent"}
    assert {k: v for k, v in warm.items() if k not in own} == {k: v for k, v in plain.items() if k not in own}
    assert warm["parent"] != os.getpid()


def test_client_blocked_signals_reach_the_child(servers: Servers, worker: Path) -> None:
    assert servers.run(worker, blocked=[signal.SIGINT])["blocked"] == [signal.SIGINT]


def test_client_runtime_env_chooses_the_heavy_server(servers: Servers, worker: Path) -> None:
    servers.run(worker)  # the first request settles the environment
    context = json.dumps({"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "py_executable": sys.executable})
    setup = ["setup_worker.py", f"--serialized-runtime-env-context={context}", "--language=PYTHON", str(worker), "--x"]
    served = servers.run(*setup)
    assert served["heavy"] and not served["light"]
    assert served["arguments"] == [str(worker), "--x"]


def test_client_of_the_heavy_server_may_make_the_first_request(servers: Servers, worker: Path) -> None:
    """The client tells the light server the environment, and is not forked by it."""
    context = json.dumps({"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "py_executable": sys.executable})
    setup = ["setup_worker.py", f"--serialized-runtime-env-context={context}", "--language=PYTHON", str(worker), "wait"]
    served = servers.run(*setup)
    assert served["heavy"] and not served["light"]
    (heavy,) = children_of(int(Path(f"/proc/{served['parent']}/stat").read_text().rpartition(")")[2].split()[1]))
    assert served["parent"] == heavy


def test_client_the_controller_of_ray_train_comes_from_the_heavy_server(
    servers: Servers, worker: Path, tmp_path: Path
) -> None:
    servers.run(worker)
    setup = tmp_path / "setup_worker.py"
    setup.write_text(WORKER)  # run by the plain interpreter only
    context = json.dumps({"env_vars": {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}, "py_executable": sys.executable})
    arguments: list[str | Path] = [setup, f"--serialized-runtime-env-context={context}", "--language=PYTHON", worker]
    wait_until(lambda: servers.run(*arguments)["heavy"])  # without the variables of train workers
    refused = servers.run(*arguments, env=os.environ | {"MARK": "b"})
    assert not refused["heavy"] and not refused["light"]


def test_client_variable_of_the_shell_does_not_choose_the_heavy_server(servers: Servers, worker: Path) -> None:
    servers.run(worker)
    served = servers.run(worker, env=os.environ | {"MARK": "a", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert served["light"] and not served["heavy"]


@pytest.mark.parametrize(
    "environment", [{"MARK": "b"}, {"MARK": "a", "RAY_JOB_ID": "ffffffff"}], ids=["other variable", "no job"]
)
def test_server_unlike_environment_is_left_to_plain_python(
    servers: Servers, worker: Path, environment: dict[str, Any]
) -> None:
    assert servers.run(worker)["light"]
    left = servers.run(worker, env=os.environ | environment)
    assert not left["light"]
    assert left["marked"] == environment["MARK"]
    assert "refused" in servers.log


def test_server_other_driver_asks_first_and_the_own_workers_are_forked(servers: Servers, worker: Path) -> None:
    """Ray's library keeps the job with which it was loaded: the first request must not decide it."""
    other = servers.run(worker, env=os.environ | {"MARK": "a", "RAY_JOB_ID": "02000000"})
    assert not other["light"]
    assert servers.run(worker, env=os.environ | {"MARK": "a", "RAY_JOB_ID": "01000000"})["light"]


def test_client_other_script_runs_in_plain_python(servers: Servers, tmp_path: Path) -> None:
    script = tmp_path / "monitor.py"
    script.write_text(WORKER)
    assert not servers.run(script)["light"]


ENDING_DRIVER = """
import json, os, subprocess, sys, time
from pathlib import Path
from grpo_ray.driver.cluster.connection import WarmStartEnd
from grpo_ray.driver.cluster.warm_start import LOG, SOCKETS, Preload, warm_executable

def exist():
    return [(folder / name).exists() for name in SOCKETS]

with warm_executable({}, sys.executable, Preload([], ["json.tool"]), Preload([], [])) as client:
    folder = Path(client).parent
    while not all(exist()):
        time.sleep(0.02)
    end = WarmStartEnd()
    end.event({"event": "launched"})
    launched = exist()
    end.event({"event": "began"})
    began = exist()
    left = subprocess.run([client, sys.argv[1]], capture_output=True, text=True, check=True)
failing = subprocess.run([client, "-c", "raise SystemExit(3)"], check=False)
print(json.dumps({"launched": launched, "began": began, "worker": json.loads(left.stdout), "driver": os.getpid(),
                  "log": (folder / LOG).read_text(), "failing": failing.returncode}))
"""
"""Driver whose workers begin; in a process of its own, since it ends all warm servers of its process."""


def test_client_after_the_workers_began_runs_plain_python(worker: Path) -> None:
    command = [sys.executable, "-c", ENDING_DRIVER, str(worker)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=SECONDS)
    facts = json.loads(done.stdout)
    assert facts["launched"] == [True, True] and facts["began"] == [False, False]
    assert not facts["worker"]["light"] and facts["worker"]["parent"] == facts["driver"]
    assert facts["log"] == ""  # nobody asked the servers
    assert facts["failing"] == 3


def test_warm_executable_restores_sys_executable() -> None:
    before = sys.executable
    with warm_executable({}, before, Preload([], []), Preload([], [])) as client:
        assert sys.executable == client
    assert sys.executable == before


def test_server_killed_child_leaves_no_zombie(servers: Servers, worker: Path) -> None:
    served = servers.run(worker, "wait")  # its client has ended
    assert is_alive(served["process"]) and served["process"] in children_of(served["parent"])
    os.kill(served["process"], signal.SIGKILL)
    wait_until(lambda: served["process"] not in children_of(served["parent"]))


# Processes that are not served: only children of the driver's raylet are


def test_server_foreign_process_is_refused_before_it_is_read(servers: Servers, worker: Path) -> None:
    light = servers.run(worker)["parent"]
    before = children_of(light)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.settimeout(SECONDS)
        foreign.connect(str(servers.folder / "light"))
        assert foreign.recv(1) == b""  # closed without a byte of a request
    assert children_of(light) == before
    assert f"process {os.getpid()} of user {os.geteuid()} was not started by the raylet" in servers.log


def test_client_of_a_foreign_process_runs_plain_python(servers: Servers, worker: Path) -> None:
    assert servers.run(worker)["light"]
    outside = subprocess.run(
        [servers.client, worker], env=os.environ | {"MARK": "a"}, capture_output=True, text=True, check=True
    )
    assert not json.loads(outside.stdout)["light"]
    assert "was not started by the raylet" in servers.log


@pytest.mark.parametrize("command", ['"$@"; true', '("$@" &)'], ids=["child of a worker", "orphan"])
def test_client_of_a_workers_process_runs_plain_python(servers: Servers, worker: Path, command: str) -> None:
    assert servers.run(worker)["light"]
    below = servers.run("-c", command, "sh", servers.client, str(worker), client="/bin/sh")
    assert not below["light"]
    assert "was not started by the raylet" in servers.log


def test_servers_folder_is_its_owners_alone(servers: Servers) -> None:
    assert stat.S_IMODE(servers.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_ends_with_its_driver(end: signal.Signals, tmp_path: Path, worker: Path) -> None:
    servers = Servers(tmp_path)
    light = servers.run(worker)["parent"]
    wait_until(lambda: len(children_of(light)) == 1)  # the heavy one
    everyone = [light, *children_of(light)]
    servers.driver.send_signal(end)
    servers.driver.wait(SECONDS)
    wait_until(lambda: not any(is_alive(each) for each in everyone))
    servers.close()


RAY_DRIVER = """
import json, os, ray
from grpo_ray.config.loader import load_config
from grpo_ray.driver.cluster.connection import connect, threads_on_this_machine
from grpo_ray.evaluation.evaluate import worker_environment

config = load_config(None, ["cluster.num_workers=1"])
connect(config)

@ray.remote(num_cpus=0)
class Probe:
    def inspect(self):
        import sys
        with open(f"/proc/{os.getppid()}/cmdline") as command:
            parent = command.read()
        ids = [ray.ObjectID.from_random().hex(), __import__("random").random(), __import__("numpy").random.rand()]
        return {"process": os.getpid(), "parent": os.getppid(), "warm": "warm_start.py" in parent,
                "torch": "torch" in sys.modules, "ids": ids, "threads": os.environ.get("OMP_NUM_THREADS")}

env = worker_environment(config, threads_on_this_machine(config))
actors = [Probe.remote() for _ in range(8)]  # more than Ray starts before there is a job, which are not forked
processes = ray.get([actor.inspect.remote() for actor in actors])
for attempt in range(10):  # on a busy machine the libraries may not be imported within the client's limit
    heavy = Probe.options(runtime_env={"env_vars": env}).remote()
    last = ray.get(heavy.inspect.remote())
    if last["torch"]:
        break
print(json.dumps([*processes, last]), flush=True)
if os.environ.get("SHUT_DOWN"):
    del actors, heavy
    ray.shutdown()
    print("down", flush=True)
    input()
"""


@pytest.mark.parametrize("ending", ["the driver's end", pytest.param("ray.shutdown()", marks=pytest.mark.slow)])
def test_ray_actors_are_forked_and_nothing_is_left(ending: str) -> None:
    environment = os.environ | ({"SHUT_DOWN": "1"} if ending == "ray.shutdown()" else {})
    environment.pop("GRPO_RAY_WARM_START", None)
    with subprocess.Popen(
        [sys.executable, "-c", RAY_DRIVER],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        processes = json.loads(driver.stdout.readline())
        if ending == "ray.shutdown()":
            assert driver.stdout.readline() == "down\n"
            servers = {each["parent"] for each in processes if each["warm"]}
            wait_until(lambda: not any(is_alive(each) for each in servers))
        driver.stdin.write("\n")
        driver.stdin.close()
        assert driver.wait(SECONDS) == 0
    *light, heavy = processes
    assert any(each["warm"] for each in light)  # Ray starts two or so before there is a job
    assert heavy["warm"] and heavy["torch"]
    for values in zip(*(each["ids"] for each in processes), strict=True):
        assert len(set(values)) == len(processes)
    everyone = [number for each in processes for number in (each["process"], each["parent"])]
    wait_until(lambda: not any(is_alive(each) for each in everyone))
