"""Tests of whole sweeps: halving by exact pauses, turns, requests of the user, sweeps and drivers that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from process_watch import descendants
from several_nodes import several_nodes
from small_runs import REFERENCE, FinishedRun, events_of, rows_of, same_weights, small_settings, weights_of
from sweeps import standings, wait_for_free_cpus, write_sweep

from grpo_ray import cli
from grpo_ray.errors import ConfigError
from grpo_ray.storage.lease import Driver
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.sweep.runner import run_sweep

HELPERS = Path(__file__).parents[2] / "helpers"
WORKER = "ray::RayTrainWorker"
LONG = 900.0
"""Time limit for an event on a busy machine, seconds."""

SETTINGS = [*REFERENCE, "run.trace=false", "grpo.max_steps=6"]


def latest(folder: Path) -> dict[str, Any]:
    """Return the weights of a run's latest checkpoint."""
    return weights_of(sorted(folder.glob("checkpoint-*"))[-1])


def launches(folder: Path) -> list[int]:
    """Return the steps that the launches of a run began with."""
    return [event["step"] for event in events_of(folder, "began")]


def test_halved_sweep_leaves_the_survivor_unchanged(
    reference_run: FinishedRun, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first trial is the reference run; the second one ruins its policy, so that it is dropped."""
    path = write_sweep(
        tmp_path,
        [*small_settings("base", tmp_path, policy), *REFERENCE],
        trials=[{"name": "good"}, {"name": "ruined", "grpo.learning_rate": 0.03}],
        rungs={"steps": [3], "keep": 0.5},
    )
    assert cli.main(["sweep", str(path)]) == 0
    folder = tmp_path / "rates"
    assert standings(folder) == {"good": "active", "ruined": "dropped"}
    assert launches(folder / "good") == [0, 3]
    assert launches(folder / "ruined") == [0]
    assert [row["step"] for row in rows_of(folder / "ruined")] == [1, 2, 3]
    assert same_weights(latest(folder / "good"), weights_of(reference_run.summary.latest_checkpoint))

    (decision,) = json.loads((folder / "sweep.json").read_text())["decisions"]
    assert (decision["step"], decision["kept"]) == (3, ["good"])
    assert decision["values"]["good"] >= decision["values"]["ruined"]
    ranked = json.loads((folder / "summary.json").read_text())["trials"]
    assert {row["trial"]: row["steps"] for row in ranked} == {"good": 5, "ruined": 3}
    assert all(Path(row["best_checkpoint"]).exists() for row in ranked)
    assert ranked[0]["difference_to_best"] is None
    assert 0 <= ranked[1]["difference_to_best"] <= 1 and 0 < ranked[1]["p_value"] <= 1
    page = (folder / "report.html").read_text()
    assert "<h1>rates</h1>" in page and "good" in page and "ruined" in page
    output = capsys.readouterr().out
    assert "step 3: good stay; ruined dropped" in output
    assert ranked[0]["best_checkpoint"] in output and str(folder / "report.html") in output
    wait_for_free_cpus()

    # The same command again trains nothing, and finds the same.
    again = run_sweep(str(path))
    assert [each.name for each in again.results] == [row["trial"] for row in ranked]
    assert launches(folder / "good") == [0, 3]


def test_second_sweep_of_a_folder_is_refused(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, [f"run.storage_path={tmp_path}"], vary={"run.seed": [1, 2]})
    folder = RunFolder(str(tmp_path), "rates")
    other = subprocess.Popen(["sleep", "600"])
    try:
        own = asdict(Driver.of_this_process())
        start_ticks = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        folder.write_json(own | {"pid": other.pid, "process_start": start_ticks}, "driver", "holder.json")
        folder.write_text("1", "driver", f"{own['id']}.beat")
        with pytest.raises(ConfigError, match=rf"^the sweep {folder.uri} is running already: host .*, pid {other.pid}"):
            run_sweep(str(path))
    finally:
        other.kill()
        other.wait()


def test_bad_rungs_are_refused_before_anything_begins(policy: Path, tmp_path: Path) -> None:
    settings = [*small_settings("base", tmp_path, policy), "grpo.steps_per_generation=2"]
    path = write_sweep(tmp_path, settings, vary={"run.seed": [1, 2]}, rungs={"steps": [1]})
    with pytest.raises(ConfigError, match=r"trial-01: rungs\.steps=1 must be a multiple of grpo\.steps_per_gen"):
        run_sweep(str(path))
    path = write_sweep(tmp_path, settings, vary={"run.seed": [1, 2]}, rungs={"steps": [4]})
    with pytest.raises(ConfigError, match=r"rungs\.steps=\[4\]: no trial is compared, since grpo\.max_steps"):
        run_sweep(str(path))
    assert not (tmp_path / "rates").exists()  # nothing was begun


def start(path: Path, *overrides: str, address: str = "local") -> subprocess.Popen[str]:
    """Start `grpo-ray sweep` on a cluster of its own, or on the one at an address."""
    environment = os.environ | {"RAY_ADDRESS": address}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), environment.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_ray.cli", "sweep", str(path), *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def request(*words: str) -> str:
    """Send a request to a sweep with the command; return its output."""
    command = [sys.executable, "-m", "grpo_ray.cli", "sweep", *words]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=LONG).stdout


def has_steps(folder: Path, steps: int) -> Callable[[], bool]:
    """Return the condition that a run has reported this many steps."""
    return lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= steps


def has_launches(folder: Path, number: int) -> Callable[[], bool]:
    """Return the condition that the workers of a run have begun this many times."""
    return lambda: (folder / "events.jsonl").exists() and len(launches(folder)) >= number


@pytest.mark.slow
def test_halved_sweep_of_two_rungs_and_turns_equals_runs_alone(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path
) -> None:
    """One trial at a time, in turns of one step, with completions of later steps open at each pause."""
    settings = [*SETTINGS, "rollout.max_staleness=1"]
    rates = [1e-4, 2e-4, 5e-5, 3e-2]
    path = write_sweep(
        tmp_path,
        [*small_settings("base", tmp_path, policy), *settings],
        vary={"grpo.learning_rate": rates},
        rungs={"steps": [2, 4], "keep": 0.5, "metric": "reward/mean"},
        turns=1,
        parallel=1,
    )
    summary = run_sweep(str(path))
    wait_for_free_cpus()
    folder = tmp_path / "rates"
    steps = {each.name: each.steps for each in summary.results}
    assert sorted(steps.values()) == [2, 2, 4, 6]
    for number, rate in enumerate(rates, 1):
        trial = f"trial-{number:02d}"
        if steps[trial] > 2:
            _, alone = small_run(
                trial,
                *settings,
                f"grpo.learning_rate={rate}",
                f"run.pause_at={steps[trial]}",
                "run.best_metric=reward/mean",
            )
            assert same_weights(latest(folder / trial), latest(alone))
            assert launches(folder / trial)[:2] == [0, 1]  # turns


def kill_one(sweep: subprocess.Popen[str], title: str, draw: random.Random, but: Collection[int] = ()) -> None:
    """Kill one of a sweep's processes with this title, a drawn time after the first of them was there.

    Args:
        but: ids of processes that do not count.
    """

    def found() -> list[int]:
        assert sweep.poll() is None, "the sweep has ended"
        return sorted(pid for pid, name in descendants(sweep.pid) if name.startswith(title) and pid not in but)

    def kill() -> bool:
        processes = found()
        with suppress(ProcessLookupError):  # it has just ended; the next one will do
            if processes:
                os.kill(draw.choice(processes), signal.SIGKILL)
                return True
        return False

    wait_for(lambda: bool(found()), title, LONG)
    time.sleep(draw.uniform(0, 6))
    wait_for(kill, f"a living {title}", LONG)


@pytest.mark.slow
def test_sweep_killed_at_random_moments_continues(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    """The sweep, then the driver of a trial, then a worker is killed; the decisions and the weights are the same."""
    trials = [{"name": "good"}, {"name": "ruined", "grpo.learning_rate": 0.03}]
    settings = [*SETTINGS, "grpo.max_steps=12", "heldout.score=correctness",
                "rewards.functions=[correctness, 'reward_spies:vary', 'reward_spies:wait']"]  # fmt: skip
    # Steps of two seconds: a process that is killed some seconds after its start is in the middle of its work.
    slow, quick = (f"rewards.settings={{'reward_spies:wait': {{seconds: {seconds}}}}}" for seconds in (2, 0))
    base = [*small_settings("base", tmp_path, policy), *settings, slow]
    path = write_sweep(tmp_path, base, trials=trials, rungs={"steps": [3]}, parallel=2)
    folder, draw = tmp_path / "rates", random.Random(7)
    sweep = start(path)
    wait_for(has_steps(folder / "good", draw.randint(1, 3)), "a drawn step", LONG)
    time.sleep(draw.uniform(0, 6))
    sweep.send_signal(signal.SIGKILL)
    output, _ = sweep.communicate(timeout=LONG)
    assert sweep.returncode == -signal.SIGKILL, output

    sweep = start(path)
    wait_for(lambda: any(name.startswith(WORKER) for _, name in descendants(sweep.pid)), "a worker", LONG)
    kill_one(sweep, "ray::TrialDriver", draw)
    before = [pid for pid, name in descendants(sweep.pid) if name.startswith(WORKER)]
    kill_one(sweep, WORKER, draw, but=before)  # of a later launch: those of the killed driver are about to end
    output, _ = sweep.communicate(timeout=LONG)
    assert sweep.returncode == 0, output
    assert "its driver has ended without a result; it is launched again" in output
    assert standings(folder) == {"good": "active", "ruined": "dropped"}, output
    assert [row["step"] for row in rows_of(folder / "good")] == [*range(1, 13)]
    assert [row["step"] for row in rows_of(folder / "ruined")] == [1, 2, 3]
    _, alone = small_run("alone", *settings, quick)
    assert same_weights(latest(folder / "good"), latest(alone))


@pytest.mark.slow
def test_killed_driver_of_a_trial_is_replaced_and_frees_its_cpus(policy: Path, tmp_path: Path, cluster: None) -> None:
    import threading

    settings = [*small_settings("base", tmp_path, policy), *SETTINGS, "grpo.save_steps=1"]
    path = write_sweep(tmp_path, settings, trials=[{"name": "one"}])
    folder = tmp_path / "rates" / "one"

    def kill_driver() -> None:
        wait_for(has_steps(folder, 2), "two steps", LONG)
        os.kill(json.loads((folder / "driver" / "holder.json").read_text())["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_driver)
    killer.start()
    summary = run_sweep(str(path))
    killer.join()
    assert [each.steps for each in summary.results] == [6]
    assert launches(folder)[0] == 0 and len(launches(folder)) == 2
    wait_for_free_cpus()


@pytest.mark.slow
def test_node_lost_in_a_sweep_costs_nothing(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    """The worker of one trial or of both is lost with its node, and starts again on another one."""
    settings = [*SETTINGS, "cluster.num_workers=1", "run.max_failures=3", "grpo.max_steps=12",
                "heldout.score=correctness",
                "rewards.functions=[correctness, 'reward_spies:vary', 'reward_spies:wait']"]  # fmt: skip
    slow = ["rewards.settings={'reward_spies:wait': {seconds: 2}}"]
    rates, found = [1e-4, 2e-4], tmp_path / "node"
    base = [*small_settings("base", tmp_path, policy), *settings, *slow]
    path = write_sweep(tmp_path, base, vary={"grpo.learning_rate": rates}, parallel=2)
    folders = [tmp_path / "rates" / f"trial-0{number}" for number in (1, 2)]
    with several_nodes(2, 2, 2) as nodes:
        sweep = start(path, address=nodes.address)
        for folder in folders:
            wait_for(has_steps(folder, 2), "two steps", LONG)
        assert nodes.drive(write_node_of_a_worker, path=str(found)).wait(LONG) == 0
        nodes.kill_node(found.read_text())
        output, _ = sweep.communicate(timeout=LONG)
    assert sweep.returncode == 0, output
    assert sum(len(launches(folder)) for folder in folders) > 2, output
    for folder, rate in zip(folders, rates, strict=True):
        assert [row["step"] for row in rows_of(folder)] == [*range(1, 13)]
        quick = ["rewards.settings={'reward_spies:wait': {seconds: 0}}"]
        _, alone = small_run(f"alone-{folder.name}", *settings, *quick, f"grpo.learning_rate={rate}")
        assert same_weights(latest(folder), latest(alone))


def write_node_of_a_worker(path: str) -> None:
    """Write the id of a node that has a train worker."""
    import ray
    from ray.util import placement_group_table

    ray.init(logging_level="ERROR")
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    Path(path).write_text(groups[0]["bundles_to_node_id"][0])


@pytest.mark.slow
def test_requests_stop_resume_and_clone_trials(policy: Path, tmp_path: Path) -> None:
    settings = [
        *small_settings("base", tmp_path, policy), *SETTINGS, "grpo.max_steps=40", "grpo.save_steps=1",
        "rewards.functions=['reward_spies:vary', 'reward_spies:wait']", "heldout.score=correctness",
        "rewards.settings={'reward_spies:wait': {seconds: 1}}",
    ]  # fmt: skip
    path = write_sweep(tmp_path, settings, vary={"run.seed": [1, 2]}, parallel=1, turns=4)
    folder = tmp_path / "rates"
    sweep = start(path)
    first = folder / "trial-01"
    wait_for(has_steps(first, 2), "two steps", LONG)
    assert "trial-01: stops after its current step" in request("stop", str(folder), "trial-01")
    wait_for(lambda: standings(folder)["trial-01"] == "stopped", "the stop", LONG)
    assert "trial-01: a clone is requested" in request("clone", str(folder), "trial-01", "grpo.max_steps=2")
    wait_for(has_steps(folder / "trial-02", 1), "a step of the other trial", LONG)
    request("stop", str(folder), "trial-02")
    wait_for(lambda: standings(folder).get("trial-02") == "stopped", "the stop", LONG)
    output, _ = sweep.communicate(timeout=LONG)  # the clone takes its two steps, and no trial is left
    assert sweep.returncode == 0, output
    assert standings(folder) == {"trial-01": "stopped", "trial-02": "stopped", "trial-01-clone-1": "active"}
    stopped = len(rows_of(first))
    assert 2 <= stopped < 40
    assert len(rows_of(folder / "trial-01-clone-1")) == 2

    request("resume", str(folder), "trial-01")  # read by the next launch
    output, _ = (sweep := start(path, f"grpo.max_steps={stopped + 2}")).communicate(timeout=LONG)
    assert sweep.returncode == 0, output
    assert [row["step"] for row in rows_of(first)] == [*range(1, stopped + 3)]
    with pytest.raises(subprocess.CalledProcessError):
        request("stop", str(folder), "trial-03")


@pytest.mark.slow
def test_stop_before_the_first_step_ends_a_trial_at_once(policy: Path, tmp_path: Path) -> None:
    """The policy before training is measured with a score that takes longer than the test may wait."""
    seconds = tmp_path / "seconds"
    seconds.write_text(f"{2 * LONG}")
    settings = [
        *small_settings("base", tmp_path, policy), *SETTINGS, "heldout.score='reward_spies:wait'",
        "rewards.functions=['reward_spies:vary', 'reward_spies:wait']",
        f"rewards.settings={{'reward_spies:wait': {{seconds: '{seconds}'}}}}",
    ]  # fmt: skip
    path = write_sweep(tmp_path, settings, trials=[{"name": "one"}])
    folder = tmp_path / "rates"
    for number, stop in enumerate(("request", "signal"), 1):
        sweep = start(path)
        wait_for(has_launches(folder / "one", number), "workers", LONG)
        if stop == "request":
            request("stop", str(folder), "one")
        else:
            sweep.send_signal(signal.SIGINT)
        output, _ = sweep.communicate(timeout=LONG)
        assert sweep.returncode == (0 if stop == "request" else 130), output
        assert "one: ended at step 0, since it was not taking a step" in output
        if stop == "request":
            assert standings(folder) == {"one": "stopped"}
            request("resume", str(folder), "one")  # read by the next launch
    seconds.write_text("0")
    output, _ = (sweep := start(path)).communicate(timeout=LONG)
    assert sweep.returncode == 0, output
    assert [row["step"] for row in rows_of(folder / "one")] == [*range(1, 7)]


@pytest.mark.slow
def test_sweep_whose_board_is_killed_goes_on(policy: Path, tmp_path: Path) -> None:
    settings = [*small_settings("base", tmp_path, policy), *SETTINGS, "grpo.max_steps=500", "grpo.save_steps=500"]
    path = write_sweep(tmp_path, settings, trials=[{"name": "one"}])
    folder = tmp_path / "rates" / "one"
    sweep = start(path)
    wait_for(has_steps(folder, 2), "two steps", LONG)
    kill_one(sweep, "ray::SweepBoard", random.Random(7))
    steps = len(rows_of(folder))
    wait_for(has_steps(folder, steps + 5), "further steps", LONG)
    sweep.send_signal(signal.SIGINT)  # reaches the trial through the new board
    output, _ = sweep.communicate(timeout=LONG)
    assert sweep.returncode == 130, output
    assert sorted(folder.glob("checkpoint-*"))[-1].name == f"checkpoint-{len(rows_of(folder)):06d}"


@pytest.mark.slow
def test_signal_stops_all_trials_saved(policy: Path, tmp_path: Path) -> None:
    settings = [*small_settings("base", tmp_path, policy), *SETTINGS, "grpo.max_steps=500", "grpo.save_steps=500"]
    path = write_sweep(tmp_path, settings, vary={"run.seed": [1, 2]}, parallel=2)
    folders = [tmp_path / "rates" / f"trial-0{number}" for number in (1, 2)]
    sweep = start(path)
    for folder in folders:
        wait_for(has_steps(folder, 2), "two steps", LONG)
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=LONG)
    assert sweep.returncode == 130, output
    assert "run the same command to continue" in output
    for folder in folders:
        assert sorted(folder.glob("checkpoint-*"))[-1].name == f"checkpoint-{len(rows_of(folder)):06d}"
