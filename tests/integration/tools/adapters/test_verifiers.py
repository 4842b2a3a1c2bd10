"""The verifiers adapter with real environments of verifiers, version 0, in sandbox processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import Episode, EpisodePool, SandboxLimits

verifiers = pytest.importorskip("verifiers", reason="needs the package verifiers")
if not hasattr(verifiers, "MultiTurnEnv"):
    pytest.skip("needs verifiers<0.4", allow_module_level=True)

HELPERS = Path(__file__).parents[3] / "helpers"
WAIT = 240.0
"""Seconds after which a test gives up; far more than any of them takes."""
ROW = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}],
    "solution": "5", "level": "easy", "task": "sums", "id": "x",
}  # fmt: skip
"""Columns of a problem."""

Opener = Callable[..., Episode]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Return a function that opens an episode of an environment's class."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    pools: list[EpisodePool] = []

    def opener(path: str, settings: dict[str, Any] | None = None, tools: tuple[str, ...] = ()) -> Episode:
        config = RolloutConfig(
            tools=tools, environment=path, settings={path: settings or {}}, time_limit=60.0, memory_gib=4.0
        )
        pools.append(EpisodePool(load_definition(config), SandboxLimits.of(config)))
        return pools[-1].open(None, seed=0, columns=ROW, call_seed=0)

    yield opener
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(("answer", "reward"), [(" 5\n", 2.0), ("6", 0.0)])
def test_single_turn(begin: Opener, answer: str, reward: float) -> None:
    settings = {"environment": "verifiers_games:load_single", "arguments": {"weight": 2.0}}
    episode = begin("grpo_ray.tools.adapters.verifiers:Verifiers", settings)
    reset = episode.reset().result(WAIT)
    assert (reset.status, reset.text, reset.done) == ("ok", None, False)
    step = episode.step(answer).result(WAIT)
    assert (step.status, step.text, step.done) == ("ok", None, True)
    assert episode.reward().result(WAIT).value == reward


def test_several_turns(begin: Opener) -> None:
    episode = begin("verifiers_games:Corrections")
    assert episode.reset().result(WAIT).text == " Reply with a number."
    assert [episode.step(text).result(WAIT).text for text in ("1", "9", "5")] == ["higher", "lower", None]
    reward = episode.reward().result(WAIT)
    assert reward.value == 0.625  # 1 - 3 turns x 0.125


def test_right_answer_ends_the_completion(begin: Opener) -> None:
    episode = begin("verifiers_games:Corrections")
    episode.reset()
    step = episode.step("5").result(WAIT)
    assert (step.text, step.done) == (None, True)
    assert episode.reward().result(WAIT).value == 0.875


def test_completion_cut_before_its_first_turn_has_no_reward(begin: Opener) -> None:
    episode = begin("verifiers_games:Corrections")
    episode.reset()
    assert episode.reward().result(WAIT).value == 0.0


def test_error_of_the_environment_makes_the_reward_unknown(begin: Opener) -> None:
    episode = begin("verifiers_games:Corrections")
    episode.reset()
    step = episode.step("break").result(WAIT)
    assert (step.status, step.text, step.done) == ("ok", None, True)
    reward = episode.reward().result(WAIT)
    assert reward.status == "error" and reward.text is not None and "the game broke" in reward.text


def test_tools_of_a_tool_env_are_called_as_tools(begin: Opener) -> None:
    episode = begin("verifiers_games:Adding", tools=("verifiers_games:add",))
    episode.reset()
    assert episode.call("add", {"a": 2, "b": 3}).result(WAIT).text == "5"
    assert episode.step("5").result(WAIT).done
    assert episode.reward().result(WAIT).value == 1.0
