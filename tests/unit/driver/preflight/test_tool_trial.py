"""Tests of the trial of tools and environments, with a pool that answers at once."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_tools import Answer, ScriptedPool, tool_tokenizer

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.driver.preflight.tool_trial import EXCERPT, ToolReport, ToolTrial, example_arguments, try_tools
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.inference import conversation_sampler
from grpo_ray.tools import template
from grpo_ray.tools.sandbox.protocol import CallResult, Status
from grpo_ray.tools.turn_reader import TurnReader

MULTIPLY = 'rollout.tools=["grpo_ray.tools.examples:multiply"]'
COUNTER = "rollout.environment=hostile_tools:Counter"
SEVERAL = "rollout.environment={count: hostile_tools:Counter, narrow: hostile_tools:Narrow}"

Trial = Callable[..., tuple[ToolReport, ScriptedPool]]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Return a function that tries the tools of a config, with the answers of a scripted pool."""

    def run(
        *overrides: str,
        answer: Callable[[int, str, Any], Answer] = lambda row, operation, payload: "42",
        isolation: str | None = None,
        withheld: Sequence[str] = (),
        **columns: Any,
    ) -> tuple[ToolReport, ScriptedPool]:
        pool = ScriptedPool(answer)
        pool.isolation, pool.withheld = isolation, withheld
        monkeypatch.setattr(conversation_sampler, "EpisodePool", lambda definition, limits, folder, variables: pool)
        config = load_config(None, ["run.seed=3", *overrides])
        problem = Problem(
            id="0123456789abcdef",
            prompt=[{"role": "user", "content": "Q"}],
            solution="",
            columns=columns,
            where="games.jsonl, row 3",
        )
        try:
            return try_tools(config, [problem], tool_tokenizer()), pool
        finally:
            assert all(each.closed == 1 for each in pool.episodes)

    return run


def requests(pool: ScriptedPool) -> list[list[tuple[Any, ...]]]:
    return [each.requests for each in pool.episodes]


# Arguments


def test_example_arguments_have_the_types_of_required_parameters() -> None:
    properties = {
        "count": {"type": "integer"}, "ratio": {"type": "number"}, "name": {"type": "string"},
        "flag": {"type": "boolean"}, "items": {"type": "array"}, "fields": {"type": "object"},
        "color": {"type": "string", "enum": ["red", "blue"]}, "maybe": {"type": ["integer", "string"]},
        "any": {}, "optional": {"type": "integer"}, "empty": {"type": "null"}, "new": {"type": "matrix"},
    }  # fmt: skip
    required = [name for name in properties if name != "optional"]
    assert example_arguments({"parameters": {"properties": properties, "required": required}}) == {
        "count": 1, "ratio": 1.5, "name": "1", "flag": True, "items": [], "fields": {}, "color": "red", "maybe": 1,
        "any": "1", "empty": None, "new": None,
    }  # fmt: skip


@pytest.mark.parametrize("schema", [{}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}])
def test_example_arguments_of_no_parameters_are_none(schema: dict[str, Any]) -> None:
    assert example_arguments(schema) == {}


# Trials


def test_trial_leaves_no_process_that_reads_turns(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = TurnReader()
    monkeypatch.setattr(template, "_reader", reader)
    report, _ = trial(MULTIPLY)
    assert len(report.trials) == 1 and reader.pid is None


def test_tool_is_called_once_with_example_arguments(trial: Trial) -> None:
    report, pool = trial(MULTIPLY)
    assert report == ToolReport((ToolTrial("multiply", '{"a": 1, "b": 1}', "ok", "42", 0.0),), (), 0)
    assert requests(pool) == [[("call", ("multiply", {"a": 1, "b": 1}))]]
    assert pool.episodes[0].closed == 1 and pool.log[-1] == ("closed",)


def test_level_of_isolation_is_a_notice(trial: Trial) -> None:
    report, _ = trial(MULTIPLY, isolation="the code of the Python tool is confined")
    assert report.notices == ("the code of the Python tool is confined",)


def test_variables_that_tools_do_not_get_are_a_notice(trial: Trial) -> None:
    report, _ = trial(MULTIPLY, withheld=["HF_TOKEN", "SEARCH_KEY"])
    (notice,) = report.notices
    assert "do not get the variables HF_TOKEN, SEARCH_KEY; name those" in notice and "rollout.variables" in notice


def test_each_tool_of_an_environment_has_an_episode_of_its_own(trial: Trial) -> None:
    report, pool = trial(MULTIPLY, COUNTER)
    reset = ("reset", None)
    assert requests(pool) == [
        [reset],
        [reset],
        [reset, ("call", ("multiply", {"a": 1, "b": 1}))],
        [reset, ("call", ("crash", {}))],
        [reset, ("call", ("increase", {"by": 1}))],
    ]
    assert [each.name for each in report.trials] == ["reset", "reset", "multiply", "crash", "increase"]
    assert [each.arguments for each in report.trials[:2]] == ["", ""]
    assert all(each.closed == 1 for each in pool.episodes)


def test_episodes_have_the_seeds_and_columns_of_the_problem(trial: Trial) -> None:
    _, pool = trial(COUNTER, level=4)
    first, second = pool.episodes[0].opened, pool.episodes[1].opened
    assert first == second and first["columns"]["level"] == 4 and first["environment"] is None


def test_environment_of_the_problem_is_tried(trial: Trial) -> None:
    report, pool = trial(SEVERAL, environment="narrow")
    assert {each.opened["environment"] for each in pool.episodes} == {"narrow"}
    assert [each.name for each in report.trials] == ["reset of narrow", "reset of narrow", "show"]


def test_error_of_a_tool_is_no_notice(trial: Trial) -> None:
    """The arguments are made up, so a tool may well refuse them."""
    report, _ = trial(MULTIPLY, answer=lambda *request: CallResult("error", "ValueError: 1 is too small"))
    assert report.notices == () and report.trials[0].status == "error"
    assert report.trials[0].result == "ValueError: 1 is too small"


@pytest.mark.parametrize("status", ["timeout", "memory", "crash", "processes"])
def test_tool_that_does_not_return_is_a_notice(trial: Trial, status: Status) -> None:
    report, _ = trial(MULTIPLY, answer=lambda *request: CallResult(status, seconds=1.23456))
    (notice,) = report.notices
    assert "multiply" in notice and status in notice and "rollout.time_limit" in notice and "\n" not in notice
    assert report.trials == (ToolTrial("multiply", '{"a": 1, "b": 1}', status, "", 1.235),)


def test_resets_that_differ_are_a_notice(trial: Trial) -> None:
    numbers = itertools.count()
    report, _ = trial(COUNTER, answer=lambda *request: f"secret {next(numbers)}")
    (notice,) = report.notices
    assert "two resets with one seed" in notice and "`seed` of reset" in notice
    assert [each.result for each in report.trials[:2]] == ["secret 0", "secret 1"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("status", ["error", "timeout"])
def test_reset_that_fails_is_refused_in_one_line(trial: Trial, status: Status, failing: int) -> None:
    def answer(row: int, operation: str, payload: Any) -> Answer:
        return CallResult(status, "KeyError: 'level'\nTraceback") if row == failing else "begin"

    with pytest.raises(ConfigError) as caught:
        trial(COUNTER, answer=answer)
    message = str(caught.value)
    assert "\n" not in message and f"reset ended with {status}: KeyError: 'level' Traceback" in message
    assert message.startswith("rollout.environment:") and "rollout.settings" in message


def test_long_result_is_shown_as_its_beginning_in_one_line(trial: Trial) -> None:
    report, _ = trial(MULTIPLY, answer=lambda *request: "a\n b\t" * 100)
    result = report.trials[0].result
    assert result == "a b " * (EXCERPT // 4) + " ..." and "\n" not in result


def test_prompt_tokens_are_those_of_the_descriptions(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of the embedded policy has no descriptions; this one adds each tool's name."""
    tokenizer = tool_tokenizer()
    described = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", described)
    report, _ = trial(MULTIPLY)
    assert report.prompt_tokens > 100


# What is refused


@pytest.mark.parametrize(("columns", "words"), [({}, "no column 'environment'"), ({"environment": "x"}, "'x'")])
def test_problem_with_a_wrong_environment_is_refused(trial: Trial, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"^games\.jsonl, row 3 has .*{words}"):
        trial(SEVERAL, **columns)


def test_tool_that_does_not_exist_is_refused(trial: Trial) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tools.*'multipy'.*multiply"):
        trial('rollout.tools=["grpo_ray.tools.examples:multipy"]')
