"""Reward functions of the user in processes of their own, with functions that fail."""

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_watch import wait_until

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import parse_problem
from grpo_ray.errors import RewardError
from grpo_ray.evaluation.scores import Answer, WeightedRewards
from grpo_ray.processes.process_tree import process_state
from grpo_ray.rewards.isolated import IsolatedReward
from grpo_ray.rewards.registry import load_reward, load_rewards

SECONDS = 3.0
"""Time limit of calls that hang; others have the default."""


class Loaded:
    """An isolated reward, and what its latest call logged."""

    def __init__(self, reward: Any) -> None:
        self.reward = reward
        self.metrics: dict[str, float] = {}
        self.extra: list[str] = []

    def __call__(self, *texts: Any, prompts: Sequence[Any] | None = None, **columns: Any) -> list[float | None]:
        """Return the rewards of texts, by default all of one problem."""
        self.metrics, self.extra = {}, []
        rewards: list[float | None] = self.reward(
            completions=list(texts), prompts=list(prompts or ["same"] * len(texts)), trainer_state=None,
            log_metric=self.metrics.__setitem__, log_extra=lambda column, values: self.extra.append(column), **columns,
        )  # fmt: skip
        return rewards

    @property
    def failed_share(self) -> float:
        return self.metrics["reward/failed_share"]


@pytest.fixture
def isolated() -> Iterator[Any]:
    """Return a function that loads a reward of `failing_rewards` as a run does; at the end their processes end."""
    with ExitStack() as stack:

        def load(name: str, settings: Mapping[str, Any] | None = None, **limits: Any) -> Loaded:
            path = f"failing_rewards:{name}"
            config = RewardsConfig(functions=(path,), settings={path: settings or {}}, isolate=True, **limits)
            (reward,) = load_rewards(config)
            assert isinstance(reward, IsolatedReward)
            stack.callback(reward.close)
            return Loaded(reward)

        yield load


def test_rewards_are_those_of_the_function(isolated: Any) -> None:
    reward = isolated("lengths", {"factor": 2.0})
    assert reward("ab", "", [{"role": "assistant", "content": "abc"}]) == [4.0, None, 6.0]
    assert reward.failed_share == 0.0
    assert reward.reward.__name__ == "lengths"


def test_coroutine_is_awaited(isolated: Any) -> None:
    reward = isolated("slowly")
    assert reward("ab", "c") == reward("ab", "c") == [2.0, 1.0]


def test_function_receives_what_a_run_passes(isolated: Any) -> None:
    reward = isolated("facts")
    state = SimpleNamespace(global_step=5, epoch=0.5, secret=object())
    metrics: dict[str, float] = {}
    extra: list[str] = []
    returned = reward.reward(
        completions=["a", "b"], prompts=["p", "q"], completion_ids=[[1], [2, 3]], level=[10, 20], trainer_state=state,
        log_metric=metrics.__setitem__, log_extra=lambda column, values: extra.append(column),
    )  # fmt: skip
    assert returned == [16.0, 27.0]
    assert metrics == {"prompts": 2.0, "reward/failed_share": 0.0} and extra == ["column"]


def test_random_numbers_depend_on_the_arguments_only(isolated: Any) -> None:
    first, second = isolated("lucky"), isolated("lucky")
    values = first("a", "b")
    assert first("a", "c") != values
    assert second("a", "b") == first("a", "b") == values


def test_one_process_answers_all_calls(isolated: Any) -> None:
    reward = isolated("process")
    (pid,) = reward("a")
    assert reward("a") == [pid] and pid != os.getpid()


@pytest.mark.parametrize("failure", ["raise", "exit", "die", "abort"])
def test_failure_costs_the_completions_of_its_problem_their_reward(isolated: Any, failure: str) -> None:
    reward = isolated("length")
    texts, prompts = ["ab", "a", failure, "abc", "abcd"], ["first", "second", "second", "first", "third"]
    assert reward(*texts, prompts=prompts) == [2.0, None, None, 3.0, 4.0]
    assert reward.failed_share == pytest.approx(2 / 5)
    assert reward("ab") == [2.0] and reward.failed_share == 0.0


@pytest.mark.long
@pytest.mark.parametrize("failure", ["hang", "spin"])
def test_call_beyond_its_time_has_no_reward(isolated: Any, failure: str, caplog: pytest.LogCaptureFixture) -> None:
    reward = isolated("length", isolate_seconds=SECONDS)
    assert reward(failure, "ab") == [None, None]
    assert reward.failed_share == 1.0
    assert "it took longer than 3 s (rewards.isolate_seconds)" in caplog.text
    assert reward("ab") == [2.0]


def test_memory_beyond_its_limit_is_a_failure(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = isolated("length", isolate_memory_gib=4)
    assert reward("memory", "ab", prompts=["p", "q"]) == [None, 2.0]
    assert "MemoryError" in caplog.text


@pytest.mark.long
def test_processes_that_end_are_limited_in_a_call(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = isolated("length")
    assert reward("die", "die", "die", "ab", prompts=["p", "q", "r", "s"]) == [None] * 4
    assert reward.failed_share == 1.0
    assert "not called, since 3 processes have ended in this step" in caplog.text
    assert reward("die", "die", "ab", prompts=["p", "q", "r"]) == [None, None, 2.0]


@pytest.mark.long
def test_slow_failures_of_a_call_are_limited_together(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = isolated("length", isolate_seconds=0.5)
    texts = [*["late"] * 12, "ab"]  # each takes 0.2 s and ends no process; together they have 3 * 0.5 s
    assert reward(*texts, prompts=list(map(str, range(13)))) == [None] * 13
    assert reward.failed_share == 1.0
    assert "not called, since the calls for single problems have taken 1.5 s" in caplog.text
    assert reward("late", "ab", prompts=["p", "q"]) == [None, 2.0]


def test_warning_names_error_and_place(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    isolated("length")("raise")
    assert "ValueError: bad text of two lines (failing_rewards.py:" in caplog.text


def test_wrong_number_of_rewards_is_a_failure(isolated: Any, caplog: pytest.LogCaptureFixture) -> None:
    reward = isolated("too_few")
    assert reward("a", "b", prompts=["p", "q"]) == [1.0, 1.0]  # called with one problem it returns enough
    assert "returned 1 rewards for 2 completions" in caplog.text


@pytest.mark.long
def test_processes_of_the_function_end_with_it(isolated: Any, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    reward = isolated("with_a_child", {"file": str(file)}, isolate_seconds=SECONDS)
    assert reward("a") == [None]
    wait_until(lambda: process_state(int(file.read_text())) in ("", "Z"))


def test_process_ends_with_its_reward(isolated: Any) -> None:
    reward = isolated("process")
    (pid,) = reward("a")
    reward.reward.close()
    assert process_state(int(pid)) == ""


def test_errors_start_no_process_again(isolated: Any) -> None:
    reward = isolated("Count")
    (first,) = reward("a")
    pid = reward.reward._client.pid
    assert reward("raise", "b", "raise", prompts=["p", "q", "r"]) == [None, 1.0, None]
    assert first == 0.0 and reward.reward._client.pid == pid


def test_equal_prompts_of_two_problems_are_called_on_their_own(isolated: Any) -> None:
    assert isolated("length")("raise", "ab", id=["p", "q"]) == [None, 2.0]


def test_failed_reward_leaves_no_heldout_score(isolated: Any) -> None:
    problems = [parse_problem({"prompt": f"{n}?", "solution": "$1$"}, where="here") for n in range(3)]
    texts = ["ab", "raise", "abc"]
    answers = [Answer(text, text, 1, False, messages=text, token_ids=[1]) for text in texts]
    functions = [isolated("length").reward, load_reward("soft_overlong", max_length=9, buffer=1)]
    score = WeightedRewards(functions, ["length", "soft_overlong"], [1.0, 1.0])
    assert score(problems, answers) == [2.0, None, 3.0]


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Also within a call that never ends."""
    file, program = tmp_path / "pid", "; ".join([
        "from grpo_ray.rewards.isolated import *", "import os, sys",
        "name, limits = 'failing_rewards:with_a_child', Limits(seconds=999, memory_gib=None)",
        "reward = IsolatedReward(name, {'file': sys.argv[1]}, limits)",
        "reward(completions=['a'], prompts=['p'], log_metric=print)",
    ])  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program, str(file)], env=environment)
    wait_until(lambda: file.exists() and file.read_text() != "")
    parent.kill()
    parent.wait()
    wait_until(lambda: process_state(int(file.read_text())) in ("", "Z"))


def test_state_is_that_after_the_last_successful_call(isolated: Any) -> None:
    reward = isolated("Count", {"first": 3})
    assert reward.reward.state_dict() == {"texts": 3}
    assert reward("a", "b") == [3.0, 4.0]
    assert reward("a", "raise") == [None, None]  # the first text was counted before the second one failed
    assert reward.reward.state_dict() == {"texts": 5}
    assert reward("a", "die", "b", prompts=["p", "q", "r"]) == [5.0, None, 6.0]
    other = isolated("Count")
    other.reward.load_state_dict(reward.reward.state_dict())
    assert other("a") == [7.0] and other.reward.state_dict() == {"texts": 8}


def test_reward_without_a_state_saves_none(isolated: Any) -> None:
    assert not hasattr(isolated("length").reward, "state_dict")


def test_column_that_json_does_not_have_arrives_as_text(isolated: Any) -> None:
    """As in training, whose columns pass through JSON."""
    assert isolated("days")("a", "b", day=[datetime.date(2026, 1, 2), datetime.date(2026, 3, 4)]) == [2.0, 4.0]


def test_trial_raises_what_a_run_counts(isolated: Any) -> None:
    reward = isolated("length").reward
    arguments = {"prompts": ["p"], "log_metric": lambda name, value: None}
    with pytest.raises(
        RewardError, match=r"^reward 'failing_rewards:length' failed: ValueError: bad text of two lines"
    ):
        reward.try_once(completions=["raise"], **arguments)
    assert reward.try_once(completions=["ab"], **arguments) == [2.0]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missing", {}, "failing_rewards has no 'missing'"),
        ("Count", {"frist": 1}, "has no setting 'frist', but first; did you mean first"),
        ("Waiting", {}, "has an asynchronous __call__"),
    ],
)
def test_reward_that_cannot_be_loaded_raises(
    isolated: Any, name: str, settings: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        isolated(name, settings)


def test_module_that_ends_its_process_cannot_be_loaded(
    isolated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\n\nif os.getpid() != {}:\n    {}\n\ndef pay(**columns):\n    return []\n"
    for name, end in (("own_end", "os._exit(7)"), ("own_error", "raise KeyError('key')")):
        (tmp_path / f"{name}.py").write_text(text.format(os.getpid(), end))
    monkeypatch.syspath_prepend(tmp_path)
    for path, reason in (("own_end:pay", "its process ended with status 7"), ("own_error:pay", "KeyError: 'key'")):
        (reward,) = load_rewards(RewardsConfig(functions=(path,), isolate=True))
        with pytest.raises(RewardError, match=f"'{path}' cannot be loaded in a process of its own: {reason}"):
            Loaded(reward)("a")


def test_reward_that_cannot_be_loaded_again_has_failed(
    isolated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = tmp_path / "fragile.py"
    module.write_text(
        "import os\n\ndef pay(completions, **columns):\n    return [1.0] if completions == ['a'] else os._exit(5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (own,) = load_rewards(RewardsConfig(functions=("fragile:pay",), isolate=True))
    reward = Loaded(own)
    assert reward("a") == [1.0] and reward("b") == [None]
    module.write_text("raise KeyError('gone')\n")
    assert reward("a") == [None] and reward.failed_share == 1.0
    assert "KeyError: 'gone'" in caplog.text


def test_killed_process_is_started_again(isolated: Any) -> None:
    reward = isolated("process")
    (pid,) = reward("a")
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: process_state(int(pid)) == "Z")
    assert reward("a") not in ([pid], [None])


def test_built_in_rewards_are_not_isolated() -> None:
    rewards = load_rewards(RewardsConfig(functions=("correctness", "boxed_format"), isolate=True))
    assert not any(isinstance(each, IsolatedReward) for each in rewards)


def test_heldout_score_of_a_function_is_isolated() -> None:
    from grpo_ray.evaluation.scores import heldout_score

    config = load_config(None, ["rewards.isolate=true", "heldout.score=failing_rewards:length"])
    score: Any = heldout_score(config)
    assert isinstance(score.compute.functions[0], IsolatedReward)
