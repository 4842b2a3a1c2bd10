"""Log-probabilities of sampled tokens before filters and penalties, for the proof of the weight sync.

With `top_p` and the like the engine samples from processed logits: it excludes tokens or shifts logits, and
renormalizes. vLLM returns the log-probabilities of either the raw or the processed logits, the same for all requests of
an engine. TRL's importance ratio needs the processed ones. The learner's log-probabilities are comparable with neither:
it divides its logits by the temperature, and does nothing else. The engine's sampler is therefore wrapped. For a
request with `logprobs=1`, vLLM returns the log-probability of one more token after that of the sampled token; the
wrapper replaces it by the sampled token's log-probability after the temperature and before all other processing.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily and does not divide the logits."""


def temperature_logprobs(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Compute log-probabilities after the temperature, as the learner does; the logits are not changed.

    Args:
        logits: (B, V).
        temperature: (B,); None if all requests are greedy.

    Returns:
        (B, V) float32, nats.
    """
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.where(temperature >= GREEDY_BELOW, 1.0).unsqueeze(1)
    return logits.log_softmax(dim=-1)


def put_beside_processed(token_ids: torch.Tensor, logprobs: torch.Tensor, unprocessed: torch.Tensor) -> None:
    """Overwrite the second column with the unprocessed log-probability of the token in the first.

    vLLM stores a step's log-probabilities by token id, so the second column gets another id: the sampled one plus 1.

    Args:
        token_ids: (B, 2), the sampled token and another one; the second column is overwritten.
        logprobs: (B, 2), in nats, of these tokens; the second column is overwritten.
        unprocessed: (B, V), in nats.
    """
    sampled = token_ids[:, :1].long()
    logprobs[:, 1:] = unprocessed.gather(1, sampled)
    token_ids[:, 1:] = (sampled + 1) % unprocessed.shape[1]


def install_unprocessed_logprobs(sampler: "Sampler") -> None:
    """Wrap an engine's sampler: requests with `logprobs=1` get both log-probabilities of the sampled token."""
    forward = sampler.forward

    def forward_with_unprocessed(
        logits: torch.Tensor, sampling_metadata: "SamplingMetadata", *args: Any, **kwargs: Any
    ) -> "SamplerOutput":
        if sampling_metadata.max_num_logprobs != 1:
            return forward(logits, sampling_metadata, *args, **kwargs)
        unprocessed = temperature_logprobs(logits, sampling_metadata.temperature)  # vLLM overwrites the logits
        output = forward(logits, sampling_metadata, *args, **kwargs)
        put_beside_processed(output.logprobs_tensors.logprob_token_ids, output.logprobs_tensors.logprobs, unprocessed)
        return output

    sampler.forward = forward_with_unprocessed
