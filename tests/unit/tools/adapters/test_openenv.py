"""Tests of the OpenEnv adapter with a small client in this process; the real one is in the integration tests."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ConfigError
from grpo_ray.tools.adapters import openenv
from grpo_ray.tools.adapters.openenv import OpenEnv, OpenEnvActions, OpenEnvText
from grpo_ray.tools.definitions import load_definition

URL = "http://nowhere"


class CountdownClient:
    """Client of an environment that counts down from 2; an action subtracts `by`, and its reward is `by` or None."""

    def __init__(self, base_url: str, is_rewarding: bool = True):
        self.base_url, self.is_rewarding = base_url, is_rewarding

    def reset(self, **arguments: Any) -> SimpleNamespace:
        self.arguments, self.left = arguments, 2
        return self._result(None)

    def step(self, action: Any) -> SimpleNamespace:
        self.action = action
        by = int(action["by"] if isinstance(action, dict) else action.by)
        self.left -= by
        return self._result(float(by) if self.is_rewarding else None)

    def _result(self, reward: float | None) -> SimpleNamespace:
        observation = {"left": self.left, "hint": "länger", "done": False, "metadata": {}, "reward": 0}
        return SimpleNamespace(observation=observation, reward=reward, done=self.left <= 0)


@dataclass
class Subtract:
    by: str


class CheckedSubtract(pydantic.BaseModel, extra="forbid"):
    by: int


def test_text_of_a_turn_is_the_action() -> None:
    environment = OpenEnvText(URL, "by", client=CountdownClient, action_fields={"kind": "subtract"})
    assert environment.reset(seed=7, level="easy") == '{"left": 2, "hint": "länger"}'
    assert environment._client.arguments == {"seed": 7}
    assert environment.step("1") == '{"left": 1, "hint": "länger"}' and not environment.done
    assert environment._client.action == {"kind": "subtract", "by": "1"}
    environment.step("1")
    assert environment.done and environment.get_reward() == 2.0
    with pytest.raises(ValueError, match="has ended"):
        environment.step("1")


def test_last_reward_and_one_field() -> None:
    environment = OpenEnvActions(URL, client=CountdownClient, reward="last", observation_field="left")
    assert environment.reset(seed=0) == "2"
    assert environment.get_reward() == 0.0
    assert [environment.act({"by": by}) for by in (0.5, 2)] == ["2", "0"]
    assert environment.get_reward() == 2.0


def test_reset_begins_a_new_episode() -> None:
    environment = OpenEnvText(URL, "by", client=CountdownClient)
    environment.reset(seed=0)
    environment.step("2")
    environment.reset(seed=0)
    assert not environment.done and environment.get_reward() == 0.0


def test_columns_are_passed_to_the_reset() -> None:
    environment = OpenEnvActions(URL, client=CountdownClient, reset_columns=["level"])
    environment.reset(seed=1, level="easy", id="x")
    assert environment._client.arguments == {"seed": 1, "level": "easy"}
    with pytest.raises(KeyError, match="level"):
        environment.reset(seed=1)


def test_typed_action_is_built_from_its_fields() -> None:
    environment = OpenEnvText(URL, "by", client=CountdownClient, action=Subtract)
    environment.reset(seed=0)
    environment.step("1")
    assert environment._client.action == Subtract("1")


@pytest.mark.parametrize(
    ("action", "fields", "message"),
    [
        (CheckedSubtract, {"by": "x"}, "^by: Input should be a valid integer[^\n]*$"),
        (CheckedSubtract, {"by": 1, "to": 2}, "^to: Extra inputs are not permitted$"),
        (Subtract, {"to": 2}, "unexpected keyword argument 'to'"),
        (None, "1", "action must be an object; got str"),
    ],
)
def test_wrong_action_is_one_line_and_no_step(action: Any, fields: Any, message: str) -> None:
    environment = OpenEnvActions(URL, client=CountdownClient, action=action)
    environment.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        environment.act(fields)
    assert environment.get_reward() == 0.0 and environment._client.left == 2


def test_server_without_rewards_gives_no_reward() -> None:
    environment = OpenEnvText(URL, "by", client=CountdownClient, client_settings={"is_rewarding": False})
    environment.reset(seed=0)
    assert environment.get_reward() == 0.0  # no action: the policy has earned nothing
    environment.step("1")
    with pytest.raises(ValueError, match="gave no reward"):
        environment.get_reward()


def test_observation_may_be_a_model_a_dataclass_or_text() -> None:
    environment = OpenEnv(URL, client=CountdownClient)
    assert environment._text(Subtract("1")) == environment._text({"by": "1"}) == '{"by": "1"}'
    assert environment._text(CheckedSubtract(by=1)) == '{"by": 1}' and environment._text("left: 1") == "left: 1"


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reward='mean' must be sum or last"):
        OpenEnv(URL, client=CountdownClient, reward="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="client: 'nowhere:Client' cannot be imported"):
        OpenEnv(URL, client="nowhere:Client")
    monkeypatch.setattr(openenv, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install openenv"):
        OpenEnv(URL)


@pytest.mark.parametrize(
    ("name", "settings", "tools", "has_step"),
    [("OpenEnvText", {"text_field": "by"}, set(), True), ("OpenEnvActions", {}, {"act"}, False)],
)
def test_definition_of_each_class(name: str, settings: dict[str, str], tools: set[str], has_step: bool) -> None:
    path = f"grpo_ray.tools.adapters.openenv:{name}"
    config = RolloutConfig(environment=path, settings={path: {"base_url": URL, **settings}})
    facts = load_definition(config).environments[None]
    assert facts.tools.names == tools and (facts.has_step, facts.has_reward) == (has_step, True)
