"""Trial of a run's tools and environments before workers start: one call of each, and two resets with one seed."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError
from grpo_ray.tools.definitions import NO_TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.conversation_sampler import ConversationSampler
    from grpo_ray.tools.conversation import Start
    from grpo_ray.tools.sandbox.protocol import CallResult

EXAMPLES: Mapping[str, Any] = {
    "integer": 1, "number": 1.5, "string": "1", "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
"""JSON type of an argument -> value that is passed in a trial."""
PHASE = "trying tools and environments"
"""Phase shown during the trial."""
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
    """Messages for the user."""
    prompt_tokens: int
    """Most tokens that descriptions of tools add to a prompt."""


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


def try_tools(config: Config, problems: Iterable[Problem], tokenizer: "PreTrainedTokenizerBase") -> ToolReport:
    """Call every tool once, and reset every environment twice with one seed.

    The arguments are made up, so an error of a tool is no reason to refuse the run. A tool that hangs or crashes, and
    two resets that differ, are reported as notices.

    Args:
        problems: problems of all splits; each environment is tried with the first problem that names it.

    Raises:
        ConfigError: a tool or environment cannot be used, its reset fails, or the chat template cannot render tools.
        DataError: a problem names no environment, or one that does not exist.
    """
    from grpo_ray.inference.conversation_sampler import ConversationSampler
    from grpo_ray.tools.template import close_reader

    trials: list[ToolTrial] = []
    notices: list[str] = []
    prompt_tokens = 0
    with contextlib.ExitStack() as stack:
        stack.callback(close_reader)  # the driver needs no reader of turns during a run, only the workers do
        sampler = stack.enter_context(ConversationSampler(config, tokenizer))
        starts = _first_starts(sampler, problems)
        for environment in sampler.definition.environments:
            if environment not in starts:
                notices.append(f"rollout.environment: no problem has {environment!r}")
        for environment, start in starts.items():
            if environment in sampler.definition.environments:
                resets, found = _try_resets(sampler, start)
                trials += resets
                notices += found
            tools = sampler.definition.tool_set(environment)
            for schema in tools.schemas:
                trial = _try_call(sampler, start, schema["function"])
                trials.append(trial)
                if trial.status not in ("ok", "error"):
                    notices.append(
                        f"the tool {trial.name} ended with {trial.status} in its trial: {trial.result}; see "
                        "rollout.time_limit, rollout.memory_gib, rollout.max_processes, rollout.disk_gib and "
                        "rollout.max_files"
                    )
            plain, described = sampler.template.render([start.messages, start.messages], [NO_TOOLS, tools])
            prompt_tokens = max(prompt_tokens, len(described) - len(plain))
        if sampler.pool.isolation is not None:
            notices.append(sampler.pool.isolation)
        if sampler.pool.withheld:
            notices.append(
                f"processes of your tools do not get the variables {', '.join(sampler.pool.withheld)}; name those that "
                "a module reads while it is imported in rollout.variables"
            )
    return ToolReport(tuple(trials), tuple(notices), prompt_tokens)


def _first_starts(sampler: "ConversationSampler", problems: Iterable[Problem]) -> "dict[str | None, Start]":
    """Return the first start of each environment by its name; key None: completions without an environment."""
    starts: dict[str | None, Start] = {}
    # Each problem names its environment: a name that does not exist would end the run at the step that draws it.
    for problem in problems:
        start = sampler.start(problem.as_row(epoch=0, index=0), {})
        sampler.definition.require(start.environment, problem.where)
        starts.setdefault(start.environment, start)
        if not sampler.definition.has_named:
            break
    return starts


def _try_call(sampler: "ConversationSampler", start: "Start", function: Mapping[str, Any]) -> ToolTrial:
    """Call a tool in a process of its own, after the environment's reset."""
    name, arguments = function["name"], example_arguments(function)
    episode = sampler.open(start)
    if start.environment in sampler.definition.environments:
        episode.reset()
    result = episode.call(name, arguments).result()
    episode.close()
    return _trial(name, json.dumps(arguments, ensure_ascii=False), result)


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
    name = f"reset of {start.environment}" if start.environment else "reset"
    trials = [_trial(name, "", result) for result in results]
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
