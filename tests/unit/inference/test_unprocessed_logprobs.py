"""Tests of log-probabilities before filters, with a sampler that keeps the most probable token only."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from grpo_ray.inference.unprocessed_logprobs import (
    install_unprocessed_logprobs,
    put_beside_processed,
    temperature_logprobs,
)

LOGITS = torch.tensor([[math.log(4), math.log(2), math.log(2)], [0.0, math.log(3), -math.inf]])


class GreedySampler:
    """Sampler that overwrites the logits, as vLLM does, and returns two columns if they are asked for."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        sampled = logits.argmax(dim=1, keepdim=True)
        logits.fill_(math.nan)
        columns = 1 + sampling_metadata.max_num_logprobs
        return SimpleNamespace(
            logprobs_tensors=SimpleNamespace(
                logprob_token_ids=sampled.repeat(1, columns).int(), logprobs=torch.zeros(2, columns)
            )
        )


def sample(logprobs: int, temperature: torch.Tensor | None) -> Any:
    sampler = GreedySampler()
    install_unprocessed_logprobs(sampler)
    metadata = SimpleNamespace(max_num_logprobs=logprobs, temperature=temperature)
    return sampler.forward(LOGITS.clone(), metadata).logprobs_tensors


def test_temperature_logprobs_worked_example() -> None:
    # At temperature 0.5 the odds 4 : 2 : 2 are squared, and 1 : 3 : 0 become 1 : 9 : 0.
    logprobs = temperature_logprobs(LOGITS, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[2 / 3, 1 / 6, 1 / 6], [0.1, 0.9, 0.0]]))
    # A greedy request has temperature 0 and logits as they are.
    torch.testing.assert_close(temperature_logprobs(LOGITS, torch.tensor([0.0, 1.0]))[0, 0].exp(), torch.tensor(0.5))
    torch.testing.assert_close(temperature_logprobs(LOGITS, None)[1, 1].exp(), torch.tensor(0.75))


def test_put_beside_processed_takes_the_next_tokens_place() -> None:
    token_ids, logprobs = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    put_beside_processed(token_ids, logprobs, torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]))
    assert token_ids.tolist() == [[2, 0], [1, 2]]  # after the last token comes the first
    assert logprobs.tolist() == [[0.0, -3.0], [0.0, -5.0]]


def test_installed_sampler_returns_both_logprobs() -> None:
    tensors = sample(1, torch.ones(2))
    torch.testing.assert_close(tensors.logprobs.exp(), torch.tensor([[1.0, 0.5], [1.0, 0.75]]))
    assert tensors.logprob_token_ids.tolist() == [[0, 1], [1, 2]]


def test_installed_sampler_without_the_place_changes_nothing() -> None:
    tensors = sample(0, torch.ones(2))
    assert tensors.logprobs.tolist() == [[0.0], [0.0]] and tensors.logprob_token_ids.tolist() == [[0], [1]]
