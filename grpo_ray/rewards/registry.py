"""Registry of reward functions in TRL's signature, loaded by name or as `package.module:function`.

    reward = load_reward("soft_overlong", max_length=4096, buffer=512)
    rewards = reward(completions=..., completion_ids=...)  # list of floats; None where the reward does not apply

A new reward is one function in this package and one row in `REWARDS`; one that requires the column `solution` is also
named in `SOLUTION_REWARDS` (`config/reward_names.py`), so that rows without a solution are refused. Importing this
module imports no heavy library.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_ray.config.fields import values_text
from grpo_ray.config.import_path import describe_own_error, import_callable
from grpo_ray.config.reward_names import REWARD_SCORES, is_reward_model
from grpo_ray.config.schema import Config, RewardsConfig
from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError, GrpoRayError, RewardError
from grpo_ray.rewards.choice import choice
from grpo_ray.rewards.code_tests import CodeTests
from grpo_ray.rewards.correctness import accuracy_reward, start_grading
from grpo_ray.rewards.environment import environment_reward
from grpo_ray.rewards.format import boxed_format, tag_format, think_format
from grpo_ray.rewards.isolated import IsolatedReward, Limits, StatefulIsolatedReward
from grpo_ray.rewards.json_format import JsonFormat
from grpo_ray.rewards.judge import Judge
from grpo_ray.rewards.length import EasedConciseness, conciseness, cosine_length, repetition_penalty, soft_overlong
from grpo_ray.rewards.reward_models import ModelReward, actor_name

__all__ = ["REWARDS", "ConfiguredReward", "accuracy_reward", "load_reward", "load_rewards", "start_grading"]

REWARDS: dict[str, Callable[..., Any]] = {
    "correctness": accuracy_reward,
    "choice": choice,
    "code_tests": CodeTests,
    "boxed_format": boxed_format,
    "tag_format": tag_format,
    "think_format": think_format,
    "json_format": JsonFormat,
    "soft_overlong": soft_overlong,
    "conciseness": conciseness,
    "eased_conciseness": EasedConciseness,
    "cosine_length": cosine_length,
    "repetition_penalty": repetition_penalty,
    "environment": environment_reward,
    "judge": Judge,
}


TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Keyword arguments that TRL passes to every reward, besides the columns of the dataset."""


class ConfiguredReward:
    """A reward function with its settings bound. TRL names its metrics by `__name__`."""

    def __init__(
        self, name: str, function: Callable[..., Any], settings: dict[str, Any], ignored: frozenset[str] = frozenset()
    ) -> None:
        """
        Args:
            ignored: dataset columns that are not passed to the function, because a setting has the same name.
        """
        self.__name__ = name
        self.function = function
        self.settings = settings
        self.ignored = ignored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **self._arguments(kwargs))

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name not in self.ignored} | self.settings


class AsyncConfiguredReward(ConfiguredReward):
    """A configured `async def` reward. TRL detects its coroutine `__call__` and awaits it with the other async ones."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return await self.function(*args, **self._arguments(kwargs))


def load_reward(name: str, **settings: Any) -> Callable[..., Any]:
    """Load a reward by its name in `REWARDS` or as `package.module:function`, with `settings` as keyword arguments.

    A class is instantiated once with its settings and then called like a function; if it has `state_dict` and
    `load_state_dict` (JSON types), its state is saved in every checkpoint. An `async def` function stays a coroutine
    function.

    Raises:
        RewardError: The name does not exist (the message suggests the nearest one), a setting is not a parameter of the
            function, a required setting is missing, or a class has an asynchronous `__call__`.
    """
    function = _import_function(name) if ":" in name else REWARDS.get(name)
    if function is None:
        raise RewardError(
            f"unknown reward {name!r}{_suggestion(name, REWARDS)}; known: {', '.join(REWARDS)}, and functions of your "
            "own as package.module:function"
        )
    _check_function(name, function, settings)
    short_name = name.rpartition(":")[2]
    if inspect.isclass(function):
        instance = _create(name, function, settings)
        instance.__name__ = short_name
        return instance
    if inspect.iscoroutinefunction(function):
        return AsyncConfiguredReward(short_name, function, settings)
    # A keyword-only parameter of our own functions is a setting, even if the dataset has a column of that name.
    ignored = _keyword_only(function) - TRL_ARGUMENTS if name in REWARDS else frozenset()
    return ConfiguredReward(short_name, function, settings, ignored)


def _create(name: str, cls: type, settings: Mapping[str, Any]) -> Any:
    """Create the instance of a reward that is a class. Raises RewardError."""
    try:
        return cls(**settings)
    except GrpoRayError:
        raise
    except Exception as error:  # the user's own code may raise any class
        given = f"rewards.settings of {', '.join(settings)}" if settings else "no rewards.settings"
        raise RewardError(f"reward {name!r} cannot be created with {given}: {describe_own_error(error)}") from error


def _keyword_only(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def _check_function(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise RewardError for a class that TRL would call wrongly, and for wrong settings."""
    _check_settings(name, function, settings)
    if inspect.isclass(function) and inspect.iscoroutinefunction(function.__call__):
        raise RewardError(
            f"reward {name!r} has an asynchronous __call__, which TRL does not await; use an `async def` function"
        )


def _check_settings(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise RewardError for a setting that the function does not accept, and for a required one that is missing.

    The values of a built-in reward's settings are checked against its annotations: most of these rewards read them only
    when they are called, which is after the workers have started.
    """
    parameters = inspect.signature(function).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for setting in settings:
        # The registry's own functions accept TRL's columns in **kwargs, so a typo would pass unnoticed there.
        if setting not in parameters and (name in REWARDS or not accepts_any):
            keyword_only = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
            known = f", but {', '.join(keyword_only)}" if keyword_only else ""
            raise RewardError(f"reward {name!r} has no setting {setting!r}{known}{_suggestion(setting, keyword_only)}")
        if name in REWARDS and setting not in TRL_ARGUMENTS:
            _check_value(f"rewards.settings.{name}.{setting}", settings[setting], parameters[setting].annotation)
    # In a user's function, a keyword without a default may be a column of the dataset or an argument of TRL's.
    if name not in REWARDS and not inspect.isclass(function):
        return
    missing = [
        each.name
        for each in parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty and each.name not in settings
    ]
    if missing:
        raise RewardError(f"reward {name!r} needs a value for {', '.join(missing)}; set it in rewards.settings")


def _check_value(field: str, value: Any, annotation: Any) -> None:
    """Raise RewardError if the value of a setting does not have the type of its parameter."""
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    text = json.dumps(value, default=str, skipkeys=True)
    try:
        # As JSON, since a YAML has lists for tuples; strict, since the value is passed on as it is.
        adapter.validate_json(text, strict=True)
    except ValidationError:
        raise RewardError(f"{field}={value!r} must be {values_text(adapter.json_schema())}") from None


def load_rewards(config: RewardsConfig, names: Sequence[str] | None = None) -> list[Callable[..., Any]]:
    """Load the reward functions of a config in its order, each with its settings.

    A name with a slash and no colon is a reward model, a hub id or a folder, which the run's actor loads
    (`reward_models.py`).

    Args:
        names: entries of `rewards.functions` to load; None: all.

    Raises:
        RewardError: As in `load_reward`; there are settings for a reward that is not used; or the folder of a reward
            model does not exist or has no config.json.
    """
    # `REWARD_SCORES` may be held-out scores only (`config/checks.py`).
    if unused := sorted(set(config.settings) - {*config.functions, *REWARD_SCORES}):
        raise RewardError(
            f"rewards.settings has {unused[0]!r}, which rewards.functions does not name; add it there or remove it"
        )
    loaded: list[Callable[..., Any]] = []
    for name in config.functions if names is None else names:
        settings = dict(config.settings.get(name, {}))
        if name == "correctness":
            of_fields = correctness_settings(config)
            if doubled := sorted(settings.keys() & of_fields.keys()):
                # Held-out problems and early grading read the field.
                raise RewardError(f"rewards.settings.correctness.{doubled[0]}: set rewards.{doubled[0]} instead")
            settings = of_fields | settings
        elif name == "cosine_length":  # with the same verifier processes as `correctness`
            settings = {"strict": config.strict, "time_limit": config.time_limit} | settings
        if config.isolate and ":" in name:
            loaded.append(isolated_reward(config, name, settings))
        elif is_reward_model(name):
            if name.startswith(("/", "./", "../")) and not Path(name, "config.json").is_file():
                raise RewardError(f"rewards.functions: the reward model {name} does not exist: it has no config.json")
            loaded.append(ModelReward(name, actor_name(config)))
        else:
            loaded.append(load_reward(name, **settings))
    return loaded


def isolated_reward(config: RewardsConfig, name: str, settings: Mapping[str, Any]) -> IsolatedReward:
    """Return a function or class of the user as a reward in a process of its own. Raises RewardError."""
    function = _import_function(name)
    _check_function(name, function, settings)
    limits = Limits(seconds=config.isolate_seconds, memory_gib=config.isolate_memory_gib)
    is_stateful = inspect.isclass(function) and hasattr(function, "state_dict")
    return (StatefulIsolatedReward if is_stateful else IsolatedReward)(name, settings, limits)


def own_reward(config: RewardsConfig, name: str) -> Callable[..., Any]:
    """Load a function of the user, isolated where the config says so. Raises RewardError."""
    settings = config.settings.get(name, {})
    return isolated_reward(config, name, settings) if config.isolate else load_reward(name, **settings)


def correctness_settings(config: RewardsConfig) -> dict[str, Any]:
    """Return the keyword arguments of `accuracy_reward` that are fields of the config."""
    return {"strict": config.strict, "boolean_share": config.boolean_share, "time_limit": config.time_limit}


def heldout_correctness(config: RewardsConfig) -> Callable[..., list[float | None]]:
    """Return the correctness reward for held-out problems: all boolean problems count."""
    return load_reward("correctness", **(correctness_settings(config) | {"boolean_share": 1.0}))


def needs_solutions(config: Config, source: str = "") -> bool:
    """Return True if any reward, or the score of held-out completions, cannot be computed without solutions.

    Such rewards are the built-in ones that read the solution, and the user's own functions with a parameter `solution`
    that has no default. Raises RewardError if a function of the user cannot be imported.

    Args:
        source: name of a source of a mixture, to check the rewards of its problems only; "" for all rewards.
    """
    own = [name for name in (*config.rewards_of(source), config.heldout_score_of(source)) if ":" in name]
    return config.needs_solutions_of(source) or any(map(_requires_solution, map(_import_function, own)))


def _requires_solution(function: Callable[..., Any]) -> bool:
    called: Any = function.__call__ if inspect.isclass(function) else function
    parameter = inspect.signature(called).parameters.get("solution")
    return parameter is not None and parameter.default is parameter.empty


def _import_function(path: str) -> Callable[..., Any]:
    try:
        return import_callable(path, "rewards.functions")
    except ConfigError as error:
        raise RewardError(str(error)) from error


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelled name. Names of settings are short, so a likeness of 0.4 is close enough."""
    return suggestion(name, known, likeness=0.4)
