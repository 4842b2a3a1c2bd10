"""Runs with tools and environments: the invariants hold as without them, whatever the tools do."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import tool_spies
from small_runs import (
    FinishedRun,
    assert_near,
    groups_of,
    rows_of,
    same_weights,
    small_settings,
    sorted_groups,
    weights_of,
)

from grpo_ray.cli import main
from grpo_ray.config.loader import load_config
from grpo_ray.data.multiplication import multiplication_problems
from grpo_ray.driver import run
from grpo_ray.errors import TrainingError
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.resilience.chaos import Fault

TOOLS = [
    "data.train=multiplication",
    "data.heldout=multiplication",
    "data.limit=10",
    "rollout.tools=['grpo_ray.tools.examples:multiply']",
    "rollout.max_turns=3",
    "grpo.max_steps=5",
    "grpo.max_completion_length=96",
    "grpo.learning_rate=1e-4",
    "grpo.vllm_importance_sampling_mode=token_truncate",
    "rewards.functions=[correctness, 'reward_spies:vary']",
    "run.trace=true",
    "run.max_failures=9",
]
GAME = [
    "data.train=guessing",
    "data.heldout=guessing",
    "data.limit=10",
    "rollout.environment='grpo_ray.tools.examples:Guess'",
    "rollout.settings={'grpo_ray.tools.examples:Guess': {limit: 4}}",
    "rollout.max_turns=5",
    "grpo.max_steps=5",
    "grpo.max_completion_length=160",
    "grpo.learning_rate=1e-4",
    "grpo.vllm_importance_sampling_mode=token_truncate",
    "rewards.functions=[environment]",
    "run.trace=true",
    "run.max_failures=9",
]
SUPERVISOR = "grpo_ray.tools.sandbox.supervisor"


@pytest.fixture(scope="module")
def tool_policy() -> Path:
    return embedded_policy("tiny-tools")


@pytest.fixture(scope="module")
def game_policy() -> Path:
    return embedded_policy("tiny-guess")


@pytest.fixture(scope="module")
def tool_run(cluster: None, tool_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers with a tool."""
    return train("two", tmp_path_factory.mktemp("tools"), tool_policy, *TOOLS)


@pytest.fixture(scope="module")
def game_run(cluster: None, game_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers with an environment."""
    return train("two", tmp_path_factory.mktemp("game"), game_policy, *GAME)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Require that the processes of all tools have ended with the run, and that no files of theirs are left.

    Files of a run that was killed are removed by the next attempt on the node, so runs of that name are left out.
    """
    yield
    folders = Path(tempfile.gettempdir())
    left = [*folders.glob("grpo_ray-tools-*"), *folders.glob("grpo_ray-*/grpo_ray-tools-*")]
    assert not [each for each in left if not each.parent.name.startswith("grpo_ray-killed-")]
    supervisors = [
        each for each in psutil.process_iter(["cmdline"]) if SUPERVISOR in " ".join(each.info["cmdline"] or ())
    ]
    assert not [each for each in supervisors if not is_of_another_session(each)]


def is_of_another_session(process: psutil.Process) -> bool:
    """Return True if another test session, such as that of the benchmarks, has a process among its descendants."""
    with suppress(psutil.NoSuchProcess):
        above = process.parents()
        return psutil.Process() not in above and any("pytest" in each.cmdline() for each in above)
    return True  # it has ended


def train(name: str, folder: Path, policy: Path, *overrides: str, faults: Any = ()) -> FinishedRun:
    config = load_config(None, [*small_settings(name, folder, policy), *overrides])
    return FinishedRun(run.train(config, faults=faults), folder / name)


@pytest.mark.main_path
def test_run_with_tool_proves_each_sync_and_counts_calls(tool_run: FinishedRun) -> None:
    rows = rows_of(tool_run.folder)
    assert len(rows) == 5 and all(row["engine/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["engine/ratio_mean"] == pytest.approx(1, abs=1e-3) for row in rows)
    later = [row["engine/logprob_gap_later_turns"] for row in rows if "engine/logprob_gap_later_turns" in row]
    assert later and max(later) < 1e-4  # the learner reads results as the engine has read them
    assert sum(row["rollout/calls_mean"] for row in rows) > 0.5
    assert all(row["rollout/turns_max"] <= 3 and row["phase/tools"] >= 0 for row in rows)
    assert sum(row["rollout/result_token_share"] for row in rows) > 0.01


@pytest.mark.slow
def test_run_of_one_worker_takes_the_same_steps_with_a_tool(
    cluster: None, tool_run: FinishedRun, tool_policy: Path, tmp_path: Path
) -> None:
    """Workers differ in their turns, so a barrier between turns would be a deadlock."""
    one = train("one", tmp_path, tool_policy, *TOOLS, "cluster.num_workers=1")
    assert sorted_groups(one.folder) == sorted_groups(tool_run.folder)
    assert_near(weights_of(one.summary.latest_checkpoint), weights_of(tool_run.summary.latest_checkpoint))


@pytest.mark.slow
def test_killed_run_with_a_tool_ends_with_the_same_weights(
    cluster: None, tool_run: FinishedRun, tool_policy: Path, tmp_path: Path
) -> None:
    killed = train("killed", tmp_path, tool_policy, *TOOLS, faults=[Fault("kill-backward", step=3, rank=1)])
    assert groups_of(killed.folder) == groups_of(tool_run.folder)
    assert same_weights(weights_of(killed.summary.latest_checkpoint), weights_of(tool_run.summary.latest_checkpoint))


@pytest.mark.slow
def test_sync_without_a_layer_stops_a_run_with_a_tool(cluster: None, tool_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"SyncError.*of the engine's"):
        spoilt = ["rewards.functions=['reward_spies:withhold_a_layer']", "heldout.score=correctness"]
        train("withheld", tmp_path, tool_policy, *TOOLS, *spoilt, "run.max_failures=0", "grpo.learning_rate=1e-3")


OPTIONS = {
    "adapter": ["model.lora={}"],
    "dynamic sampling": ["grpo.dynamic_sampling=true"],
    "one engine of two workers": ["grpo.vllm_tensor_parallel_size=2"],
    "two iterations": ["grpo.num_iterations=2", "grpo.max_steps=4"],
    "filters": ["grpo.top_p=0.95", "grpo.top_k=20"],
    "several samples": ["heldout.num_samples=2", "heldout.temperature=0.7"],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_go_with_a_tool(cluster: None, tool_policy: Path, tmp_path: Path, options: list[str]) -> None:
    """Kill a run with each option: it ends like one that is not killed, with the sync proven at each step."""
    whole = train("whole", tmp_path, tool_policy, *TOOLS, *options)
    killed = train("killed", tmp_path, tool_policy, *TOOLS, *options, faults=[Fault("kill-backward", step=3, rank=1)])
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in rows_of(whole.folder) if "engine/logprob_gap_max" in row)
    assert groups_of(killed.folder) == groups_of(whole.folder)
    name = "adapter_model.safetensors" if "model.lora={}" in options else "model.safetensors"
    ends = [Path(each.summary.latest_checkpoint, name).read_bytes() for each in (whole, killed)]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_run_with_tools_that_go_wrong_ends_and_changes_no_other_completion(
    cluster: None, tool_policy: Path, tmp_path: Path
) -> None:
    one_step = ["grpo.max_steps=1", "grpo.save_steps=1", "grpo.prompts_per_step=32", "data.limit=64"]
    sane = train("sane", tmp_path, tool_policy, *TOOLS, *one_step)
    spoilt = ["rollout.tools=['tool_spies:multiply']", "rollout.time_limit=2"]
    wrong = train("wrong", tmp_path, tool_policy, *TOOLS, *one_step, *spoilt)
    (row,) = rows_of(wrong.folder)
    assert row["rollout/call_timeout_share"] > 0 and row["rollout/call_killed_share"] > 0
    factors = {problem.id: int(problem.prompt[0]["content"].split()[2]) for problem in multiplication_problems("train")}
    kept = spoilt_groups = 0
    for whole, other in zip(sorted_groups(sane.folder), sorted_groups(wrong.folder), strict=True):
        assert whole["problem"] == other["problem"]
        if whole == other:
            kept += 1
        elif factors[whole["problem"]] % tool_spies.MODULUS < len(tool_spies.KINDS):
            spoilt_groups += 1
    assert kept >= 5 and spoilt_groups >= 5


def test_game_run_learns_from_the_environments_reward(game_run: FinishedRun) -> None:
    rows = rows_of(game_run.folder)
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["reward/environment_mean"] == pytest.approx(row["reward/mean"]) for row in rows)
    measured = [(row["heldout/accuracy"], row["heldout/reward"]) for row in rows if "heldout/reward" in row]
    assert len(measured) >= 2 and all(accuracy == pytest.approx(reward) for accuracy, reward in measured)
    baseline = json.loads((game_run.folder / "heldout_before.json").read_text())
    assert baseline["problems"] == 24
    rows = [row for file in game_run.folder.glob("rollouts/*.parquet") for row in pq.read_table(file).to_pylist()]
    begun = [messages[0] for row in rows for messages in row["messages"] or ()]
    assert begun and all(each["role"] == "user" and "guesses" in each["content"] for each in begun)


@pytest.mark.slow
def test_killed_game_run_ends_with_the_same_weights(
    cluster: None, game_run: FinishedRun, game_policy: Path, tmp_path: Path
) -> None:
    killed = train("killed", tmp_path, game_policy, *GAME, faults=[Fault("kill-backward", step=3, rank=1)])
    assert groups_of(killed.folder) == groups_of(game_run.folder)
    assert same_weights(weights_of(killed.summary.latest_checkpoint), weights_of(game_run.summary.latest_checkpoint))


@pytest.mark.slow
def test_game_run_of_one_worker_takes_the_same_steps(
    cluster: None, game_run: FinishedRun, game_policy: Path, tmp_path: Path
) -> None:
    one = train("one", tmp_path, game_policy, *GAME, "cluster.num_workers=1")
    assert sorted_groups(one.folder) == sorted_groups(game_run.folder)
    assert_near(weights_of(one.summary.latest_checkpoint), weights_of(game_run.summary.latest_checkpoint))


ENGINES = {
    "colocated": [],
    "dedicated": ["engine.placement=dedicated", "engine.replicas=2", "cluster.cpus_per_worker=1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", ENGINES)
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_killed_game_run_with_older_weights_ends_with_the_same_weights(
    cluster: None, game_policy: Path, tmp_path: Path, staleness: int, placement: str
) -> None:
    settings = [*GAME, "grpo.max_steps=7", f"rollout.max_staleness={staleness}", *ENGINES[placement]]
    whole = train("whole", tmp_path, game_policy, *settings)
    faults = [Fault("kill-backward", step=3, rank=1), Fault("kill-generation", step=5, rank=0)]
    killed = train("killed", tmp_path, game_policy, *settings, faults=faults)
    assert all((killed.folder / "chaos" / fault.marker).exists() for fault in faults)
    assert groups_of(killed.folder) == groups_of(whole.folder)
    assert same_weights(weights_of(killed.summary.latest_checkpoint), weights_of(whole.summary.latest_checkpoint))
    rows = rows_of(whole.folder)
    gaps = [row.get("engine/logprob_gap_mean") for row in rows]
    # The rounds of later steps begin no batch, and the games of the last batches may have ended.
    assert None not in gaps[: 7 - staleness]
    assert max(gap for gap in gaps if gap is not None) < 1e-4
    assert [row["rollout/staleness_0"] for row in rows] == [1.0] + [0.0] * 6
    assert (max(row["rollout/segments_mean"] for row in rows) > 1) == (staleness > 1)


@pytest.mark.parametrize("name", [pytest.param("tool_run", marks=pytest.mark.slow), "game_run"])
def test_eval_measures_what_the_run_measured(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    finished: FinishedRun = request.getfixturevalue(name)
    last = [row for row in rows_of(finished.folder) if "heldout/accuracy" in row][-1]
    result = tmp_path / "result.json"
    assert main(["eval", str(finished.summary.latest_checkpoint), "--json", str(result)]) == 0
    measured = json.loads(result.read_text())
    assert measured["pass_at_1"]["value"] == pytest.approx(last["heldout/accuracy"])
    assert measured["reward"] == (pytest.approx(last["heldout/reward"]) if name == "game_run" else None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_embedded_tool_task_is_learned(cluster: None, tmp_path: Path, seed: int) -> None:
    config = Path(__file__).parents[3] / "jobs" / "configs" / "multiply-tool.yaml"
    summary = run.train(load_config(config, [f"run.storage_path={tmp_path}", f"run.seed={seed}"]))
    assert summary.heldout_before is not None and summary.heldout_before <= 0.3
    assert summary.heldout_after is not None and summary.heldout_after >= 0.9
