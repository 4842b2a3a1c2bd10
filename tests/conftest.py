"""Fixtures of all tiers: one Ray cluster, a small policy, and real runs."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from small_runs import REFERENCE, FinishedRun, short_warm_up, small_settings

TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"

# Time limits of single examples would depend on what else the machine computes.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
# A shell's background job ignores SIGINT, and so would all processes of the tests, some of which are ended by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and collected tests out of all garbage collections: they are large, and live to the end.

    Garbage collections took seconds of the unit tests, and far more in a fork, whose memory they copy by writing to it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries report what is left at the end of the process


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder() -> Iterator[None]:
    """Give each process of pytest-xdist a folder for temporary files of its own, Ray's and the tools' too.

    Tests that look for files which a run has left behind would otherwise find those of runs beside them.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # some tests do something as another user
        os.environ["TMPDIR"] = folder  # of this process, which ends with its tests
        tempfile.tempdir = None  # Python reads TMPDIR again
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster on this machine, with enough logical cores, and GPUs, for every test on any machine."""
    import ray

    from grpo_ray.config.loader import load_config
    from grpo_ray.device import LOGICAL_GPUS
    from grpo_ray.driver.cluster import connection, warm_start
    from grpo_ray.resilience.gpu_driver import cuda_of_torch

    # Workers import the reward functions of the tests (reward_spies.py) and of the benchmarks (peers.py) by name.
    paths = [str(HELPERS), str(TESTS / "benchmarks"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if cuda_of_torch() is None:  # a build that cannot use a GPU
        os.environ[LOGICAL_GPUS] = "4"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")  # not a cluster of `ray start`, of the user or of tests that run beside
        connection.connect(load_config(None, ["cluster.num_workers=8", "cluster.threads_per_worker=1"]))
    # For the runs of the tests it is a cluster that was there before them, whose warm start they do not end.
    connection._HAS_STARTED.clear()
    os.environ.pop(LOGICAL_GPUS, None)
    sockets = [folder / name for folder in warm_start._folders for name in warm_start.SOCKETS]
    yield
    lost = [path for path in sockets if not path.exists()]
    ray.shutdown()
    assert not lost, "a test has ended the cluster's warm start, and all later workers have imported their libraries"


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded policy after a few steps of warm-up: quick to build, and random enough for samples to differ."""
    return short_warm_up("tiny-arithmetic", tmp_path_factory.mktemp("policy"), 40)


@pytest.fixture
def small_run(cluster: None, policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains a small run with the given overrides and returns (summary, run folder)."""
    return runner(policy, tmp_path)


@pytest.fixture(scope="module")
def module_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return `small_run` for the fixtures of a module, which several tests inspect."""
    return runner(policy, tmp_path_factory.mktemp("module"))


@pytest.fixture(scope="session")
def reference_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers. Tests read its folder and change nothing in it."""
    return FinishedRun(*runner(policy, tmp_path_factory.mktemp("reference"))("reference", *REFERENCE))


def runner(policy: Path, folder: Path) -> Callable[..., Any]:
    """Return a function that trains small runs in a folder."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver import run

    def train(name: str, *overrides: str, faults: Sequence[Any] = ()) -> tuple[Any, Path]:
        config = load_config(None, [*small_settings(name, folder, policy), *overrides])
        return run.train(config, faults=faults), folder / name

    return train


@pytest.fixture
def real_problems() -> Callable[[str], Path]:
    """Return a function that finds a file of real problems beside the checkout, and skips the test without it."""

    def find(name: str) -> Path:
        path = TESTS.parents[1] / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"{name} is not beside the checkout")
        return path

    return find


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Folder of a Ray cluster: the paths of its sockets are limited to 107 characters, which `tmp_path` may exceed."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        yield Path(os.path.realpath(folder))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: with small matrices, more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
