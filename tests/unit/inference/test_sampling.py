"""Tests of requests and completions, with small stand-ins for vLLM's outputs."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.errors import ConfigError
from grpo_ray.inference.sampling import completion_of, heldout_sampling, training_sampling


@dataclass
class FlatLogprobs:
    start_indices: list[int]
    end_indices: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.start_indices)


@dataclass
class Output:
    token_ids: tuple[int, ...]
    logprobs: FlatLogprobs | None
    finish_reason: str


@dataclass
class RequestOutput:
    outputs: list[Output]


def finished(logprobs: FlatLogprobs | None, reason: str = "stop") -> Any:
    return RequestOutput([Output((7, 8), logprobs, reason)])


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True)])
def test_completion_of_length_limit_is_truncated(reason: str, truncated: bool) -> None:
    completion = completion_of(finished(None, reason))
    assert (completion.token_ids, completion.truncated, completion.logps) == ([7, 8], truncated, [])


def test_completion_of_a_refused_request_raises() -> None:
    with pytest.raises(ConfigError, match="could not begin a request"):
        completion_of(finished(None, "error"))


def test_completion_of_missing_logprob_gives_none() -> None:
    completion = completion_of(finished(FlatLogprobs([0, 1], [1, 2], [-0.5, math.nan])))
    assert (completion.logps, completion.unprocessed_logps) == ([-0.5, None], [])


def test_completion_of_second_token_has_the_unprocessed_logprob() -> None:
    completion = completion_of(finished(FlatLogprobs([0, 2], [2, 4], [-0.5, -0.75, -0.25, math.nan])))
    assert (completion.logps, completion.unprocessed_logps) == ([-0.5, -0.25], [-0.75, None])


def test_heldout_sampling_differs_in_temperature_only() -> None:
    grpo = {
        "temperature": 0.7,
        "top_k": 20,
        "max_completion_length": 9,
        "generation_kwargs": {"stop": ["</answer>"], "repetition_penalty": 1.1},
        "vllm_importance_sampling_mode": "token_truncate",
    }
    training = training_sampling(from_mapping({"grpo": grpo}))
    assert training == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "stop": ["</answer>"],
        "max_tokens": 9,
        "detokenize": True,  # vLLM searches the text for stop strings
    }
    assert heldout_sampling(from_mapping({"grpo": grpo})) == training | {"temperature": 0.0}
    sampled = from_mapping({"grpo": grpo, "heldout": {"temperature": 0.3, "num_samples": 4}})
    assert heldout_sampling(sampled) == training | {"temperature": 0.3}


def test_training_sampling_without_stop_strings_needs_no_text() -> None:
    assert training_sampling(from_mapping({})) == {"max_tokens": 256, "detokenize": False}
