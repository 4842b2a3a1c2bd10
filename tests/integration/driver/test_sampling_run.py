"""Runs with filters, penalties, stop strings, forms and held-out samples: the invariants hold as without them."""

import json
import re
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
)

from grpo_ray.config.loader import load_config
from grpo_ray.driver import run
from grpo_ray.resilience.chaos import Fault

SAMPLED = [
    *REFERENCE,
    "grpo.temperature=0.9",
    "grpo.top_p=0.95",
    "grpo.top_k=8",
    "grpo.generation_kwargs={repetition_penalty: 1.05, stop: ['9']}",
    "grpo.vllm_importance_sampling_mode=token_truncate",
    "heldout.temperature=0.7",
    "heldout.num_samples=2",
]

pytestmark = pytest.mark.slow


def two_workers(policy: Path, folder: Path, settings: list[str]) -> FinishedRun:
    return FinishedRun(
        run.train(load_config(None, [*small_settings("two", folder, policy), *settings])), folder / "two"
    )


@pytest.fixture(scope="module")
def sampled_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers."""
    return two_workers(policy, tmp_path_factory.mktemp("sampled"), SAMPLED)


def test_sampled_run_proves_each_sync(sampled_run: FinishedRun) -> None:
    rows = rows_of(sampled_run.folder)
    assert len(rows) == 5 and all(row["engine/logprob_gap_max"] < 1e-4 for row in rows[:-1])  # the last samples nothing
    # The ratio is the probability that the filters kept: of a sampled token mostly below 1.
    assert all(row["engine/ratio_mean"] < 0.999 for row in rows)


def test_sampled_run_measures_several_samples(sampled_run: FinishedRun) -> None:
    baseline = json.loads((sampled_run.folder / "heldout_before.json").read_text())
    assert (baseline["num_samples"], baseline["problems"]) == (2, 24)


FORM = r"[0-9+\-*= ]*\\boxed\{-?[0-9]{1,4}\}"
FORMED = [
    *REFERENCE,
    f"rollout.structured_outputs={json.dumps({'regex': FORM})}",
    "grpo.temperature=0.9",
    "grpo.beta=0.01",
    "rollout.max_staleness=1",
]


@pytest.fixture(scope="module")
def formed_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An undisturbed run of two workers whose completions have a form."""
    return two_workers(policy, tmp_path_factory.mktemp("formed"), FORMED)


def test_formed_run_is_trained_among_the_allowed_tokens(formed_run: FinishedRun) -> None:
    rows = rows_of(formed_run.folder)
    assert len(rows) == 5 and all(row["engine/logprob_gap_max"] < 1e-4 for row in rows[:-1])  # the last samples nothing
    assert all(row["learner/gradient_norm"] > 0 for row in rows)
    # With filters the ratio would be the probability that they kept; here the policy moves by a step in between.
    assert all(abs(row["engine/ratio_mean"] - 1) < 0.05 for row in rows)
    shown = [text for group in groups_of(formed_run.folder) for text in group["completions"] or ()]
    ended = [text for text in shown if text.endswith("}")]
    assert ended and all(re.fullmatch(FORM, text) for text in ended)


RUNS = {"sampled": SAMPLED, "formed": FORMED}


@pytest.mark.parametrize("name", RUNS)
def test_run_of_one_worker_takes_the_same_steps(
    small_run: Callable[..., Any], request: pytest.FixtureRequest, name: str
) -> None:
    whole: FinishedRun = request.getfixturevalue(f"{name}_run")
    one, folder = small_run("one-worker", *RUNS[name], "cluster.num_workers=1")
    assert sorted_groups(folder) == sorted_groups(whole.folder)
    assert_near(weights_of(one.latest_checkpoint), weights_of(whole.summary.latest_checkpoint))


@pytest.mark.parametrize("name", RUNS)
def test_killed_run_ends_with_the_same_weights(
    small_run: Callable[..., Any], request: pytest.FixtureRequest, name: str
) -> None:
    whole: FinishedRun = request.getfixturevalue(f"{name}_run")
    killed, folder = small_run("killed", *RUNS[name], faults=[Fault("kill-backward", step=3, rank=1)])
    assert groups_of(folder) == groups_of(whole.folder)
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.summary.latest_checkpoint))
