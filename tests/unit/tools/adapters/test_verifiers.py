"""Tests of the verifiers adapter with a small copy of the interface; the real one is in the integration tests."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ConfigError
from grpo_ray.tools.adapters.verifiers import Verifiers, library
from grpo_ray.tools.definitions import load_definition

PROMPT = [{"role": "user", "content": "Count."}]


class FakeError(Exception):
    """Error that verifiers catches in a rollout."""


class CountingEnv:
    """Environment that answers with the number of turns, and ends after `limit` turns or the text `stop`."""

    def __init__(self, limit: int = 3, added: str = "", has_group_rewards: bool = False):
        self.limit, self.added = limit, added
        self.rubric = SimpleNamespace(score_rollout=self._score, has_group_rewards=has_group_rewards)

    async def init_state(self, row: dict[str, Any], client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        timing = SimpleNamespace(generation=SimpleNamespace(start=0.0))
        return {**row, "trajectory": [], "error": None, "timing": timing, "final_env_response": None}

    async def setup_state(self, state: dict[str, Any]) -> None:
        state["prompt"] = [*state["prompt"][:-1], {"role": "user", "content": state["prompt"][-1]["content"]}]
        state["prompt"][-1]["content"] += self.added

    async def add_model_response(self, state: dict[str, Any], prompt: list[Any], response: Any) -> None:
        state["trajectory"].append((prompt, {"role": "assistant", "content": response.message.content}))

    async def get_prompt_messages(self, state: dict[str, Any]) -> list[Any]:
        if not state["trajectory"]:
            return state["prompt"]
        prompt, turn = state["trajectory"][-1]
        if turn["content"] == "stop":
            state["final_env_response"] = "stopped"
        if turn["content"] == "break":
            raise FakeError("broken")
        if turn["content"] == "forget":
            return [{"role": "user", "content": "Begin again."}]
        return [*prompt, turn, {"role": "user", "content": [{"type": "text", "text": str(len(state["trajectory"]))}]}]

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return len(state["trajectory"]) >= self.limit

    async def cleanup(self, state: dict[str, Any]) -> None:
        state["completion"] = [turn["content"] for _, turn in state["trajectory"]]

    async def _score(self, state: dict[str, Any]) -> None:
        state["reward"] = state["completion"].count(state["answer"])


class StatefulEnv(CountingEnv):
    def update_tool_args(self) -> None: ...


@pytest.fixture(autouse=True)
def fake_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = ModuleType("verifiers")
    fake.__version__ = "0.3.1"
    fake.MultiTurnEnv = CountingEnv
    fake.Response = fake.ResponseMessage = SimpleNamespace
    fake.OpenAIChatCompletionsClient = lambda client: client
    fake.Error = FakeError
    monkeypatch.setitem(sys.modules, "verifiers", fake)
    return fake


def begin(environment: CountingEnv, **columns: Any) -> Verifiers:
    opened = Verifiers(environment)
    opened.reset(seed=0, **{"prompt": PROMPT, "solution": "b", **columns})
    return opened


def test_environment_answers_turns_until_it_is_completed() -> None:
    environment = begin(CountingEnv(limit=3))
    assert [environment.step(text) for text in "abb"] == ["1", "2", None]
    assert environment.done and environment.step("b") is None
    assert environment.get_reward() == 2.0


def test_final_response_ends_the_completion() -> None:
    environment = begin(CountingEnv())
    assert environment.step("stop") is None and environment.done and environment.get_reward() == 0.0


def test_completion_without_a_turn_has_no_reward() -> None:
    assert begin(CountingEnv()).get_reward() == 0.0


def test_error_of_the_environment_makes_the_reward_unknown() -> None:
    environment = begin(CountingEnv())
    assert environment.step("break") is None and environment.done
    with pytest.raises(ValueError, match="broken"):
        environment.get_reward()


def test_environment_that_rewrites_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites earlier messages"):
        begin(CountingEnv()).step("forget")


def test_reset_returns_the_text_added_to_the_prompt() -> None:
    assert Verifiers(CountingEnv()).reset(seed=0, prompt=PROMPT) is None
    assert Verifiers(CountingEnv(added=" Up.")).reset(seed=0, prompt=PROMPT) == " Up."
    assert PROMPT == [{"role": "user", "content": "Count."}]


def test_columns_reach_the_state() -> None:
    state = begin(CountingEnv(), info={"a": 1}, task="sums", level="easy")._state
    assert (state["info"], state["level"], state["answer"]) == ({"a": 1}, "easy", "b") and "task" not in state
    assert begin(CountingEnv(), task={"id": 3})._state["task"] == {"id": 3}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (SimpleNamespace(), "no MultiTurnEnv of verifiers, version 0: it has no method init_state"),
        (StatefulEnv(), "StatefulToolEnv"),
        (CountingEnv(has_group_rewards=True), "rewards of a whole group"),
        ("nowhere:load", "environment: 'nowhere:load' cannot be imported"),
    ],
)
def test_environment_that_cannot_be_driven_is_refused(environment: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Verifiers(environment)


def test_version_1_is_refused(fake_library: Any) -> None:
    del fake_library.MultiTurnEnv
    fake_library.__version__ = "0.4.0"
    with pytest.raises(
        ConfigError, match=r"verifiers 0\.4\.0 has no MultiTurnEnv.*pip install 'verifiers>=0\.2,<0\.4'"
    ):
        library()


def test_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match="verifiers cannot be imported"):
        library()


def test_definition_has_step_and_reward_and_no_tool() -> None:
    path = "grpo_ray.tools.adapters.verifiers:Verifiers"
    config = RolloutConfig(environment=path, settings={path: {"environment": "games:load"}})
    facts = load_definition(config).environments[None]
    assert (facts.tools.names, facts.has_step, facts.has_reward) == (frozenset(), True, True)
