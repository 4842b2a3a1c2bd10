"""Environments of OpenEnv: a completion is a session with an OpenEnv server, through the client of the package openenv.

Start the server yourself, where all workers can reach it, and let it accept one session for each completion that is
generated at the same time (`max_concurrent_envs` of its app; the default is 1). Then name a class in the config:

    rollout:
      environment: "grpo_ray.tools.adapters.openenv:OpenEnvText"       # a turn's text is the action
      settings:
        "grpo_ray.tools.adapters.openenv:OpenEnvText": {base_url: "http://head:8000", text_field: guess}

    rollout:
      environment: "grpo_ray.tools.adapters.openenv:OpenEnvActions"    # the policy calls act({...})
      settings:
        "grpo_ray.tools.adapters.openenv:OpenEnvActions": {base_url: "http://head:8000"}

or describe each action to the policy as a separate tool, which it learns faster than one tool for all actions:

    class Chess(OpenEnv):
        def __init__(self, base_url: str):
            super().__init__(base_url, client=ChessEnv, action=ChessAction)

        def move(self, move: str) -> str:
            \"""Move a piece.

            Args:
                move: The move, such as e2e4.
            \"""
            return self._take({"move": move})

A module of your own has a second advantage: its imports are done once, before the processes of completions are forked;
a client named by its path in the config is imported by each of them.

Sandbox processes have no environment variables such as tokens or proxies. A server that does not answer within
`rollout.time_limit` ends the completion.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from grpo_ray.config.import_path import import_callable
from grpo_ray.errors import ConfigError

# The import takes seconds: here it is done once, before the processes of completions are forked.
with contextlib.suppress(ImportError):  # the constructor raises an error that names the package
    import openenv.core.generic_client  # noqa: F401

GENERIC_CLIENT = "openenv.core:GenericEnvClient"
"""Client that needs no package of the environment: its actions and observations are dictionaries."""
NOT_SHOWN = frozenset({"done", "reward", "metadata"})
"""Fields of an observation that are not part of its text."""


class OpenEnv:
    """Session with an OpenEnv server; base of environments that name their actions.

    Args:
        base_url: address of the server, http or ws.
        client: class of the client, or its path `package.module:Class`.
        action: class of the actions, a pydantic model or a dataclass, or its path; None if actions are dictionaries.
        observation_field: field of an observation that is shown to the policy; None shows all fields as JSON.
        reset_columns: columns of a problem that are passed to the server's reset.
        reward: `sum` of the rewards of all actions, or the `last` one.
        client_settings: further arguments of the client's constructor.
    """

    done = False
    """True if the server has ended the episode."""

    def __init__(
        self,
        base_url: str,
        client: str | Callable[..., Any] = GENERIC_CLIENT,
        action: str | Callable[..., Any] | None = None,
        observation_field: str | None = None,
        reset_columns: Sequence[str] = (),
        reward: Literal["sum", "last"] = "sum",
        client_settings: Mapping[str, Any] | None = None,
    ):
        if reward not in ("sum", "last"):
            raise ConfigError(f"reward={reward!r} must be sum or last")
        if client == GENERIC_CLIENT and find_spec("openenv") is None:
            raise ConfigError("environments of OpenEnv need its package on every node: pip install openenv")
        client_class = import_callable(client, "client") if isinstance(client, str) else client
        self._action = import_callable(action, "action") if isinstance(action, str) else action
        opened = client_class(base_url=base_url, **(client_settings or {}))
        self._client = opened.sync() if hasattr(opened, "sync") else opened
        self._observation_field, self._reset_columns, self._reward = observation_field, reset_columns, reward

    def reset(self, *, seed: int, **columns: Any) -> str:
        """Begin an episode on the server, and return its first observation, which is appended to the prompt.

        Args:
            seed: passed to the server; the same for all completions of a group.
            columns: the problem's columns.

        Raises:
            KeyError: the problem has no column of `reset_columns`.
        """
        result = self._client.reset(seed=seed, **{name: columns[name] for name in self._reset_columns})
        self._rewards: list[float | None] = []
        self.done = bool(result.done)
        return self._text(result.observation)

    def get_reward(self) -> float:
        """Return the sum of the rewards, or the last one; 0 without an action.

        Raises:
            ValueError: the server has given no reward for any action.
        """
        given = [each for each in self._rewards if each is not None]
        if self._rewards and not given:
            raise ValueError("the OpenEnv server gave no reward")
        return float(given[-1] if given and self._reward == "last" else sum(given))

    def _take(self, fields: Mapping[str, Any]) -> str:
        """Take an action, and return the observation. Raises ValueError for wrong fields, and after the end."""
        if self.done:
            raise ValueError("the episode has ended")
        action = dict(fields) if self._action is None else _build(self._action, fields)
        result = self._client.step(action)
        self._rewards.append(None if result.reward is None else float(result.reward))
        self.done = bool(result.done)
        return self._text(result.observation)

    def _text(self, observation: Any) -> str:
        if self._observation_field is not None:
            shown = _fields(observation)[self._observation_field]
            return shown if isinstance(shown, str) else _json(shown)
        if isinstance(observation, str):
            return observation
        return _json({name: value for name, value in _fields(observation).items() if name not in NOT_SHOWN})


class OpenEnvText(OpenEnv):
    """OpenEnv environment in which the text of a turn is the action.

    Args:
        text_field: field of the action that gets the text.
        action_fields: further fields of every action.
        settings: see `OpenEnv`.
    """

    def __init__(self, base_url: str, text_field: str, action_fields: Mapping[str, Any] | None = None, **settings: Any):
        super().__init__(base_url, **settings)
        self._text_field, self._action_fields = text_field, dict(action_fields or {})

    def step(self, message: str) -> str:
        """Take the text of a turn as the action, and return the observation, which answers it."""
        return self._take({**self._action_fields, self._text_field: message})


class OpenEnvActions(OpenEnv):
    """OpenEnv environment with one tool, which takes any action as a JSON object.

    The policy does not see the fields of an action unless the prompt or the first observation describes them.
    """

    def act(self, action: dict) -> str:
        """Take an action in the environment.

        Args:
            action: The fields of the action.

        Returns:
            What is observed after the action.
        """
        if not isinstance(action, dict):
            raise ValueError(f"action must be an object; got {type(action).__name__}")
        return self._take(action)


def _build(action: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Return an action object. Raises ValueError in one line if the fields are wrong."""
    import pydantic

    try:
        return action(**fields)
    except pydantic.ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc'])) or 'action'}: {each['msg']}" for each in error.errors())
        raise ValueError("; ".join(wrong)) from None
    except TypeError as error:  # of a dataclass
        raise ValueError(str(error)) from None


def _fields(observation: Any) -> dict[str, Any]:
    """Return the fields of a dictionary, a pydantic model or a dataclass. Raises TypeError for anything else."""
    if isinstance(observation, Mapping):
        return dict(observation)
    if hasattr(observation, "model_dump"):
        dumped: dict[str, Any] = observation.model_dump()
        return dumped
    return dataclasses.asdict(observation)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
