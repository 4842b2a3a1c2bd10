"""Whole runs on real parts: Ray Train, vLLM, TRL and Ray Data on this machine's CPU."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import rows_of, weights_of

from grpo_ray.cli import main
from grpo_ray.errors import ConfigError, TrainingError

GIB = 2**30


def recorded(folder: Path) -> dict[tuple[int, str, int], list[int]]:
    """(step, problem, index in its group) -> tokens, as `spies.record` wrote them down."""
    rows = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    sampled = {(row["step"], row["id"], row["index"]): row["tokens"] for row in rows}
    return sampled


class MemoryWatch:
    """Samples the memory of a process and of every one below it, shared pages counted once (PSS)."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.peak = max(self.peak, sum(map(self._pss, self._family())))

    def _family(self) -> Iterator[int]:
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # it has just ended
                    continue
        for process in parents:
            ancestor = process
            while ancestor in parents and ancestor != self.root:
                ancestor = parents[ancestor]
            if ancestor == self.root:
                yield process

    @staticmethod
    def _pss(process: int) -> int:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def test_one_and_two_workers_take_the_same_steps(small_run: Callable[..., Any], tmp_path: Path) -> None:
    import torch

    sampled, weights = {}, {}
    for workers in (1, 2):
        (tmp_path / f"seen-{workers}").mkdir()
        settings = f"{{'reward_spies:record': {{folder: {tmp_path / f'seen-{workers}'}}}}}"
        summary, _ = small_run(
            f"workers-{workers}",
            f"cluster.num_workers={workers}",
            "rewards.functions=['reward_spies:record']",
            f"rewards.settings={settings}",
            "grpo.prompts_per_step=8",
            "grpo.micro_batch_size=16",
            "grpo.max_steps=5",
            "grpo.save_steps=5",
            # What a run of this size would use. Adam divides by the gradient's own size, so a step moves each
            # weight by about the learning rate, and so does a rounding error of a gradient near zero.
            "grpo.learning_rate=1e-4",
        )
        sampled[workers] = recorded(tmp_path / f"seen-{workers}")
        weights[workers] = weights_of(summary.latest_checkpoint)
    assert len(sampled[1]) == 5 * 8 * 4  # none twice in a step
    assert sampled[1] == sampled[2]
    assert weights[1].keys() == weights[2].keys()
    for name in weights[1]:
        torch.testing.assert_close(weights[1][name], weights[2][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_two_workers_stay_under_6_gib_in_all(policy: Path, tmp_path: Path) -> None:
    """The whole command in a process of its own, with its own Ray: driver, controller, workers, engines, verifiers."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [
        sys.executable, "-m", "grpo_ray.cli", "train", f"run.storage_path={tmp_path}", f"model.path={policy}",
        "grpo.max_steps=3", "grpo.max_completion_length=40",
    ]  # fmt: skip
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run,
        MemoryWatch(run.pid) as memory,
    ):
        said, _ = run.communicate()
    assert run.returncode == 0 and "held-out after" in said
    assert 1 * GIB < memory.peak < 6 * GIB, f"{memory.peak / GIB:.2f} GiB"


@pytest.mark.parametrize(
    ("spy", "said"),
    [("withhold_a_layer", "of the engine's"), ("freeze_a_layer", "does not hold the learner's weights")],
)
def test_a_broken_sync_stops_the_run(small_run: Callable[..., Any], spy: str, said: str) -> None:
    with pytest.raises(TrainingError, match=f"SyncError.*{said}") as caught:
        small_run(f"broken-{spy.replace('_', '-')}", f"rewards.functions=['reward_spies:{spy}']", "grpo.max_steps=20")
    assert len(str(caught.value).splitlines()) == 2


def test_the_same_command_goes_on_from_where_the_run_was(small_run: Callable[..., Any]) -> None:
    first, folder = small_run("again", "grpo.max_steps=2", measured=True)
    second, _ = small_run("again", "grpo.max_steps=4", measured=True)
    assert (first.steps, second.steps) == (2, 4)
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]
    assert second.heldout_before == first.heldout_before
    with pytest.raises(ConfigError, match=r"run\.seed=1 differs from 0.*run\.resume=never"):
        small_run("again", "run.seed=1")
    # A run that is finished is not run again.
    third, _ = small_run("again", "grpo.max_steps=4")
    assert third.train_seconds == second.train_seconds
    assert third.latest_checkpoint == second.latest_checkpoint


@pytest.mark.slow
def test_a_killed_worker_takes_its_verifier_with_it(small_run: Callable[..., Any], tmp_path: Path) -> None:
    mark = tmp_path / "killed.mark"
    settings = {"reward_spies:kill_once": {"step": 1, "mark": str(mark)}}
    summary, _ = small_run(
        "killed",
        "rewards.functions=['correctness', 'reward_spies:kill_once']",
        f"rewards.settings={settings}",
        "run.max_failures=2",
        "grpo.max_steps=2",
    )
    assert summary.steps == 2
    verifier = Path("/proc", mark.read_text())
    for _ in range(600):
        if not verifier.exists() or "grpo_ray" not in (verifier / "cmdline").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the verifier {verifier} outlived its worker")


@pytest.mark.slow
def test_going_on_from_the_best_takes_the_steps_after_it_again(small_run: Callable[..., Any]) -> None:
    _, folder = small_run("best", "grpo.max_steps=4", "run.best_metric=learner/learning_rate")
    # The learning rate falls, so the checkpoint of step 2 is the best and that of step 4 the latest.
    again, _ = small_run("best", "grpo.max_steps=6", "run.best_metric=learner/learning_rate", "run.resume=best")
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert Path(again.best_checkpoint).name == "checkpoint-000002"
    names = {path.name for path in folder.glob("checkpoint-*")}
    assert {"checkpoint-000002", "checkpoint-000006"} <= names


@pytest.mark.slow
def test_never_starts_over_and_keeps_the_old_run(small_run: Callable[..., Any]) -> None:
    first, folder = small_run("anew", "grpo.max_steps=2")
    second, _ = small_run("anew", "grpo.max_steps=2", "run.resume=never")
    assert (second.steps, second.reward_first) == (2, first.reward_first)
    assert (folder.parent / "anew.1" / "summary.json").exists()


def test_a_run_folder_holds_what_a_user_looks_for(small_run: Callable[..., Any]) -> None:
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary, folder = small_run(
        "folder", "grpo.max_steps=2", "run.best_metric=reward/mean", "run.trace=true", measured=True
    )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["grpo"]["max_steps"] == 2
    assert {"ray", "torch", "trl", "commit"} <= set(config["versions"])
    written = json.loads((folder / "summary.json").read_text())
    assert written["steps"] == 2
    assert written["heldout_before"] is not None and written["heldout_after"] is not None
    assert written["completions_per_second"] > 0
    assert 0 < written["train_seconds"] < written["wall_seconds"]
    policy = AutoModelForCausalLM.from_pretrained(summary.best_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(summary.best_checkpoint)
    assert tokenizer.chat_template and policy.config.model_type == "qwen2"
    assert (folder / "logs" / "worker-0.log").exists() and (folder / "logs" / "worker-1.log").exists()
    for row in rows_of(folder):
        assert {"step", "reward/mean", "reward/correctness_mean", "engine/logprob_gap_mean"} <= set(row)
    assert "heldout/accuracy" in rows_of(folder)[-1]
    look_at_profile(rows_of(folder), written, folder / "trace")


def look_at_profile(rows: list[dict[str, Any]], summary: dict[str, Any], traces: Path) -> None:
    """Where the seconds of a run of two workers went, in its metrics and in its traces."""
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
    # When the policy has been measured, before training or after a checkpoint, the engine has its weights already.
    assert rows[0]["phase/sync"] == 0 < rows[1]["phase/sync"]
    assert sum(summary["phase_seconds"].values()) == pytest.approx(summary["train_seconds"], abs=0.2)  # rounded
    assert {file.name for file in traces.iterdir()} == {f"worker-{rank}-from-step-0.json" for rank in (0, 1)}
    for rank in (0, 1):
        events = json.loads((traces / f"worker-{rank}-from-step-0.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        drawn = [event for event in events if event["ph"] == "X"]
        assert all(event["dur"] > 0 and event["ts"] > 1.7e15 for event in drawn)  # microseconds since 1970
        assert {lanes[event["tid"]] for event in drawn} >= {"learner", "verdicts"}
        assert len([event for event in drawn if event["name"] == "generate"]) == len(rows)
        if rank == 0:  # whose metrics are those of the run
            first = min(event["ts"] for event in drawn if event["name"] == "generate")
            steps = [event for event in drawn if event["ts"] >= first]  # not the sync that measuring began with
            for name in ("generate", "sync", "score", "optimizer"):  # nothing else is timed inside of them
                seconds = sum(event["dur"] for event in steps if event["name"] == name) / 1e6
                assert seconds == pytest.approx(sum(row[f"phase/{name}"] for row in rows), abs=1e-3)


def test_a_run_with_hostile_completions_ends_well_and_counts_them(small_run: Callable[..., Any]) -> None:
    summary, folder = small_run(
        "hostile", "rewards.functions=['reward_spies:one_in_ten_hostile', eased_conciseness, correctness]",
        "rewards.settings={eased_conciseness: {target: 8, max_length: 24}}", "grpo.prompts_per_step=8",
        "grpo.max_steps=2",
    )  # fmt: skip
    assert summary.steps == 2
    # 16 completions for each of 2 workers: 2 hostile ones in each call of the spy, and both hit the limit; none in the
    # calls of `correctness`. The metric is the mean over calls.
    assert [row["reward/verifier_timeouts"] for row in rows_of(folder)] == [1.0, 1.0]
    states = [json.loads(path.read_text()) for path in Path(summary.latest_checkpoint).glob("rewards_*.json")]
    assert len(states) == 2 and states[0] == states[1] and states[0]["eased_conciseness"]["step"] == 1


@pytest.mark.slow
def test_problems_that_cannot_be_verified_are_left_out(small_run: Callable[..., Any], tmp_path: Path) -> None:
    from grpo_ray.problem import problem_id

    good = [{"prompt": f"What is {n} + 1?", "solution": f"${n + 1}$"} for n in range(4)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    bad = problem_id([{"role": "user", "content": good[0]["prompt"]}], good[0]["solution"])
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "unverifiable.json").write_text(json.dumps([bad]))
    (tmp_path / "seen").mkdir()
    small_run(
        "few", f"data.train={tmp_path / 'few.jsonl'}", "rewards.functions=['reward_spies:record']",
        f"rewards.settings={{'reward_spies:record': {{folder: {tmp_path / 'seen'}}}}}", "grpo.max_steps=2",
    )  # fmt: skip
    used = {problem for _, problem, _ in recorded(tmp_path / "seen")}
    assert len(used) == 3 and bad not in used


@pytest.mark.slow
def test_a_reward_model_scores_beside_a_function(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    judge = tmp_path / "judge"
    Qwen2ForSequenceClassification(AutoConfig.from_pretrained(policy, num_labels=1)).save_pretrained(judge)
    AutoTokenizer.from_pretrained(policy).save_pretrained(judge)
    _, folder = small_run(
        "judged", f"rewards.functions=[correctness, {judge}]", "grpo.reward_weights=[1.0, 0.5]", "grpo.max_steps=2"
    )
    for row in rows_of(folder):
        # The model's scores are no whole numbers, and the reward is the weighted sum.
        whole = row["reward/correctness_mean"] + 0.5 * row["reward/judge_mean"]
        assert row["reward/mean"] == pytest.approx(whole, abs=1e-5) and row["reward/judge_std"] > 0


def test_real_problems_run_through(small_run: Callable[..., Any], real_problems: Callable[[str], Path]) -> None:
    path = real_problems("olympiadbench.jsonl")
    summary, folder = small_run("olympiad", f"data.train={path}", "grpo.max_steps=3", "grpo.prompts_per_step=16")
    assert summary.steps == 3
    assert all(row["reward/mean"] == 0 for row in rows_of(folder))


def test_the_embedded_task_is_learned(cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "jobs" / "configs" / "arithmetic.yaml"
    assert main(["train", str(config), f"run.storage_path={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "arithmetic" / "summary.json").read_text())
    assert summary["heldout_problems"] >= 500
    assert summary["heldout_before"] <= 0.45
    assert summary["heldout_after"] >= 0.85
    said = capsys.readouterr().out
    assert "held-out before" in said and summary["best_checkpoint"] in said
    assert said.count("step 7/100") == 1


BAD = {
    "a row without the column": ("data.train={tmp}/missing.jsonl", ["missing.jsonl, row 2", "'solution'"]),
    "an empty prompt": ("data.train={tmp}/empty.jsonl", ["empty.jsonl, row 1", "'prompt' is empty"]),
    "a solution that is no text": ("data.train={tmp}/number.jsonl", ["number.jsonl, row 3", "'solution' must be text"]),
    "a held-out file with a bad row": ("data.heldout={tmp}/number.jsonl", ["number.jsonl, row 3"]),
    "a file that is not there": ("data.train={tmp}/none.parquet", ["none.parquet", "no such file"]),
    "a file that is no parquet": ("data.train={tmp}/broken.parquet", ["broken.parquet", "not a parquet file"]),
    "storage that cannot be written": (
        "run.storage_path={tmp}/number.jsonl",
        ["run.storage_path", "cannot be written"],
    ),
    "GPUs that the cluster lacks": ("cluster.use_gpu=true", ["cluster.num_workers=2", "2 GPUs", "has 0"]),
    "CPUs that the cluster lacks": ("cluster.cpus_per_worker=500", ["cluster.cpus_per_worker=500", "1001 CPUs"]),
    "sizes that do not divide": (
        "grpo.prompts_per_step=3",
        ["grpo.prompts_per_step=3", "cluster.num_workers=2", "try"],
    ),
    "a field that TRL does not have": ("grpo.betta=1", ["grpo.betta", "did you mean grpo.beta"]),
    "a field that is derived": ("grpo.steps_per_generation=2", ["grpo.steps_per_generation is derived"]),
    "a value that TRL refuses": ("grpo.vllm_importance_sampling_clip_min=9", ["grpo:", "clip_min"]),
    "a loss that TRL does not have": ("grpo.loss_type=ppo", ["grpo.loss_type='ppo'", "dr_grpo"]),
    "a reward that does not exist": ("rewards.functions=[corectness]", ["'corectness'", "did you mean 'correctness'"]),
    "a model folder that is not there": ("model.path={tmp}/nowhere", ["model.path", "nowhere"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_before_any_worker_starts(
    case: str, cluster: None, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"prompt": "What is 1 + 1?", "solution": "$2$"}
    files = {
        "missing.jsonl": [good, {"prompt": "What?"}],
        "empty.jsonl": [{"prompt": " ", "solution": "$2$"}],
        "number.jsonl": [good, good, good | {"solution": 2}],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.parquet").write_text("not parquet")
    override, words = BAD[case]
    arguments = [f"run.storage_path={tmp_path}/runs", f"model.path={policy}", override.format(tmp=tmp_path)]
    assert main(["train", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "runs" / "arithmetic" / "logs").exists()
