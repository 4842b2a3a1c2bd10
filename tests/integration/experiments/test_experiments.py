"""Tests of forks and replays of real runs: the same bits without a change, and the effect of one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import FinishedRun, groups_of, rows_of, same_weights, weights_of, without_timings

from grpo_ray.cli import FOUND, main
from grpo_ray.data.ledger import Ledger
from grpo_ray.errors import ConfigError
from grpo_ray.experiments.fork import fork
from grpo_ray.experiments.replay import compare_step
from grpo_ray.experiments.run_comparison import read_contents
from grpo_ray.experiments.step_difference import QUANTITIES

LAST = "checkpoint-000005"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def first_kept(run: FinishedRun) -> int:
    """Return the step of the earliest checkpoint that the reference run still has."""
    return min(int(path.name[-6:]) for path in run.folder.glob("checkpoint-*"))


def test_fork_without_changes_equals_the_run_bit_for_bit(
    cluster: None, reference_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(reference_run.folder)
    step, written = first_kept(reference_run), tmp_path / "comparison.json"
    command = ["fork", str(reference_run.folder), "--at", str(step), f"run.storage_path={tmp_path}"]
    assert main(command) == 2  # the reward of the tests is code that the run folder names
    assert "--trust-settings" in capsys.readouterr().err
    assert main([*command, "--trust-settings", "--json", str(written)]) == 0
    folder = tmp_path / f"reference-fork-{step}"
    assert contents(reference_run.folder) == before
    assert same_weights(weights_of(folder / LAST), weights_of(reference_run.folder / LAST))
    assert Ledger.load(folder / LAST) == Ledger.load(reference_run.folder / LAST)
    assert groups_of(folder) == groups_of(reference_run.folder)
    assert without_timings(rows_of(folder)) == without_timings(rows_of(reference_run.folder))
    assert json.loads((folder / "fork.json").read_text())["step"] == step
    comparison = json.loads(written.read_text())
    assert comparison["first_difference"] is None and comparison["reward_difference"] == 0.0
    assert [each["step"] for each in comparison["rewards"]] == list(range(step + 1, 6))
    assert all(each["problems"] == 4 for each in comparison["rewards"])
    assert comparison["heldout"][-1]["result"]["p_value"] == 1.0
    assert f"steps {step + 1} to 5 are equal, bit for bit" in capsys.readouterr().out


@pytest.fixture(scope="module")
def replayed(cluster: None, reference_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Replay of the last step of the reference run, whose folder is kept: the outcome as JSON."""
    before = contents(reference_run.folder)
    storage = tmp_path_factory.mktemp("replay")
    command = ["replay", str(reference_run.folder), "--step", "5", "--trust-settings", "--keep"]
    assert main([*command, "--json", str(storage / "outcome.json"), f"run.storage_path={storage}"]) == 0
    assert contents(reference_run.folder) == before
    outcome: dict[str, Any] = json.loads((storage / "outcome.json").read_text())
    return outcome


def test_replay_of_an_untouched_run_is_equal(replayed: dict[str, Any]) -> None:
    assert replayed["is_equal"] and replayed["changed_versions"] == {}
    assert replayed["comparison"]["outcomes"] == dict.fromkeys(QUANTITIES, "equal")


def edit_groups(change: Callable[[dict[str, Any]], None], *, only_sample: bool = False) -> Callable[[Path], None]:
    """Return a function that changes one group of step 5 in the record of a run."""

    def edit(folder: Path) -> None:
        path = folder / "rollouts" / "steps-00000005-00000005.parquet"
        table = pq.read_table(path)
        rows = table.to_pylist()
        change(next(row for row in rows if not only_sample or row["prompt"] is not None))
        pq.write_table(pa.Table.from_pylist(rows, table.schema), path, compression="zstd")

    return edit


def edit_gradient(folder: Path) -> None:
    rows = rows_of(folder)
    rows[-1]["learner/gradient_norm"] *= 1 + 2**-52  # the next number
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_weights(folder: Path) -> None:
    path = folder / LAST / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))


def add_to(name: str, amount: float) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        row[name][1] += amount

    return change


PLANTED: dict[str, Callable[[Path], None]] = {
    "problem": edit_groups(lambda row: row.update(problem="f" * 16)),
    "prompt": edit_groups(lambda row: row.update(prompt=row["prompt"] + " "), only_sample=True),
    "tokens": edit_groups(add_to("lengths", 1)),
    "reward": edit_groups(add_to("rewards", 2**-10)),
    "advantage": edit_groups(add_to("advantages", 2**-10), only_sample=True),
    "gradient": edit_gradient,
    "weights": edit_weights,
}
"""Quantity -> function that plants a difference in it into the record of a run."""
assert tuple(PLANTED) == QUANTITIES


@pytest.mark.parametrize("quantity", PLANTED)
def test_replay_finds_a_planted_difference_in_each_quantity(
    quantity: str, replayed: dict[str, Any], reference_run: FinishedRun, tmp_path: Path
) -> None:
    planted = tmp_path / "run"
    shutil.copytree(reference_run.folder, planted)
    PLANTED[quantity](planted)
    found = compare_step(read_contents(str(planted)), read_contents(replayed["folder"]), 5, 5).first
    assert found is not None and (found.step, found.quantity) == (5, quantity)


def test_fork_refuses_what_cannot_change(cluster: None, reference_run: FinishedRun, tmp_path: Path) -> None:
    folder, step, storage = str(reference_run.folder), first_kept(reference_run), f"run.storage_path={tmp_path}"
    with pytest.raises(ConfigError, match=r"grpo\.num_generations=8 differs from 4, the value of the run .* in a fork"):
        fork(folder, step, [storage, "grpo.num_generations=8"], trusts_settings=True)
    with pytest.raises(ConfigError, match=r"run\.name=reference is the run itself"):
        fork(folder, step, ["run.name=reference"], trusts_settings=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fork_with_a_change_differs_from_its_first_step(
    cluster: None, reference_run: FinishedRun, tmp_path: Path
) -> None:
    step = first_kept(reference_run)
    changes = [f"run.storage_path={tmp_path}", "run.name=warm", "grpo.learning_rate=1e-3"]
    forked = fork(str(reference_run.folder), step, changes, trusts_settings=True)
    first = forked.comparison.first_difference
    assert first is not None and first.step in (step + 1, step + 2)
    assert first.quantity in ("tokens", "reward", "gradient", "weights")  # problems and prompts are the same
    again = fork(str(reference_run.folder), step, changes, trusts_settings=True)  # finished: compared again
    assert again.comparison.to_dict() == forked.comparison.to_dict()
    with pytest.raises(ConfigError, match="is another fork"):
        fork(str(reference_run.folder), step, [*changes[:2], "grpo.learning_rate=1e-2"], trusts_settings=True)


@pytest.mark.slow
def test_replay_of_a_run_whose_reward_has_changed_names_the_reward(
    small_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward changes after the run, and the first step is computed again from the start."""
    factor = tmp_path / "factor"
    factor.write_text("0.01")
    rewards = [
        "rewards.functions=['reward_spies:scaled']",
        f"rewards.settings={{'reward_spies:scaled': {{file: {factor}}}}}",
    ]
    _, folder = small_run("rewarded", "grpo.max_steps=2", *rewards)
    factor.write_text("0.02")
    assert main(["replay", str(folder), "--step", "1", "--trust-settings"]) == FOUND
    assert "differs first in its reward" in capsys.readouterr().out
    assert not (folder.parent / "rewarded-replay-1").exists()
