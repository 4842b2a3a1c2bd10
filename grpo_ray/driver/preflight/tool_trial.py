"""Trial of a run's tools and environments before workers start: one call of each, and two resets with one seed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError
from grpo_ray.tools.definitions import NO_TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.conversations import ConversationSampler
    from grpo_ray.tools.conversation import Start
    from grpo_ray.tools.sandbox.protocol import CallResult

EXAMPLES: Mapping[str, Any] = {
    "integer": 1, "number": 1.5, "string": "1", "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
"""JSON type of an argument -> value of the trial's call."""
EXCERPT = 80
"""Characters of a result that are shown."""


@dataclass(frozen=True)
class ToolTrial:
    """One call of a tool, or one reset of an environment."""

    name: str
    arguments: str
    """Arguments of the call as JSON; "" for a reset."""
    status: str
    """Status of the sandbox: ok, error, timeout ..."""
    result: str
    """Beginning of the result, or of the error."""
    seconds: float


@dataclass(frozen=True)
class ToolReport:
    """Findings of a trial."""

    trials: tuple[ToolTrial, ...]
    notices: tuple[str, ...]
    """What the user should know before training."""
    prompt_tokens: int
    """Tokens that the descriptions of the tools add to the first problem's prompt."""


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for the required parameters of a tool.

    Args:
        schema: `function` of a tool's JSON schema.
    """
    parameters = schema.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {name: _example(properties.get(name) or {}) for name in parameters.get("required") or ()}


def _example(parameter: Mapping[str, Any]) -> Any:
    if choices := parameter.get("enum"):
        return choices[0]
    kind = parameter.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind)


def try_tools(config: Config, problem: Problem, tokenizer: "PreTrainedTokenizerBase") -> ToolReport:
    """Call every tool of a problem once, and reset its environment twice with one seed.

    The arguments are made up, so an error of a tool is no reason to refuse the run. One that hangs or crashes, and a
    reset that differs from the one before, is a notice.

    Args:
        problem: the first problem of the training split.

    Raises:
        ConfigError: a tool or environment cannot be used, its reset fails, or the chat template cannot render tools.
        DataError: the problem names no environment, or one that does not exist.
    """
    from grpo_ray.inference.conversations import ConversationSampler

    with ConversationSampler(config, tokenizer) as sampler:
        start = sampler.start(problem.as_row(epoch=0, index=0), {})
        tools = sampler.definition.tool_set(start.environment)
        trials: list[ToolTrial] = []
        notices: list[str] = []
        has_environment = start.environment in sampler.definition.environments
        if has_environment:
            trials, notices = _try_resets(sampler, start)
        for schema in tools.schemas:
            name, arguments = schema["function"]["name"], example_arguments(schema["function"])
            episode = sampler.open(start)
            if has_environment:
                episode.reset()
            result = episode.call(name, arguments).result()
            episode.close()
            trials.append(_trial(name, json.dumps(arguments, ensure_ascii=False), result))
            if result.status not in ("ok", "error"):
                notices.append(
                    f"the tool {name} ended with {result.status} in its trial; see rollout.time_limit and others"
                )
        plain, described = sampler.template.render([start.messages, start.messages], [NO_TOOLS, tools])
    return ToolReport(tuple(trials), tuple(notices), len(described) - len(plain))


def _try_resets(sampler: "ConversationSampler", start: "Start") -> tuple[list[ToolTrial], list[str]]:
    """Reset the environment in two processes; return the trials, and a notice if they differ.

    Raises ConfigError if a reset fails.
    """
    results = []
    for _ in range(2):
        episode = sampler.open(start)
        results.append(episode.reset().result())
        episode.close()
        if results[-1].status != "ok":
            raise ConfigError(
                f"rollout.environment: reset ended with {results[-1].status}: {_excerpt(results[-1].text)}; correct "
                "the environment, or rollout.settings"
            )
    trials = [_trial("reset", "", result) for result in results]
    if results[0].text == results[1].text:
        return trials, []
    return trials, [
        "rollout.environment: two resets with one seed return different texts, so a resumed run is not bit for bit the "
        "same; take all random numbers from the argument `seed` of reset"
    ]


def _trial(name: str, arguments: str, result: "CallResult") -> ToolTrial:
    return ToolTrial(name, arguments, result.status, _excerpt(result.text), round(result.seconds, 3))


def _excerpt(text: str | None) -> str:
    words = " ".join((text or "").split())
    return words if len(words) <= EXCERPT else f"{words[:EXCERPT]} ..."
