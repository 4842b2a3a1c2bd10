"""Runs on a mixture: the same steps for any number of workers, exact after kills, and other sources when resumed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import FinishedRun, events_of, rows_of, same_weights, weights_of

from grpo_ray.config.loader import load_config
from grpo_ray.driver.preflight.audit import audit
from grpo_ray.errors import ConfigError
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.records.rollout_files import read_rollouts
from grpo_ray.storage.run_folder import RunFolder

HELDOUT = ("data.heldout_share=0.3", "data.heldout_limit=4")  # holds out one of the four words
STEPS = ("grpo.max_steps=6", "grpo.save_steps=2", "run.max_failures=9", *HELDOUT)
REWARDS = "rewards.functions=[correctness, 'reward_spies:vary']"
"""The second reward depends on every token, so that equal rewards imply equal completions."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of four problems without solutions; one of them is held out."""
    path = tmp_path_factory.mktemp("words") / "words.jsonl"
    rows = [{"prompt": f"Say {word}.", "level": 1} for word in ("one", "two", "three", "four")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixture(words: Path, weight: int = 1, **others: Any) -> str:
    """Return the override of a mixture in which arithmetic has three quarters of the problems."""
    sources = {
        "sums": {"path": "arithmetic", "weight": 3, "limit": 10},
        "words": {"path": str(words), "weight": weight, "rewards": ["reward_spies:vary"]},
    }
    return f"data.train={json.dumps(sources | others)}"


@pytest.fixture(scope="module")
def whole(words: Path, module_run: Callable[..., Any]) -> FinishedRun:
    """An undisturbed run of two workers."""
    return FinishedRun(*module_run("whole", mixture(words), REWARDS, *STEPS))


def groups_of(folder: Path) -> dict[int, list[tuple[int, str]]]:
    """Return step -> sorted epoch and problem of its groups."""
    table = read_rollouts(RunFolder(str(folder.parent), folder.name), limit=None)
    steps: dict[int, list[tuple[int, str]]] = {}
    for row in table.select(["step", "epoch", "problem"]).to_pylist():
        steps.setdefault(row["step"], []).append((row["epoch"], row["problem"]))
    return {step: sorted(groups) for step, groups in steps.items()}


def test_each_step_has_the_shares_and_each_source_its_epochs(whole: FinishedRun) -> None:
    rows = [row for row in rows_of(whole.folder) if "reward/mean" in row]
    assert [row["source/sums/problems_share"] for row in rows] == [0.75] * 6
    assert [row["source/words/problems_share"] for row in rows] == [0.25] * 6
    # 10 problems at 3 a step, and 3 at 1 a step
    assert [row["source/sums/epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["source/words/epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    used = Counter(group for groups in groups_of(whole.folder).values() for group in groups)
    assert set(used.values()) == {1} and len(used) == 24
    recorded = read_rollouts(RunFolder(str(whole.folder.parent), whole.folder.name))
    assert Counter(zip(recorded["step"].to_pylist(), recorded["source"].to_pylist(), strict=True)) == {
        (step, name): groups for step in range(1, 7) for name, groups in (("sums", 3), ("words", 1))
    }
    for row in rows:
        parts = [row[f"source/{name}/reward_mean"] * row[f"source/{name}/problems_share"] for name in ("sums", "words")]
        assert sum(parts) == pytest.approx(row["reward/mean"], rel=1e-5)
        assert "source/words/correctness_mean" not in row
        assert row["source/sums/correctness_mean"] == pytest.approx(row["reward/correctness_mean"], rel=1e-5)


def test_sources_are_measured_apart_by_their_own_rewards(whole: FinishedRun) -> None:
    heldout = whole.summary.heldout
    assert list(heldout) == ["heldout/sums", "heldout/words"]
    last = rows_of(whole.folder)[-1]
    assert last["heldout/accuracy"] == last["heldout/sums/accuracy"]
    assert 0 <= last["heldout/sums/accuracy"] <= 1 and "heldout/words/accuracy" in last
    baselines = [json.loads((whole.folder / f"heldout_{name}_before.json").read_text()) for name in ("sums", "words")]
    assert [each["measured_on"]["score"] for each in baselines] == ["correctness", "reward"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill-backward", "kill-generation"])
def test_killed_run_ends_with_the_same_bits(
    kind: str, whole: FinishedRun, words: Path, small_run: Callable[..., Any]
) -> None:
    killed, folder = small_run("killed", mixture(words), REWARDS, *STEPS, faults=[Fault(kind, step=4)])
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert groups_of(folder) == groups_of(whole.folder)
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.summary.latest_checkpoint))
    checkpoints = [Path(each.latest_checkpoint) for each in (killed, whole.summary)]
    for name in ("ledger-sums.npz", "ledger-words.npz", "mixture.json"):
        first, second = ((path / name).read_bytes() for path in checkpoints)
        assert first == second, name


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_number_of_workers_changes_no_step(
    workers: int, whole: FinishedRun, words: Path, small_run: Callable[..., Any]
) -> None:
    _, folder = small_run("other", mixture(words), REWARDS, *STEPS, f"cluster.num_workers={workers}")
    assert groups_of(folder) == groups_of(whole.folder)
    names = [name for name in rows_of(whole.folder)[0] if name.startswith("source/") and "share" in name]
    for own, row in zip(rows_of(folder), rows_of(whole.folder), strict=True):
        assert [own.get(name) for name in names] == [row.get(name) for name in names]


@pytest.mark.slow  # random histories change weights and sources too, without an engine
def test_resumed_run_takes_other_weights_and_sources(words: Path, small_run: Callable[..., Any]) -> None:
    options = [REWARDS, "grpo.save_steps=2", *HELDOUT]
    _, folder = small_run("grows", mixture(words), *options, "grpo.max_steps=2")
    # equal weights: from the next step on, half of the problems
    small_run("grows", mixture(words, weight=3), *options, "grpo.max_steps=4")
    more = {"games": {"path": "multiplication", "weight": 6, "rewards": ["reward_spies:vary"]}}
    with pytest.raises(ConfigError, match=r"data.train=sums \+ words \+ games has changed .* data.accept_changes=true"):
        small_run("grows", mixture(words, weight=3, **more), *options, "grpo.max_steps=6")
    accepted = "data.accept_changes=true"
    small_run("grows", mixture(words, weight=3, **more), *options, "grpo.max_steps=6", accepted)
    # without it again, its ledger is kept
    summary, _ = small_run("grows", mixture(words, weight=3), *options, "grpo.max_steps=8", accepted)
    rows = [row for row in rows_of(folder) if "reward/mean" in row]
    shares = [[row.get(f"source/{name}/problems_share", 0) for name in ("sums", "words", "games")] for row in rows]
    assert shares == [[0.75, 0.25, 0]] * 2 + [[0.5, 0.5, 0]] * 2 + [[0.25, 0.25, 0.5]] * 2 + [[0.5, 0.5, 0]] * 2
    used = Counter(group for groups in groups_of(folder).values() for group in groups)
    assert set(used.values()) == {1} and len(used) == 32
    assert Path(summary.latest_checkpoint, "ledger-games.npz").exists()


@pytest.mark.slow
def test_audit_reports_each_source(cluster: None, words: Path, policy: Path) -> None:
    report = audit(load_config(None, [f"model.path={policy}", mixture(words), REWARDS, *HELDOUT]))
    assert {name: each.problems for name, each in report.sources.items()} == {"sums": 10, "words": 3}
    assert report.sources["sums"].verified == 10 and report.sources["words"].verified == 0
    assert list(report.to_dict())[:2] == ["sources", "heldout"] and list(report.heldout) == [
        "heldout/sums",
        "heldout/words",
    ]
    assert [run.reward for run in report.rewards] == ["correctness", "reward_spies:vary"]


@pytest.mark.slow
def test_one_source_plays_in_an_environment_and_the_other_does_not(small_run: Callable[..., Any]) -> None:
    sources = {
        "games": {"path": "guessing", "environment": "game", "rewards": ["environment"]},
        "sums": {"path": "arithmetic", "rewards": ["correctness"]},
    }
    summary, folder = small_run(
        "both",
        f"data.train={json.dumps(sources)}",
        f"model.path={embedded_policy('tiny-guess')}",
        "rewards.functions=[environment, correctness]",
        "rollout.environment={game: 'grpo_ray.tools.examples:Guess'}",
        "grpo.max_steps=2",
        "grpo.max_completion_length=160",
        "grpo.vllm_importance_sampling_mode=token_truncate",
        "data.heldout_limit=4",
    )
    rows = [row for row in rows_of(folder) if "reward/mean" in row]
    assert [row["source/games/problems_share"] for row in rows] == [0.5, 0.5]
    assert all("source/games/environment_mean" in row and "source/sums/correctness_mean" in row for row in rows)
    assert all("source/sums/environment_mean" not in row for row in rows)
    assert rows[-1]["rollout/lost_share"] == 0
    assert list(summary.heldout) == ["heldout/games", "heldout/sums"]
