"""Tests of the comparison of a run with its fork: rewards on the same problems, held-out tests, first difference."""

import math
from pathlib import Path
from typing import Any

import pytest
from page_samples import CONFIG, make_group, write_run

from grpo_ray.experiments.run_comparison import RunComparison, compare_runs, is_of_latest_launch, read_contents
from grpo_ray.experiments.tables import print_comparison
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.heldout_files import HeldoutRecord, write_heldout
from grpo_ray.storage.records.rollout_files import write_rollouts

A, B, C = ("a" * 16, "b" * 16, "c" * 16)


def write(folder: Path, name: str, files: list[list[GroupRecord]], norms: dict[int, float], **kwargs: Any) -> Any:
    metrics = [{"step": step, "learner/gradient_norm": norm} for step, norm in norms.items()]
    run = write_run(folder, name, metrics=metrics, groups=files[0], **kwargs)
    for groups in files[1:]:
        write_rollouts(run, groups)
    return run


def compare(original: Any, fork: Any, at: int = 1) -> RunComparison:
    return compare_runs(read_contents(str(original.local)), read_contents(str(fork.local)), at)


def test_runs_are_compared_on_the_problems_of_each_step_that_both_took(tmp_path: Path) -> None:
    first = [make_group(1, A, (0.0, 1.0))]
    original = write(
        tmp_path, "run",
        [first, [make_group(2, A, (0.0, 1.0)), make_group(2, B, (1.0, 1.0))], [make_group(3, C, (0.0,))],
         [make_group(4, A, (0.0,))]],
        {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5},
    )  # fmt: skip
    fork = write(
        tmp_path, "fork",
        [first, [make_group(2, A, (0.0, 1.0)), make_group(2, B, (1.0, 0.0))], [make_group(3, B, (1.0,))]],
        {1: 0.5, 2: 0.5, 3: 0.5},
    )  # fmt: skip
    compared = compare(original, fork)
    assert (compared.at, compared.last) == (1, 3)
    assert [(each.step, each.problems) for each in compared.rewards] == [(2, 2), (3, 0)]
    # Step 2: problems have the means 0.5 and 1, then 0.5 and 0.5.
    assert (compared.rewards[0].original, compared.rewards[0].fork) == (0.75, 0.5)
    assert compared.rewards[1].original is None and compared.reward_difference == -0.25
    found = compared.first_difference
    assert found is not None and (found.step, found.quantity) == (2, "reward")
    assert compared.to_dict()["reward_difference"] == -0.25


def test_difference_of_the_gradient_in_a_step_without_groups_is_found(tmp_path: Path) -> None:
    groups = [[make_group(1, A, (0.0,))], [make_group(2, B, (1.0,))]]
    original = write(tmp_path, "run", groups, {1: 0.5, 2: 0.5, 3: 0.5})
    fork = write(tmp_path, "fork", groups, {1: 0.5, 2: 0.5, 3: 0.25})
    found = compare(original, fork).first_difference
    assert found is not None and (found.step, found.quantity) == (3, "gradient")
    assert compare(original, original).first_difference is None


def test_groups_that_one_run_has_not_written_yet_are_no_difference(tmp_path: Path) -> None:
    """A run writes its metrics at each step, and its groups at its checkpoints."""
    groups = [[make_group(1, A, (0.0,))], [make_group(2, B, (1.0,))], [make_group(3, C, (1.0,))]]
    original = write(tmp_path, "run", groups, {1: 0.5, 2: 0.5, 3: 0.5})
    killed = write(tmp_path, "killed", groups[:2], {1: 0.5, 2: 0.5, 3: 0.5})
    for pair in ((original, killed), (killed, original)):
        compared = compare(*pair)
        assert (compared.last, compared.first_difference) == (3, None)
        assert [each.step for each in compared.rewards] == [2]
    other = write(tmp_path, "other", groups[:2], {1: 0.5, 2: 0.5, 3: 0.25})
    found = compare(original, other).first_difference
    assert found is not None and (found.step, found.quantity) == (3, "gradient")


@pytest.mark.parametrize(
    "changed", [{"rewards": {"functions": ["correctness"]}}, {"grpo": {"reward_weights": [1.0, 0.5]}}]
)
def test_other_rewards_have_no_mean_difference(
    tmp_path: Path, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [[make_group(1, A, (0.0,))], [make_group(2, A, (1.0,))]]
    original = write(tmp_path, "run", groups, {1: 0.5, 2: 0.5})
    assert compare(original, original).reward_difference == 0.0
    fork = write(tmp_path, "fork", [groups[0], [make_group(2, A, (0.0,))]], {1: 0.5, 2: 0.5}, config=CONFIG | changed)
    compared = compare(original, fork)
    assert (compared.reward_difference, compared.to_dict()["reward_difference"]) == (None, None)
    print_comparison(compared)
    text = capsys.readouterr().out
    assert (
        "the fork computes other rewards than the run" in text and "mean difference" not in text and "-1.0" not in text
    )


def test_rewards_of_a_source_are_compared_where_both_runs_have_it(tmp_path: Path) -> None:
    groups = [[make_group(1, A, (0.0,))], [make_group(2, A, (1.0,))]]

    def run(name: str, **sources: Any) -> Any:
        train = {source: {"path": "x.jsonl", "rewards": rewards} for source, rewards in sources.items()}
        return write(tmp_path, name, groups, {1: 0.5, 2: 0.5}, config=CONFIG | {"data": {"train": train}})

    original = run("run", math=None)
    assert compare(original, run("more", math=None, code=["code_tests"])).reward_difference == 0.0
    assert compare(original, run("other", math=["correctness"])).reward_difference is None


BEGAN = [("launched", None), ("began", 0), ("ended", None), ("launched", None), ("began", 2), ("began", 4)]


@pytest.mark.parametrize(
    ("events", "of_latest"),
    [
        (BEGAN, [False, False, True]),
        (BEGAN[:3], [True] * 3),
        (BEGAN[:4], [False] * 3),
        ([], [True] * 3),
        ([("launched", None), ("began", 2)], [False, False, True]),
        (BEGAN[:1], [True] * 3),
    ],
    ids=["continued", "one launch", "launch without a step", "no events", "fork", "first launch without a step"],
)
def test_step_of_an_earlier_launch_is_noted(
    tmp_path: Path, events: list[tuple[str, int | None]], of_latest: list[bool]
) -> None:
    rows = [
        {"event": kind, "at": 1.0} | ({} if step is None else {"step": step, "workers": 2}) for kind, step in events
    ]
    groups = [[make_group(1, A, (0.0,))], [make_group(2, A, (1.0,))]]
    run = write(tmp_path, "run", groups, {1: 0.5, 2: 0.5}, events=rows)
    contents = read_contents(str(run.local))
    assert [is_of_latest_launch(contents, step) for step in (1, 2, 3)] == of_latest
    notes = compare(run, run).notes
    assert len(notes) == (not of_latest[1])
    assert all(each.startswith("step 2 of the run was taken by an earlier launch") for each in notes)


def test_groups_without_known_rewards_are_left_out(tmp_path: Path) -> None:
    groups = [[make_group(1, A, (0.0,))], [make_group(2, A, (math.nan,)), make_group(2, B, (math.nan, 1.0))]]
    run = write(tmp_path, "run", groups, {1: 0.5, 2: 0.5})
    compared = compare(run, run)
    assert [(each.problems, each.original) for each in compared.rewards] == [(1, 1.0)]
    assert compared.first_difference is None  # unknown numbers are equal


def test_heldout_sets_measured_alike_have_a_paired_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [[make_group(1, A, (0.0,))]]
    original, fork = (write(tmp_path, name, groups, {1: 0.5, 2: 0.5, 3: 0.5}) for name in ("run", "fork"))
    verdicts = {"run": [0.0] * 6 + [1.0], "fork": [1.0] * 6 + [1.0]}
    for folder in (original, fork):
        all_conditions: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {"seed": folder.name}}
        for step, conditions in all_conditions.items():
            records = [
                HeldoutRecord(problem=f"{number:016x}", correct=(verdict,), lengths=(1,), truncated=(False,))
                for number, verdict in enumerate(verdicts[folder.name])
            ]
            write_heldout(folder, "heldout", step, records, policy="", conditions=conditions)
    compared = compare(original, fork)
    (measured,) = compared.heldout  # step 1 is before the fork, and step 3 was measured under other conditions
    assert (measured.key, measured.step, measured.result.better) == ("heldout", 2, 6)
    assert measured.result.p_value == 2 / 2**6  # six of six problems, in either direction
    print_comparison(compared)
    text = capsys.readouterr().out
    assert "0.031" in text and "steps 2 to 3 are equal, bit for bit" in text


def test_runs_without_a_common_step_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, "run", [[make_group(1, A, (0.0,))]], {1: 0.5})
    compared = compare(run, run)
    assert compared.rewards == [] and compared.reward_difference is None
    print_comparison(compared)
    assert "there is no step that both have taken" in capsys.readouterr().out
