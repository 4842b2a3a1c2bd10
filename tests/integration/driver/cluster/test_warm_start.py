"""Tests of warm starts: real servers and clients, first with a tiny preload, then under a real Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.driver.cluster.warm_start import LOG, Preload, warm_executable

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


@pytest.fixture
def servers() -> Iterator[str]:
    """Servers of a separate driver; the client's path. `json.tool` marks the light server, `colorsys` the heavy one."""
    code = (
        "import sys; from grpo_ray.driver.cluster.warm_start import Preload, warm_executable\n"
        "with warm_executable({'VLLM_CPU_KVCACHE_SPACE': '1'}, Preload(['json'], ['json.tool']), "
        "Preload([], ['colorsys'])) as client: print(client, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        client = driver.stdout.readline().strip()
        folder = Path(client).parent
        wait_until(lambda: (folder / "light").exists() and (folder / "heavy").exists())
        yield client
        driver.stdin.close()
        driver.wait(SECONDS)
    wait_until(lambda: not folder.exists())


def run(client: str, *arguments: str | Path, **settings: object) -> dict:
    """Run a command that prints JSON, in an environment that is the same for every call."""
    settings = {"env": os.environ | {"MARK": "a"}, **settings}
    done = subprocess.run([client, *arguments], capture_output=True, text=True, check=True, **settings)  # type: ignore
    assert done.stderr == "to stderr\n"
    return json.loads(done.stdout)


def test_client_served_child_is_like_a_plain_process(servers: str, worker: Path, tmp_path: Path) -> None:
    plain = run(sys.executable, worker, "--one=1", "two words", cwd=tmp_path)
    warm = run(servers, worker, "--one=1", "two words", cwd=tmp_path)
    assert warm["light"] and not plain["light"]
    own = {"light", "process", "parent"}
    assert {k: v for k, v in warm.items() if k not in own} == {k: v for k, v in plain.items() if k not in own}
    assert warm["parent"] != os.getpid()


def test_client_blocked_signals_reach_the_child(servers: str, worker: Path) -> None:
    block = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # noqa: E731
    assert run(servers, worker, preexec_fn=block)["blocked"] == [signal.SIGINT]


def test_client_runtime_env_chooses_the_heavy_server(servers: str, worker: Path) -> None:
    run(servers, worker)  # the first request settles the environment
    context = json.dumps({"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "py_executable": sys.executable})
    setup = ["setup_worker.py", f"--serialized-runtime-env-context={context}", "--language=PYTHON", str(worker), "--x"]
    served = run(servers, *setup)
    assert served["heavy"] and not served["light"]
    assert served["arguments"] == [str(worker), "--x"]


def test_client_variable_of_the_shell_does_not_choose_the_heavy_server(servers: str, worker: Path) -> None:
    run(servers, worker)
    served = run(servers, worker, env=os.environ | {"MARK": "a", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert served["light"] and not served["heavy"]


@pytest.mark.parametrize(
    "environment", [{"MARK": "b"}, {"MARK": "a", "RAY_JOB_ID": "ffffffff"}], ids=["other variable", "no job"]
)
def test_server_unlike_environment_is_left_to_plain_python(
    servers: str, worker: Path, environment: dict[str, Any]
) -> None:
    assert run(servers, worker)["light"]
    left = run(servers, worker, env=os.environ | environment)
    assert not left["light"]
    assert left["marked"] == environment["MARK"]
    assert "refused" in (Path(servers).parent / LOG).read_text()


def test_client_other_script_runs_in_plain_python(servers: str, tmp_path: Path) -> None:
    script = tmp_path / "monitor.py"
    script.write_text(WORKER)
    assert not run(servers, script)["light"]


def test_client_without_server_runs_plain_python(worker: Path) -> None:
    with warm_executable({}, Preload([], ["json.tool"]), Preload([], [])) as client:
        folder = Path(client).parent
        for name in ("light", "heavy"):
            wait_until((folder / name).exists)
            (folder / name).unlink()
        left = run(client, worker)
    assert not left["light"] and left["parent"] == os.getpid()
    failing = subprocess.run([client, "-c", "raise SystemExit(3)"], check=False)
    assert failing.returncode == 3


def test_warm_executable_restores_sys_executable() -> None:
    before = sys.executable
    with warm_executable({}, Preload([], []), Preload([], [])) as client:
        assert sys.executable == client
    assert sys.executable == before


def test_server_killed_child_leaves_no_zombie(servers: str, worker: Path) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [servers, worker, "wait"], stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as client:
        assert client.stdout is not None
        served = json.loads(client.stdout.readline())
        assert client.wait(SECONDS) == 0  # the client has ended, its child has not
    assert is_alive(served["process"]) and served["process"] in children_of(served["parent"])
    os.kill(served["process"], signal.SIGKILL)
    wait_until(lambda: served["process"] not in children_of(served["parent"]))
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_ends_with_its_driver(end: signal.Signals, worker: Path) -> None:
    code = (
        "import sys, time; from grpo_ray.driver.cluster.warm_start import Preload, warm_executable\n"
        "with warm_executable({}, Preload(['json'], []), Preload([], [])) as client: print(client, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        client = driver.stdout.readline().strip()
        wait_until((Path(client).parent / "heavy").exists)
        light = run(client, worker)["parent"]
        wait_until(lambda: len(children_of(light)) == 1)  # the heavy one
        everyone = [light, *children_of(light)]
        driver.send_signal(end)
        driver.wait(SECONDS)
    wait_until(lambda: not any(is_alive(each) for each in everyone))
    wait_until(lambda: not Path(client).parent.exists())


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
actors = [Probe.remote() for _ in range(4)]
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
