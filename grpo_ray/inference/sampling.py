"""Engine requests and their completions, shared by training, held-out measuring and evaluation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vllm import RequestOutput


OnFinished = Callable[[int, list[int]], None]
"""Called for each completion as soon as it is finished, with its index in the call and its token ids."""


def ignore_finished(index: int, token_ids: list[int]) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Completion:
    """Completion of one request. T tokens."""

    token_ids: list[int]
    """(T,)"""
    truncated: bool
    """True if it was cut off at the maximum length."""
    logps: list[float | None]
    """(T,) log-probabilities of the tokens in nats, after temperature and filters; None where the engine returned none.
    Empty if they were not requested."""
    unprocessed_logps: list[float | None]
    """(T,) the same before filters and penalties, after the temperature. Empty if the engine uses none of these."""
    shard: int = 0
    """Number of the shard of a round, which one of several dedicated engines has run; 0 for a colocated engine."""


RunRound = Callable[[list[list[int]], list[dict[str, Any]], OnFinished], list[Completion]]
"""Function that runs one round of requests; see `Engine.rounds`."""


def completion_of(output: "RequestOutput") -> Completion:
    """Return the completion of a finished request. Raises ConfigError if the engine has refused it."""
    (completion,) = output.outputs
    if completion.finish_reason == "error":
        raise ConfigError(
            "the engine could not begin a request; its log has the reason, such as a form that it refuses"
        )
    token_ids = list(completion.token_ids)
    logps: list[float | None] = []
    unprocessed: list[float | None] = []
    if returned := completion.logprobs:  # `flat_logprobs`: one list for all tokens, and the first index of each token
        values = [None if math.isnan(value) else value for value in returned.logprobs]
        logps = [values[first] for first in returned.start_indices]
        # At most one more value for each token: its unprocessed log-probability (`unprocessed_logprobs.py`).
        pairs = zip(returned.start_indices, returned.end_indices, strict=True)
        unprocessed = [value for first, end in pairs for value in values[first + 1 : end]]
    return Completion(token_ids, completion.finish_reason == "length", logps, unprocessed)


def require_space(prompts: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Raise DataError if a prompt leaves no space for a completion.

    Args:
        prompts: (B,) token ids.
        max_model_len: longest prompt with its completion that the engine takes, tokens.
    """
    longest = max(map(len, prompts), default=0)
    if longest >= max_model_len:
        raise DataError(
            f"a prompt has {longest} tokens, but the engine's context of {max_model_len} tokens must hold "
            "prompt and completion; increase engine.max_model_len or remove such problems"
        )


def training_sampling(config: Config) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` for a completion of training, without its seed."""
    sampling = config.sampling
    # Only token ids are needed. vLLM needs text to find a stop string in it, and for nothing else.
    text = {"detokenize": bool(sampling.stop)}
    return sampling.changed | {"max_tokens": config.grpo.max_completion_length} | text


def limit_tokens(sampling: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` for a completion of at most this number of tokens."""
    limits = {"max_tokens": most}
    if "min_tokens" in sampling:  # more than `max_tokens` would be an error
        limits["min_tokens"] = min(sampling["min_tokens"], most)
    return {**sampling, **limits}


def heldout_sampling(config: Config) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` for a completion of a held-out problem, without its seed.

    They differ from training's in the temperature only (`heldout.temperature`).
    """
    return training_sampling(config) | {"temperature": config.heldout.temperature}
