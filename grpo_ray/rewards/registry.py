"""The shelf of rewards: each a function in TRL's signature, found by name or as `package.module:function`.

    reward = load_reward("soft_overlong", max_length=4096, buffer=512)
    rewards = reward(completions=..., completion_ids=...)  # list of floats, None where it does not apply

A new reward is one function in this folder and one row in `REWARDS`. Importing this package imports nothing
heavy.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.errors import RewardError
from grpo_ray.rewards.correctness import accuracy_reward, start_grading
from grpo_ray.rewards.format import boxed_format, tag_format, think_format
from grpo_ray.rewards.length import EasedConciseness, conciseness, cosine_length, repetition_penalty, soft_overlong

__all__ = ["REWARDS", "ConfiguredReward", "accuracy_reward", "load_reward", "load_rewards", "start_grading"]

REWARDS: dict[str, Callable[..., Any]] = {
    "correctness": accuracy_reward,
    "boxed_format": boxed_format,
    "tag_format": tag_format,
    "think_format": think_format,
    "soft_overlong": soft_overlong,
    "conciseness": conciseness,
    "eased_conciseness": EasedConciseness,
    "cosine_length": cosine_length,
    "repetition_penalty": repetition_penalty,
}


class ConfiguredReward:
    """A reward function with its settings filled in. Its `__name__` is what TRL names its metrics by."""

    def __init__(self, name: str, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.__name__ = name
        self.function = function
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **(kwargs | self.settings))


def load_reward(name: str, **settings: Any) -> Callable[..., Any]:
    """A reward by its name in `REWARDS`, or by `package.module:function`, with `settings` as its keyword
    arguments.

    A class is made once, with its settings, and then called like a function; if it has `state_dict` and
    `load_state_dict` (JSON's types), its state is kept in every checkpoint.

    An `async def` function stays one: TRL awaits it beside the others. Raises RewardError for a name that leads
    nowhere, with the nearest that does, and for a setting that the function does not take.
    """
    function = _import(name) if ":" in name else REWARDS.get(name)
    if function is None:
        raise RewardError(f"no reward is called {name!r}{_nearest(name, REWARDS)}; known: {', '.join(REWARDS)}")
    parameters = inspect.signature(function).parameters
    for setting in settings:
        if setting not in parameters:
            open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            # The shelf's own functions swallow TRL's columns in **kwargs, so a typo would vanish there.
            if name in REWARDS or not open_ended:
                named = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
                raise RewardError(f"reward {name!r} has no setting {setting!r}{_nearest(setting, named)}")
    # Of a function of one's own, a keyword without a default may be a column of the data or TRL's to give.
    missing = [
        each.name
        for each in parameters.values()
        if (name in REWARDS or inspect.isclass(function))
        and each.kind is each.KEYWORD_ONLY
        and each.default is each.empty
        and each.name not in settings
    ]
    if missing:
        raise RewardError(f"reward {name!r} needs a value for {', '.join(missing)}")
    if inspect.isclass(function):
        made: Any = function(**settings)
        made.__name__ = name.rpartition(":")[2]
        return made
    if inspect.iscoroutinefunction(function):
        return AsyncConfiguredReward(name.rpartition(":")[2], function, settings)
    return ConfiguredReward(name.rpartition(":")[2], function, settings)


def load_rewards(config: RewardsConfig) -> list[Callable[..., Any] | str]:
    """The reward functions that a config names, in its order, each with its settings.

    A name with a slash and no colon is a reward model, a hub id or a folder; TRL loads it, so the name is given back.
    Raises RewardError as `load_reward` does, and for settings of a reward that is not used.
    """
    if unused := sorted(set(config.settings) - set(config.functions)):
        raise RewardError(f"rewards.settings has {unused[0]!r}, and rewards.functions does not use it")
    loaded: list[Callable[..., Any] | str] = []
    for name in config.functions:
        settings = dict(config.settings.get(name, {}))
        if name == "correctness":
            settings = accuracy_settings(config) | settings
        is_model = "/" in name and ":" not in name
        loaded.append(name if is_model else load_reward(name, **settings))
    return loaded


def accuracy_settings(config: RewardsConfig) -> dict[str, Any]:
    """The keyword arguments of `accuracy_reward` that have fields of their own in the config."""
    return {"strict": config.strict, "boolean_share": config.boolean_share, "time_limit": config.time_limit}


def heldout_reward(config: RewardsConfig) -> Callable[..., list[float | None]]:
    """The accuracy reward as held-out problems are measured with: every boolean problem counts."""
    return load_reward("correctness", **(accuracy_settings(config) | {"boolean_share": 1.0}))


class AsyncConfiguredReward(ConfiguredReward):
    """The same for an `async def` reward, which TRL recognises by its call and awaits beside the others."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return await self.function(*args, **(kwargs | self.settings))


def _import(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RewardError(f"reward {path!r}: no module {error.name!r}; is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        nearest = _nearest(function_name, vars(module))
        raise RewardError(f"reward {path!r}: {module_name} has no function {function_name!r}{nearest}")
    return function


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""
