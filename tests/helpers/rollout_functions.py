"""Rollout functions for tests, named in `rollout.function` as `rollout_functions:name`."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_ray.inference.rollout_examples import one_turn
from grpo_ray.inference.rollout_function import RolloutPolicy
from grpo_ray.inference.trajectories import EndpointAccess, RolloutRow, Trajectory


def spoil(trajectory: Trajectory, **values: Any) -> None:
    """Set fields of a trajectory."""
    for name, value in values.items():
        setattr(trajectory, name, value)


SPOILT: Mapping[str, tuple[Callable[[Trajectory], None], str]] = {
    "tokens of another type": (lambda t: spoil(t, token_ids=[1.0] * len(t.mask)), "token_ids must be a list of token"),
    "tokens in a tuple": (lambda t: spoil(t, token_ids=tuple(t.token_ids)), "of type int, not tuple"),
    "negative token": (lambda t: spoil(t, token_ids=[-1, *t.token_ids[1:]]), "has the token id -1; the vocabulary"),
    "token outside": (lambda t: spoil(t, token_ids=[10**6, *t.token_ids[1:]]), "has the token id 1000000"),
    "prompt token outside": (lambda t: spoil(t, prompt_ids=[10**6]), "prompt has the token id 1000000"),
    "no prompt": (lambda t: spoil(t, prompt_ids=[]), "the prompt has no tokens"),
    "too long": (lambda t: t.add_tokens([1] * 100), "tokens; grpo.max_completion_length is 24"),
    "no room in the context": (lambda t: spoil(t, prompt_ids=[1] * 200), "the prompt has 200 tokens"),
    "longer than the context": (lambda t: spoil(t, prompt_ids=[1] * 62), "tokens; the engine's context has 64"),
    "mask too short": (lambda t: spoil(t, mask=t.mask[1:]), r"mask has \d+ entries for \d+ tokens"),
    "mask of 2": (lambda t: spoil(t, mask=[2] * len(t.mask)), "mask must be a list of 0 and 1"),
    "mask of bool": (lambda t: spoil(t, mask=[True] * len(t.mask)), "mask must be a list of 0 and 1"),
    "no own token": (lambda t: spoil(t, mask=[0] * len(t.mask)), "no token is the policy's own"),
    "no tokens": (lambda t: spoil(t, token_ids=[], mask=[], logps=[], unprocessed_logps=[]), "no token is the policy"),
    "logps too short": (lambda t: spoil(t, logps=t.logps[1:]), r"logps must be a list of \d+ numbers"),
    "logps missing": (lambda t: spoil(t, logps=[None, *t.logps[1:]]), r"logps\[0\] is None; .* must be finite"),
    "logps not a number": (lambda t: spoil(t, logps=[math.nan, *t.logps[1:]]), r"logps\[0\] is nan"),
    "logps infinite": (lambda t: spoil(t, logps=[-math.inf, *t.logps[1:]]), r"logps\[0\] is -inf"),
    "logps nested": (lambda t: spoil(t, logps=[[each] for each in t.logps]), r"logps\[0\] is \[-"),
    "unprocessed too short": (lambda t: spoil(t, unprocessed_logps=[-1.0]), "unprocessed_logps must be a list"),
    "text in place of messages": (lambda t: spoil(t, messages="5"), "messages must be a list of dicts with a role"),
    "message without role": (lambda t: spoil(t, messages=[{"content": "5"}]), "messages must be a list of dicts"),
    "content of a number": (lambda t: spoil(t, messages=[{"role": "user", "content": 5}]), "must be text, not int"),
    "reward of a text": (lambda t: spoil(t, reward="1"), "reward is '1'; it must be a finite number"),
    "reward not a number": (lambda t: spoil(t, reward=math.nan), "reward is nan"),
    "column of the row": (lambda t: spoil(t, columns={"solution": 1}), "columns has 'solution', which is an argument"),
    "column of the problem": (lambda t: spoil(t, columns={"topic": 1}), "columns has 'topic', which is an argument"),
    "column of rewards": (lambda t: spoil(t, columns={"completions": 1}), "columns has 'completions'"),
    "columns of one alone": (lambda t: spoil(t, columns={"steps": 1}), r"columns has \['steps'\], and the first"),
}
"""Name -> what a function does to its last trajectory, and a part of the message that refuses it, as a pattern."""


def spoilt(rows: list[RolloutRow], policy: RolloutPolicy, how: str) -> list[Trajectory]:
    """Return trajectories, of which the last one is spoilt."""
    trajectories = one_turn(rows, policy)
    SPOILT[how][0](trajectories[-1])
    return trajectories


def spoilt_in_training(rows: list[RolloutRow], policy: RolloutPolicy, how: str) -> list[Trajectory]:
    """Do the same, but not in a measurement of one completion per problem."""
    return spoilt(rows, policy, how) if any(row.index for row in rows) else one_turn(rows, policy)


def failing(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Raise an error, as a bug does."""
    raise KeyError("a bug")


def unordered(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Return the trajectories in another order than the rows."""
    return one_turn(rows, policy)[::-1]


def one_missing(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Return no trajectory for the last row."""
    return one_turn(rows, policy)[:-1]


def no_list(rows: list[RolloutRow], policy: RolloutPolicy) -> Any:
    """Return a dictionary, as TRL's functions do."""
    return {"prompt_ids": [], "completion_ids": [], "logprobs": []}


def no_trajectories(rows: list[RolloutRow], policy: RolloutPolicy) -> Any:
    """Return texts."""
    return ["5"] * len(rows)


async def coroutine(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Do what no rollout function can: wait outside of an event loop."""
    return []


def one_argument(rows: list[RolloutRow]) -> list[Trajectory]:
    """Take rows only."""
    return []


def of_trl(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Have the signature of TRL's rollout_func."""
    return {}


class NoFunction:
    """Class in place of a function."""

    def __init__(self, rows: list[RolloutRow], policy: RolloutPolicy) -> None: ...


def retrying(rows: list[RolloutRow], policy: RolloutPolicy, turns: int = 3) -> list[Trajectory]:
    """Take more turns in problems with larger ids, so that workers differ in their requests."""
    trajectories = policy.start(rows)
    for turn in range(turns):
        active = [each for each in trajectories if turn == 0 or int(each.row.id, 16) % turns >= turn]
        if turn:
            active = [each for each in active if policy.respond(each, "Again.")]
        policy.turn(active, max_tokens=24)
    for each in trajectories:
        rate(each)
    return trajectories


def rate(trajectory: Trajectory) -> None:
    """Set a reward that depends on every token, and a column."""
    trajectory.reward = (sum(trajectory.token_ids) % 7) / 7
    trajectory.columns["requests"] = sum(message["role"] == "assistant" for message in trajectory.messages)


def retrying_programs(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Do the same as `retrying` by programs, which use OpenAI's client and reach the endpoint at different times."""
    return policy.run_programs(rows, retry)


def retry(access: EndpointAccess, turns: int = 3) -> None:
    """Take the turns of one row through the endpoint."""
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=access.base_url, api_key=access.api_key)
    messages: list[Any] = list(access.row.prompt)
    for turn in range(turns):
        if turn and int(access.row.id, 16) % turns < turn:
            break
        time.sleep((id(access) // 64) % 7 / 100)  # another order of arrival in each run
        try:
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
        except BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            break
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
    rate(access.trajectory)


def pay_requests(requests: list[int], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward a column of the function and each of the policy's own tokens."""
    return [(number + sum(ids)) % 5 / 5 for number, ids in zip(requests, completion_ids, strict=True)]
