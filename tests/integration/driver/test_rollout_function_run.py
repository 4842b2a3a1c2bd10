"""Runs with a rollout function: the invariants hold, and a function of one turn trains what a run without one does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import (
    REFERENCE,
    FinishedRun,
    assert_near,
    groups_of,
    rows_of,
    same_weights,
    small_settings,
    sorted_groups,
    weights_of,
    without_timings,
)

from grpo_ray.config.loader import load_config
from grpo_ray.data.stream import open_splits
from grpo_ray.driver import run
from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.evaluation.evaluate import evaluate
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.records.conversation_columns import COLUMNS

ONE_TURN = "rollout.function=grpo_ray.inference.rollout_examples:one_turn"
RETRYING = [
    *REFERENCE,
    "rollout.function=rollout_functions:retrying",
    "rewards.functions=[environment, correctness, 'rollout_functions:pay_requests', 'reward_spies:vary']",
    "grpo.max_completion_length=96",
    "grpo.vllm_importance_sampling_mode=token_truncate",
]
"""Up to three turns, depending on the problem, so that workers differ in their requests."""


@pytest.fixture(scope="module")
def retrying_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers with a function of several turns."""
    folder = tmp_path_factory.mktemp("function")
    config = load_config(None, [*small_settings("two", folder, policy), *RETRYING])
    return FinishedRun(run.train(config), folder / "two")


def ledgers_of(folder: Path) -> dict[str, bytes]:
    """Return the files of the ledger in all checkpoints."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*ledger*") if path.is_file()}


@pytest.mark.slow
def test_function_of_one_turn_trains_what_a_run_without_function_does(
    small_run: Callable[..., Any], reference_run: FinishedRun
) -> None:
    """Compare completions, token records, ledger, metrics, held-out measures and weights, bit for bit."""
    summary, folder = small_run("reference", *REFERENCE, ONE_TURN)
    ours, expected = groups_of(folder), groups_of(reference_run.folder)
    assert len(ours) == len(expected) > 0
    for group, other in zip(ours, expected, strict=True):
        assert group["turns"] == [1] * 4 and set(group["ended"]) <= {"stop", "length"}
        assert same_but_conversations(group) == same_but_conversations(other)
    assert same_weights(weights_of(summary.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))
    assert ledgers_of(folder) == ledgers_of(reference_run.folder) != {}
    assert [no_rollout(row) for row in without_timings(rows_of(folder))] == [
        no_rollout(row) for row in without_timings(rows_of(reference_run.folder))
    ]
    assert summary.heldout_after == reference_run.summary.heldout_after


def same_but_conversations(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without the columns that only conversations have."""
    return {name: value for name, value in group.items() if name not in (*COLUMNS, "result_tokens")}


def no_rollout(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without those that only conversations have."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith("rollout/") and not name.startswith("engine/logprob_gap_first")
    }


def test_run_with_a_function_proves_each_sync_and_records_the_messages(retrying_run: FinishedRun) -> None:
    rows = rows_of(retrying_run.folder)
    assert len(rows) == 5 and all(row["engine/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["engine/ratio_mean"] == pytest.approx(1, abs=1e-3) for row in rows)
    later = [row["engine/logprob_gap_later_turns"] for row in rows if "engine/logprob_gap_later_turns" in row]
    assert later and max(later) < 1e-4  # the learner reads others' tokens as the engine has read them
    assert sum(row["rollout/turns_mean"] for row in rows) > 5 and all(row["rollout/turns_max"] <= 3 for row in rows)
    assert sum(row["rollout/result_token_share"] for row in rows) > 0.01
    assert all(0 <= row["reward/environment_mean"] <= 1 for row in rows)
    groups = groups_of(retrying_run.folder)
    shown = [messages for group in groups for messages in group["messages"] or ()]
    assert any([each["role"] for each in messages[:2]] == ["assistant", "user"] for messages in shown)
    assert {each["content"] for messages in shown for each in messages if each["role"] == "user"} == {"Again."}
    requests = [turns for group in groups for turns in group["turns"]]
    assert {1, 2} <= set(requests)
    assert json.loads((retrying_run.folder / "heldout_before.json").read_text())["problems"] == 24


@pytest.mark.slow
def test_engine_of_its_own_measures_with_the_function_what_the_workers_do(
    retrying_run: FinishedRun, policy: Path, tmp_path: Path
) -> None:
    config = load_config(None, [*small_settings("eval", tmp_path, policy), *RETRYING])
    result = evaluate(config, retrying_run.summary.latest_checkpoint, open_splits(config)[1])["heldout"]
    last = [row for row in rows_of(retrying_run.folder) if "heldout/accuracy" in row][-1]
    assert (result.pass_at_1.value, result.reward) == (last["heldout/accuracy"], last["heldout/reward"])


@pytest.mark.slow
def test_run_of_one_worker_takes_the_same_steps_with_a_function(
    small_run: Callable[..., Any], retrying_run: FinishedRun
) -> None:
    one, folder = small_run("one", *RETRYING, "cluster.num_workers=1")
    assert sorted_groups(folder) == sorted_groups(retrying_run.folder)
    assert_near(weights_of(one.latest_checkpoint), weights_of(retrying_run.summary.latest_checkpoint))


@pytest.mark.slow
def test_killed_run_with_a_function_ends_with_the_same_weights(
    small_run: Callable[..., Any], retrying_run: FinishedRun
) -> None:
    killed, folder = small_run("killed", *RETRYING, faults=[Fault("kill-backward", step=3, rank=1)])
    assert groups_of(folder) == groups_of(retrying_run.folder)
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(retrying_run.summary.latest_checkpoint))


PROGRAMS = [each.replace("rollout_functions:retrying", "rollout_functions:retrying_programs") for each in RETRYING]
"""The same by programs that sample through the endpoint of the engine."""


def assert_same_run(summary: Any, folder: Path, expected: FinishedRun) -> None:
    """Assert that runs are equal, bit for bit: completions, ledger, metrics, held-out measures and weights."""
    assert groups_of(folder) == groups_of(expected.folder) != []
    assert ledgers_of(folder) == ledgers_of(expected.folder) != {}
    assert without_timings(rows_of(folder)) == without_timings(rows_of(expected.folder))
    assert summary.heldout_after == expected.summary.heldout_after
    assert same_weights(weights_of(summary.latest_checkpoint), weights_of(expected.summary.latest_checkpoint))


@pytest.mark.slow
def test_programs_at_the_endpoint_train_what_the_function_does(
    small_run: Callable[..., Any], retrying_run: FinishedRun
) -> None:
    assert PROGRAMS != RETRYING
    summary, folder = small_run("two", *PROGRAMS)
    assert_same_run(summary, folder, retrying_run)


@pytest.mark.slow
def test_killed_run_with_programs_ends_with_the_same_weights(
    small_run: Callable[..., Any], retrying_run: FinishedRun
) -> None:
    killed, folder = small_run("killed", *PROGRAMS, faults=[Fault("kill-backward", step=3, rank=1)])
    assert groups_of(folder) == groups_of(retrying_run.folder)
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(retrying_run.summary.latest_checkpoint))


@pytest.mark.slow
def test_run_of_one_worker_takes_the_same_steps_with_programs(
    small_run: Callable[..., Any], retrying_run: FinishedRun
) -> None:
    one, folder = small_run("one", *PROGRAMS, "cluster.num_workers=1", "rollout.max_active=5")
    assert sorted_groups(folder) == sorted_groups(retrying_run.folder)
    assert_near(weights_of(one.latest_checkpoint), weights_of(retrying_run.summary.latest_checkpoint))


OPTIONS = {
    "dynamic sampling": ["grpo.dynamic_sampling=1"],
    "one engine of two workers": ["grpo.vllm_tensor_parallel_size=2"],
    "filters and samples": ["grpo.top_p=0.95", "grpo.top_k=20", "heldout.num_samples=2", "heldout.temperature=0.7"],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_go_with_a_function(small_run: Callable[..., Any], options: list[str]) -> None:
    """Kill a run with each option: it ends like one that is not killed, with the sync proven at each step."""
    whole, folder = small_run("whole", *RETRYING, *options)
    killed, killed_folder = small_run("killed", *RETRYING, *options, faults=[Fault("kill-backward", step=3, rank=1)])
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in rows_of(folder) if "engine/logprob_gap_max" in row)
    assert groups_of(killed_folder) == groups_of(folder)
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.latest_checkpoint))


@pytest.mark.slow
def test_trajectory_that_cannot_be_trained_on_ends_the_run_at_once(small_run: Callable[..., Any]) -> None:
    spoilt = "rollout_functions:spoilt_in_training"
    settings = [f"rollout.function={spoilt}", f"rollout.settings={{'{spoilt}': {{how: mask too short}}}}"]
    where = (
        r"RolloutError: rollout\.function: rollout_functions:spoilt_in_training, row 7 \(problem .*, completion 3\): "
    )
    with pytest.raises(TrainingError, match=where + r"mask has \d+ entries for \d+ tokens") as caught:
        small_run("spoilt", *settings, "run.max_failures=9")
    assert len(str(caught.value).splitlines()) == 2


def test_function_that_cannot_be_used_is_refused_before_workers_start(small_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.function: .*has no 'one_trun'; did you mean one_turn"):
        small_run("refused", ONE_TURN.replace("one_turn", "one_trun"))
