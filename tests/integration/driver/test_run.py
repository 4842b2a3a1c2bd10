"""Tests of whole runs with real components: Ray Train, vLLM, TRL and Ray Data on this machine's CPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import (
    REFERENCE,
    FinishedRun,
    assert_near,
    count_uses,
    events_of,
    groups_of,
    rows_of,
    same_weights,
    small_settings,
    sorted_groups,
    weights_of,
    without_timings,
)

from grpo_ray.cli import main
from grpo_ray.data.ledger import Ledger
from grpo_ray.errors import ConfigError, DataError, TrainingError
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.records.heldout_files import HeldoutFile, read_heldout, read_measurements
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.storage.records.tokens import importance_ratios
from grpo_ray.storage.run_folder import RunFolder

ROOT = Path(__file__).parents[3]

# The undisturbed run


@pytest.mark.main_path
def test_run_folder_holds_config_metrics_summary_and_logs(reference_run: FinishedRun) -> None:
    folder = reference_run.folder
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["grpo"]["max_steps"] == 5
    assert {"ray", "torch", "trl", "commit"} <= set(config["versions"])
    written = json.loads((folder / "summary.json").read_text())
    assert written["steps"] == 5
    assert written["completions_per_second"] > 0
    assert 0 < written["train_seconds"] < written["wall_seconds"]
    assert (folder / "logs" / "worker-0.log").exists() and (folder / "logs" / "worker-1.log").exists()
    for row in rows_of(folder):
        assert {"step", "reward/mean", "reward/correctness_mean", "engine/logprob_gap_mean"} <= set(row)
        assert row["engine/logprob_gap_mean"] < 1e-4
        assert 0 < row["group/distinct_share"] <= 1
    assert [event["step"] for event in events_of(folder, "step")] == [1, 2, 3, 4, 5]


@pytest.mark.slow  # sources of a mixture have held-out sets of their own, which its tests measure
def test_several_heldout_sets_are_measured_and_one_ranks(
    small_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ranks by its second set continues after its first one has changed."""
    path = tmp_path / "easy.jsonl"
    rows = [{"prompt": f"{n} + 1", "solution": str(n + 1)} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"data.heldout={{easy: {path}, sums: arithmetic}}", "run.best_metric=heldout/sums/low"]
    summary, folder = small_run("sets", "grpo.max_steps=2", *settings)
    measured = {row["step"]: row for row in rows_of(folder) if "checkpoint" in row}[2]
    assert measured["heldout/accuracy"] == measured["heldout/sums/accuracy"] == summary.heldout_after
    assert {"heldout/easy/low", "heldout/easy/truncated_share"} <= set(measured)
    counts = {key: heldout.problems for key, heldout in summary.heldout.items()}
    assert counts == {"heldout/easy": 6, "heldout/sums": 24}
    baseline = json.loads((folder / "heldout_sums_before.json").read_text())
    assert summary.heldout_before == baseline["pass_at_1"]["value"] and baseline["problems"] == 24
    assert "held-out accuracy before training: easy " in capsys.readouterr().out
    manifest = json.loads((folder / "checkpoint-000002" / "manifest.json").read_text())
    assert {key: each["count"] for key, each in manifest["measured_on"].items()} == counts

    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    again, _ = small_run("sets", "grpo.max_steps=4", *settings)
    assert again.heldout["heldout/easy"].problems == 4 and again.heldout["heldout/easy"].after
    assert again.heldout["heldout/sums"].before == summary.heldout["heldout/sums"].before
    output = capsys.readouterr().out
    # Only the changed set is measured again on the initial policy.
    assert "held-out accuracy before training: easy " in output and ", sums" not in output.split("resuming from")[0]
    assert json.loads((folder / "heldout_sums_before.json").read_text()) == baseline


@pytest.mark.main_path
def test_run_checkpoint_loads_with_transformers(reference_run: FinishedRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(reference_run.summary.best_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(reference_run.summary.best_checkpoint)
    assert tokenizer.chat_template and policy.config.model_type == "qwen2"


@pytest.mark.main_path
def test_run_baseline_is_measured_and_best_checkpoint_is_kept(reference_run: FinishedRun) -> None:
    folder, summary = reference_run.folder, reference_run.summary
    before = json.loads((folder / "heldout_before.json").read_text())
    assert before["problems"] == 24 and summary.heldout_before == before["pass_at_1"]["value"]
    accuracy = {row["step"]: row["heldout/accuracy"] for row in rows_of(folder) if "checkpoint" in row}
    assert list(accuracy) == [2, 4, 5]
    best = min(accuracy, key=lambda step: (-accuracy[step], step))  # the earliest of equal ones
    assert Path(summary.best_checkpoint).name == f"checkpoint-{best:06d}"
    assert summary.heldout_after == accuracy[best]
    kept = {path.name for path in folder.glob("checkpoint-*")}
    assert {Path(summary.best_checkpoint).name, "checkpoint-000005"} <= kept


@pytest.mark.main_path
def test_run_uses_every_problem_of_an_epoch_once(reference_run: FinishedRun) -> None:
    groups = groups_of(reference_run.folder)
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 6), 4)
    epochs = count_uses(groups)
    assert [len(epochs[epoch]) for epoch in range(2)] == [10, 10]  # 5 steps of 4 problems
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())


@pytest.mark.main_path
def test_run_phases_of_every_step_sum_to_its_seconds(reference_run: FinishedRun) -> None:
    rows = rows_of(reference_run.folder)
    for row in rows:
        phases = {name: value for name, value in row.items() if name.startswith("phase/")}
        assert all(phases[f"phase/{name}"] > 0 for name in ("wait", "generate", "score", "prepare"))
        assert phases["phase/forward_backward"] > 0 and phases["phase/optimizer"] > 0
        assert sum(phases.values()) == pytest.approx(row["step/seconds"])
        assert phases["phase/other"] < row["step/seconds"] / 2
        assert row["engine/tokens_per_second"] > 0 and row["learner/tokens_per_second"] > 0
        assert 0 < row["step/overhead_share"] < 1
        assert row["learner/tokens_saved"] >= 0
        assert (row["phase/measure"] > 0) == (row["phase/checkpoint"] > 0) == ("checkpoint" in row)
    # Measuring a policy syncs it, before training and at the end of a step with a checkpoint (2, 4 and 5), so the step
    # that follows only proves that the engine has its weights.
    assert all(row["phase/sync"] > 0 for row in rows)
    summary = json.loads((reference_run.folder / "summary.json").read_text())
    assert sum(summary["phase_seconds"].values()) == pytest.approx(summary["train_seconds"], abs=0.2)  # rounded


@pytest.mark.main_path
def test_run_trace_holds_the_events_of_both_workers(reference_run: FinishedRun) -> None:
    rows, traces = rows_of(reference_run.folder), reference_run.folder / "trace"
    assert {file.name for file in traces.iterdir()} == {f"worker-{rank}-from-step-0.json" for rank in (0, 1)}
    for rank in (0, 1):
        events = json.loads((traces / f"worker-{rank}-from-step-0.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        drawn = [event for event in events if event["ph"] == "X"]
        assert all(event["dur"] > 0 and event["ts"] > 1.7e15 for event in drawn)  # microseconds since 1970
        assert {lanes[event["tid"]] for event in drawn} >= {"learner", "verdicts"}
        assert len([event for event in drawn if event["name"] == "generate"]) == len(rows)
        if rank == 0:  # the metrics of the run are those of worker 0
            first = min(event["ts"] for event in drawn if event["name"] == "wait")
            steps = [event for event in drawn if event["ts"] >= first]  # without the sync of the baseline
            for name in ("generate", "sync", "score", "optimizer"):  # no other phase is nested in these
                seconds = sum(event["dur"] for event in steps if event["name"] == name) / 1e6
                assert seconds == pytest.approx(sum(row[f"phase/{name}"] for row in rows), abs=1e-3)


@pytest.mark.main_path
def test_eval_several_samples_of_a_problem_differ(
    reference_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "evaluation.json"
    assert main(["eval", reference_run.summary.best_checkpoint, "--num-samples", "4", "--json", str(written)]) == 0
    found = json.loads(written.read_text())
    assert (found["problems"], found["num_samples"]) == (24, 4)
    # With identical samples, pass@1 would equal pass@4.
    assert found["pass_at_1"]["value"] < found["pass_at_k"]["value"] <= 1
    assert "pass@4" in capsys.readouterr().out


@pytest.mark.main_path
def test_report_of_a_real_run_makes_a_page(reference_run: FinishedRun, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(reference_run.folder), "--out", str(page)]) == 0
    assert "<svg" in page.read_text() and Path(reference_run.summary.best_checkpoint).name in page.read_text()


@pytest.mark.main_path
def test_run_heldout_records_agree_with_the_metrics(reference_run: FinishedRun) -> None:
    folder = RunFolder(str(reference_run.folder.parent), reference_run.folder.name)
    measured = {row["step"]: row for row in rows_of(reference_run.folder) if "checkpoint" in row}
    records = read_measurements(folder, "heldout")
    assert [(each.file.step, each.policy) for each in records] == [
        (0, ""), *((step, row["checkpoint"]) for step, row in measured.items()),
    ]  # fmt: skip
    baseline = json.loads((reference_run.folder / "heldout_before.json").read_text())["pass_at_1"]["value"]
    accuracies = [baseline, *(row["heldout/accuracy"] for row in measured.values())]
    assert [float(each.accuracy.mean()) for each in records] == pytest.approx(accuracies)
    first, last = (read_heldout(folder, each.file).to_pylist() for each in (records[0], records[-1]))
    assert [row["problem"] for row in first] == [row["problem"] for row in last] and len(first) == 24
    for row in last:
        assert row["prompt"] and row["solution"] and len(row["completions"]) == len(row["lengths"]) == 1


@pytest.mark.main_path
def test_run_samples_have_the_tokens_that_were_read(reference_run: FinishedRun) -> None:
    folder = RunFolder(str(reference_run.folder.parent), reference_run.folder.name)
    rows = read_steps(folder, samples_only=True, with_tokens=True).to_pylist()
    assert [row["step"] for row in rows if row["sample"] == "first"] == [1, 2, 3, 4, 5]
    read = 0
    for row in rows:
        assert row["sample"] == "first" or any(row["advantages"])
        for text, length, advantage, tokens in zip(
            row["completions"], row["lengths"], row["advantages"], row["tokens"], strict=True
        ):
            assert "".join(tokens["texts"]) == text and len(tokens["texts"]) == tokens["head"] == length
            if advantage:  # the gap is that of the proof of the sync
                assert importance_ratios(tokens) == pytest.approx([1.0] * length, abs=1e-3)
                read += 1
    assert read > 0


# Runs compared with it


@pytest.mark.main_path
def test_one_worker_takes_the_same_steps_as_two(small_run: Callable[..., Any], reference_run: FinishedRun) -> None:
    one, folder = small_run("one-worker", *REFERENCE, "cluster.num_workers=1")
    assert sorted_groups(folder) == sorted_groups(reference_run.folder)
    assert_near(weights_of(one.latest_checkpoint), weights_of(reference_run.summary.latest_checkpoint))


@pytest.mark.main_path
def test_killed_workers_lose_nothing(small_run: Callable[..., Any], reference_run: FinishedRun) -> None:
    faults = [
        Fault("kill-backward", step=3, rank=1),  # an epoch ends in this step
        Fault("kill-commit", step=5, rank=0),  # the last checkpoint: the next attempt has no step to take
    ]
    killed, folder = small_run("killed", *REFERENCE, faults=faults)
    assert all((folder / "chaos" / fault.marker).exists() for fault in faults), "a fault was not injected"
    assert len(events_of(folder, "failed")) == 2
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2, 5]
    assert not list(folder.glob("*.part"))
    latest, expected = (Path(summary.latest_checkpoint) for summary in (killed, reference_run.summary))
    assert same_weights(weights_of(latest), weights_of(expected))
    assert Ledger.load(latest) == Ledger.load(expected)
    assert without_timings(rows_of(folder)) == without_timings(rows_of(reference_run.folder))
    assert groups_of(folder) == groups_of(reference_run.folder)


@pytest.mark.main_path
def test_sharded_run_from_the_command_line_takes_the_same_steps(
    policy: Path, tmp_path: Path, reference_run: FinishedRun
) -> None:
    """Run the command as a user does, with its own Ray cluster."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    overrides = [*small_settings("sharded", tmp_path, policy), *REFERENCE, "cluster.shard_learner=true"]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", "train", *overrides],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert "held-out accuracy before training" in done.stdout and "held-out after" in done.stdout
    assert done.stdout.count("step 3/5") == 1
    folder = tmp_path / "sharded"
    assert max(row["engine/logprob_gap_mean"] for row in rows_of(folder)) < 1e-4
    baseline = [json.loads((run / "heldout_before.json").read_text()) for run in (folder, reference_run.folder)]
    for each in baseline:
        del each["completions_per_second"]
    assert baseline[0] == baseline[1]
    summary = json.loads((folder / "summary.json").read_text())
    assert_near(weights_of(summary["latest_checkpoint"]), weights_of(reference_run.summary.latest_checkpoint))


# Resumed runs


@pytest.mark.slow
def test_run_in_three_launches_continues(small_run: Callable[..., Any]) -> None:
    """Train in three launches with hostile completions, a stateful reward, and a skipped step."""
    settings = [
        "rewards.functions=['reward_spies:one_in_ten_hostile', eased_conciseness, correctness]",
        "rewards.settings={eased_conciseness: {target: 8, max_length: 24}}",
        "grpo.prompts_per_step=8",
    ]
    first, folder = small_run("again", *settings, "grpo.max_steps=2", faults=[Fault("non-finite", step=1)])
    second, _ = small_run("again", *settings, "grpo.max_steps=4")
    assert (first.steps, second.steps) == (2, 4)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["learner/skipped_steps"] for row in rows] == [1, 1, 1, 1]
    # 16 completions for each of 2 workers: 2 hostile ones in each call of the spy, and both reach the time limit; none
    # in the calls of `correctness`. The metric is the mean over calls.
    assert [row["reward/verifier_timeouts"] for row in rows] == [1.0] * 4
    states = [json.loads(path.read_text()) for path in Path(second.latest_checkpoint).glob("rewards_*.json")]
    assert len(states) == 2 and states[0] == states[1] and states[0]["eased_conciseness"]["step"] == 3
    assert second.heldout_before == first.heldout_before is not None
    with pytest.raises(ConfigError, match=r"run\.seed=1 differs from 0.*run\.resume=never"):
        small_run("again", *settings, "run.seed=1")
    # A finished run takes no further step.
    third, _ = small_run("again", *settings, "grpo.max_steps=4")
    assert third.train_seconds == second.train_seconds
    assert third.latest_checkpoint == second.latest_checkpoint


@pytest.mark.main_path
def test_run_from_another_runs_checkpoint_begins_with_its_policy_and_epochs(
    small_run: Callable[..., Any], reference_run: FinishedRun, policy: Path
) -> None:
    source, best = reference_run.folder, int(Path(reference_run.summary.best_checkpoint).name[-6:])
    settings = [*REFERENCE, f"run.from_checkpoint={source}"]
    # Fewer steps than the other run has taken, and an interval of reports that divides none of them.
    steps = ["grpo.max_steps=2", "grpo.logging_steps=3", "grpo.learning_rate=0"]
    forked, fork = small_run("fork", *settings, *steps)
    assert [event["step"] for event in events_of(fork, "began")] == [0]
    (row,) = rows_of(fork)
    assert (forked.steps, row["step"], Path(forked.latest_checkpoint).name) == (2, 2, "checkpoint-000002")
    assert {"reward/mean", "completion/truncated_share", "heldout/accuracy"} <= row.keys()
    # The run begins with the checkpoint's policy, not with that of model.path.
    checkpoint = weights_of(source / f"checkpoint-{best:06}")
    assert same_weights(weights_of(forked.latest_checkpoint), checkpoint)  # at a learning rate of 0
    assert not same_weights(checkpoint, weights_of(policy))
    before, measured = (
        read_heldout(RunFolder(str(run.parent), run.name), HeldoutFile("heldout", step, 0, 0)).to_pylist()
        for run, step in ((fork, 0), (source, best))
    )
    assert before == measured
    assert forked.heldout_before == reference_run.summary.heldout_after
    # The checkpoint contains the ledger, so its epochs continue.
    uses = count_uses([*(group for group in groups_of(source) if group["step"] <= best), *groups_of(fork)])
    assert all(count == 1 for epoch in uses.values() for count in epoch.values())
    with pytest.raises(ConfigError, match=r"has changed since the run .*reference started: 9 problems instead of 10"):
        small_run("other-data", *settings, "data.limit=9")


# Stopped runs


def test_sync_with_a_stale_layer_stops_the_run(small_run: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match=r"SyncError.*does not hold the learner's weights") as caught:
        small_run(
            "frozen",
            "rewards.functions=['reward_spies:freeze_a_layer']",
            "heldout.score=correctness",
            "grpo.max_steps=20",
        )
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.slow
def test_sync_without_a_layer_stops_the_run(small_run: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match=r"SyncError.*of the engine's") as caught:
        small_run(
            "withheld",
            "rewards.functions=['reward_spies:withhold_a_layer']",
            "heldout.score=correctness",
            "grpo.max_steps=20",
        )
    assert len(str(caught.value).splitlines()) == 2


# Runs of users


@pytest.mark.slow
def test_embedded_task_is_learned(cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "jobs" / "configs" / "arithmetic.yaml"
    assert main(["train", str(config), f"run.storage_path={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "arithmetic" / "summary.json").read_text())
    assert summary["heldout_problems"] >= 500
    assert summary["heldout_before"] <= 0.45
    assert summary["heldout_after"] >= 0.85
    output = capsys.readouterr().out
    assert "held-out before" in output and summary["best_checkpoint"] in output
    assert output.count("step 7/100") == 1
    assert events_of(tmp_path / "arithmetic", "warning") == []  # a healthy run


@pytest.mark.slow
def test_real_problems_are_trained_on(small_run: Callable[..., Any], real_problems: Callable[[str], Path]) -> None:
    path = real_problems("olympiadbench.jsonl")
    summary, folder = small_run("olympiad", f"data.train={path}", "grpo.max_steps=3", "grpo.prompts_per_step=16")
    assert summary.steps == 3
    assert 0 < summary.heldout_problems <= 24  # of its own, not of another dataset
    assert all(row["reward/mean"] == 0 for row in rows_of(folder))


@pytest.mark.slow
def test_resume_best_takes_the_later_steps_again(small_run: Callable[..., Any]) -> None:
    settings = [
        "rewards.functions=['reward_spies:falling']",
        "heldout.score=correctness",
        "run.best_metric=reward/falling_mean",
    ]
    _, folder = small_run("best", "grpo.max_steps=4", *settings)
    # The checkpoint of step 2 is the best and that of step 4 the latest.
    again, _ = small_run("best", "grpo.max_steps=6", "run.resume=best", *settings)
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert Path(again.best_checkpoint).name == "checkpoint-000002"
    names = {path.name for path in folder.glob("checkpoint-*")}
    assert {"checkpoint-000002", "checkpoint-000006"} <= names


@pytest.mark.slow
def test_resume_never_starts_over_and_keeps_the_old_run(small_run: Callable[..., Any]) -> None:
    first, folder = small_run("anew", "grpo.max_steps=2")
    second, _ = small_run("anew", "grpo.max_steps=2", "run.resume=never")
    assert (second.steps, second.reward_first) == (2, first.reward_first)
    assert (folder.parent / "anew.1" / "summary.json").exists()


@pytest.mark.slow
def test_unverifiable_problems_are_left_out(small_run: Callable[..., Any], tmp_path: Path) -> None:
    from grpo_ray.data.problem import problem_id

    good = [{"prompt": f"What is {n} + 1?", "solution": f"${n + 1}$"} for n in range(4)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    bad = problem_id([{"role": "user", "content": good[0]["prompt"]}], good[0]["solution"])
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "unverifiable.json").write_text(json.dumps([bad]))
    settings = [f"data.train={tmp_path / 'few.jsonl'}", "data.heldout=arithmetic", "grpo.max_steps=2"]
    _, folder = small_run("few", *settings)
    problems = {group["problem"] for group in groups_of(folder)}
    assert len(problems) == 3 and bad not in problems


@pytest.mark.slow
def test_overlong_prompts_are_left_out_and_columns_may_differ(small_run: Callable[..., Any], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"What is {n} + 1?", "solution": f"${n + 1}$"} for n in range(4)]
    rows[1] |= {"id": "mine", "index": [1], "topic": None}  # other rows have no such columns
    rows.append({"prompt": "What is " + "1 + " * 40 + "1?", "solution": "$41$"})
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.train={tmp_path / 'some.jsonl'}", "data.heldout=arithmetic"]
    settings = [*data, "grpo.max_steps=2", "data.max_prompt_length=40"]
    _, folder = small_run("some", *settings)
    (overlong,) = json.loads((folder / "overlong.json").read_text())["training"]["problems"]
    assert overlong["tokens"] > 40
    uses = count_uses(groups_of(folder))
    assert [len(uses[epoch]) for epoch in range(2)] == [4, 4]  # 2 steps of the 4 short ones
    assert all(overlong["id"] not in epoch for epoch in uses.values())
    with pytest.raises(DataError, match="1 of 5 training problems, whose prompts have more than 40 tokens"):
        small_run("other", *settings, "data.overlong_prompts=error")
    with pytest.raises(ConfigError, match=r"5 problems instead of 4 .*data\.max_prompt_length"):
        small_run("some", *data, "grpo.max_steps=3")


# Bad input

BAD = {
    "a row without the column": ("data.train={tmp}/missing.jsonl", ["missing.jsonl, row 2", "'solution'"]),
    "an empty prompt": ("data.train={tmp}/empty.jsonl", ["empty.jsonl, row 1", "'prompt' is empty"]),
    "a solution that is no text": ("data.train={tmp}/object.jsonl", ["object.jsonl, row 3", "'solution' must be text"]),
    "a held-out file with a bad row": ("data.heldout={tmp}/object.jsonl", ["object.jsonl, row 3"]),
    "a file that is not there": ("data.train={tmp}/none.parquet", ["none.parquet", "no such file"]),
    "a file too small to hold problems out": (
        "data.train={tmp}/small.jsonl",
        ["small.jsonl", "data.heldout_share=0.05", "set data.heldout to other problems"],
    ),
    "a file that is no parquet": ("data.train={tmp}/broken.parquet", ["broken.parquet", "not a parquet file"]),
    "storage that cannot be written": (
        "run.storage_path={tmp}/object.jsonl",
        ["run.storage_path", "cannot be written"],
    ),
    "GPUs that the cluster lacks": (
        "cluster.use_gpu=true cluster.num_workers=16",
        ["cluster.num_workers=16", "16 GPUs", "and the cluster has"],
    ),
    "CPUs that the cluster lacks": ("cluster.cpus_per_worker=500", ["cluster.cpus_per_worker=500", "1001 CPUs"]),
    "sizes that do not divide": (
        "grpo.prompts_per_step=3",
        ["grpo.prompts_per_step=3", "cluster.num_workers=2", "try"],
    ),
    "a field that TRL does not have": ("grpo.betta=1", ["grpo.betta", "did you mean grpo.beta"]),
    "a field that is derived": ("grpo.generation_batch_size=64", ["grpo.generation_batch_size is derived"]),
    "a value that TRL refuses": (
        "grpo.vllm_importance_sampling_clip_min=9",
        ["grpo.vllm_importance_sampling_clip_min=9", "below"],
    ),
    "a loss that TRL does not have": ("grpo.loss_type=ppo", ["grpo.loss_type='ppo'", "dr_grpo"]),
    "a column that TRL passes itself": (
        "data.train={tmp}/column.jsonl",
        ["column.jsonl, row 2", "column 'completions'"],
    ),
    "a reward that does not exist": ("rewards.functions=[corectness]", ["'corectness'", "did you mean correctness?"]),
    "a model folder that is not there": ("model.path={tmp}/nowhere", ["model.path", "nowhere"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_before_any_worker_starts(
    case: str, cluster: None, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good: dict[str, Any] = {"prompt": "What is 1 + 1?", "solution": "$2$"}
    files = {
        "missing.jsonl": [good, {"prompt": "What?"}],
        "empty.jsonl": [{"prompt": " ", "solution": "$2$"}],
        "object.jsonl": [good, good, good | {"solution": {"x": 2}}],
        "column.jsonl": [good, good | {"completions": 1}],
        "small.jsonl": [good],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.parquet").write_text("not parquet")
    override, words = BAD[case]
    overrides = override.format(tmp=tmp_path).split()
    arguments = [f"run.storage_path={tmp_path}/runs", f"model.path={policy}", *overrides]
    assert main(["train", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "runs" / "arithmetic" / "logs").exists()
