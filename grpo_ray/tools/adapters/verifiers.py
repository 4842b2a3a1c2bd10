"""Environments of the package verifiers, version 0 (`verifiers>=0.2,<0.4`): SingleTurnEnv, MultiTurnEnv and ToolEnv.

It is best to write a module of your own, which creates the environment once, before the processes of completions are
forked:

    import verifiers as vf
    from grpo_ray.tools.adapters.verifiers import Verifiers

    ENVIRONMENT = vf.load_environment("wordle")

    class Wordle(Verifiers):
        def __init__(self):
            super().__init__(ENVIRONMENT)

    rollout: {environment: "my_module:Wordle", max_turns: 20}

Without one, each completion's process creates the environment anew, with its dataset, and within `rollout.time_limit`:

    rollout:
      environment: "grpo_ray.tools.adapters.verifiers:Verifiers"
      settings: {"grpo_ray.tools.adapters.verifiers:Verifiers": {environment: "wordle:load_environment"}}

The problems come from `data`, as in every run: write the rows of the environment's own dataset to a file first. A
problem's prompt must be the one that the environment expects, with its system prompt; its solution is the `answer`.

- A turn without a tool call goes to the environment, which answers it or ends the completion. `rollout.max_turns` must
  exceed the environment's own limit: the last turn that it allows does not reach the environment.
- The tools of a ToolEnv must also be named in `rollout.tools`, and are called as such: the environment's `env_response`
  and `call_tool` are not used for them, and its state has no turns with calls. A StatefulToolEnv is refused.
- An error in a reward function gives the reward 0, with a line in the log of verifiers; the package does this.
- Environments that call a model themselves, such as those with a judge, need their key as an argument: the processes
  of completions have no environment variables such as keys. The policy's own engine is not available to them.

Version 1 of the environments, which call the model through a proxy, is not supported.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from grpo_ray.config.import_path import import_callable
from grpo_ray.errors import ConfigError

NEEDED = ("MultiTurnEnv", "Response", "ResponseMessage", "OpenAIChatCompletionsClient", "Error")
"""Names of verifiers that are used here."""
METHODS = ("init_state", "setup_state", "add_model_response", "get_prompt_messages", "is_completed", "cleanup")
"""Methods of an environment that are used here."""


def library() -> Any:
    """Import verifiers. Raises ConfigError if it is missing, or has no environments of version 0."""
    fix = "on every node: pip install 'verifiers>=0.2,<0.4'"
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(f"verifiers cannot be imported ({error}); install it {fix}") from None
    if missing := [name for name in NEEDED if not hasattr(verifiers, name)]:
        version = getattr(verifiers, "__version__", "of an unknown version")
        raise ConfigError(
            f"verifiers {version} has no {missing[0]}, which environments of version 0 need; install {fix}"
        )
    return verifiers


# The import takes seconds: here it is done once, before the processes of completions are forked.
with contextlib.suppress(ConfigError):  # the constructor raises it
    library()


class Verifiers:
    """Environment of verifiers, version 0.

    Args:
        environment: the environment; or the path `package.module:function` of the function that creates it.
        arguments: arguments of that function.
        answer_column: column of a problem that is the environment's `answer`.
    """

    done = False
    """True if the environment has ended the completion."""

    def __init__(self, environment: Any, arguments: Mapping[str, Any] | None = None, answer_column: str = "solution"):
        self._library = library()
        if isinstance(environment, str):
            environment = import_callable(environment, "environment")(**(arguments or {}))
        _check(environment)
        self._environment, self._answer_column = environment, answer_column
        self._loop = asyncio.new_event_loop()
        """One loop for all calls: an environment may hold connections, which belong to their loop."""

    def reset(self, *, seed: int, prompt: Sequence[Mapping[str, Any]], **columns: Any) -> str | None:
        """Create the state of a completion.

        Args:
            seed: not used, since a state of verifiers has none. An environment that draws random numbers draws
                different ones for each completion of a group.
            prompt: the problem's messages.
            columns: its other columns; `info`, a dictionary or JSON, and `task`, a dictionary, have a meaning for
                verifiers, and reward functions get the others by name.

        Returns:
            Text that the environment adds to the end of the prompt, or None.

        Raises:
            ValueError: the environment changes the prompt in another way.
        """
        return self._run(self._begin(prompt, columns))

    def step(self, message: str) -> str | None:
        """Give a turn to the environment, and return its answer; None if the completion ends."""
        return None if self.done else self._run(self._answer(message))

    def get_reward(self) -> float:
        """Return the weighted sum of the reward functions; 0 if the environment has seen no turn.

        Raises:
            ValueError: the environment failed, so that the reward is unknown.
        """
        if self._state.get("error") is not None:
            raise ValueError(f"the environment of verifiers failed: {self._state['error']!r}")
        return self._run(self._score()) if self._state["trajectory"] else 0.0

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(call)

    async def _begin(self, prompt: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> str | None:
        row = {
            **{name: value for name, value in columns.items() if name != "task" or isinstance(value, Mapping)},
            "prompt": [dict(message) for message in prompt],
            "answer": columns.get(self._answer_column, ""),
            "example_id": columns.get("example_id", 0),
        }
        # The environment never generates here, so the client is never called.
        client = self._library.OpenAIChatCompletionsClient(None)
        self._state = await self._environment.init_state(row, client, "policy", {})
        self._state["timing"].generation.start = time.time()
        given = [_content(message) for message in self._state["prompt"]]
        self._state = await self._environment.setup_state(self._state) or self._state
        self._prompt = await self._environment.get_prompt_messages(self._state)
        self.done = await self._environment.is_completed(self._state)
        return _added_text(given, [_content(message) for message in self._prompt])

    async def _answer(self, message: str) -> str | None:
        """Do one round of `MultiTurnEnv.rollout`, with a turn of the policy in place of a request to a model."""
        response = self._library.Response(
            id="", created=int(time.time()), model="policy",
            message=self._library.ResponseMessage(content=message, finish_reason="stop", is_truncated=False),
        )  # fmt: skip
        try:
            await self._environment.add_model_response(self._state, self._prompt, response)
            if await self._environment.is_completed(self._state):
                self.done = True
                return None
            before = [*map(_content, self._prompt), message]
            self._prompt = await self._environment.get_prompt_messages(self._state)
        except self._library.Error as error:  # get_reward raises
            self._state["error"] = error
            self.done = True
            return None
        if self._state.get("final_env_response") is not None:
            await self._environment.is_completed(self._state)  # records which condition ended it
            self.done = True
            return None
        return _new_text(before, self._prompt)

    async def _score(self) -> float:
        await self._environment.cleanup(self._state)  # it also collects the completion's messages for the rubric
        await self._environment.rubric.score_rollout(self._state)
        return float(self._state["reward"])


def _check(environment: Any) -> None:
    """Raise ConfigError if the environment is not one of version 0 that this adapter can drive."""
    name = type(environment).__name__
    if missing := [method for method in METHODS if not callable(getattr(environment, method, None))]:
        raise ConfigError(f"{name} is no MultiTurnEnv of verifiers, version 0: it has no method {missing[0]}")
    if callable(getattr(environment, "update_tool_args", None)):
        raise ConfigError(f"{name} is a StatefulToolEnv, whose tools need its state; write its tools as an environment")
    if getattr(environment.rubric, "has_group_rewards", False):
        raise ConfigError(f"{name} has rewards of a whole group; an environment here scores one completion")


def _content(message: Any) -> str:
    """Return the text of a message, a dictionary or an object of verifiers."""
    content = message["content"] if isinstance(message, Mapping) else message.content
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    fields: Mapping[str, Any] = part if isinstance(part, Mapping) else part.model_dump()
    if fields.get("type") != "text":
        raise ValueError(f"a message of the environment has a part of the type {fields.get('type')!r}; only text works")
    return str(fields["text"])


def _added_text(given: list[str], prompt: list[str]) -> str | None:
    """Return the text that `prompt` has after its first messages `given`; None if it is the same.

    Raises:
        ValueError: `prompt` differs before the end of `given`.
    """
    kept, last = len(given) - 1, given[-1]
    if prompt[:kept] != given[:kept] or len(prompt) <= kept or not prompt[kept].startswith(last):
        raise ValueError("setup_state of the environment replaces the prompt; it may only add text after it")
    text = "\n\n".join([prompt[kept][len(last) :], *prompt[kept + 1 :]])
    return text or None


def _new_text(before: list[str], prompt: Sequence[Any]) -> str:
    """Return the text of the messages of `prompt` after those that the policy has seen.

    Raises:
        ValueError: the environment changed a message that the policy has seen, whose tokens cannot be changed.
    """
    if [_content(message) for message in prompt[: len(before)]] != before:
        raise ValueError("the environment rewrites earlier messages, which is not supported")
    return "\n\n".join(_content(message) for message in prompt[len(before) :])
