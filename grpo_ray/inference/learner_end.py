"""The learner's end of a weight sync: the weights that an engine receives, and both proofs that it computes with them.

It extends TRL's `VLLMGeneration`, which knows the names of weights in vLLM, and how to gather those of a sharded
learner. Differences from TRL:

- An adapter is merged into copies of the weights, not into the weights themselves.
- The weights of the proof are read anew from the model, not from the iterator that sends them (`weight_proof.py`).
- The engine's log-probabilities of its own samples are compared with the learner's, which shows within a tolerance that
  it computes with these weights (`sync_proof.py`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

from grpo_ray.config.schema import DEFAULT_LOGPROB_TOLERANCE, Config
from grpo_ray.inference.sampling import training_sampling
from grpo_ray.inference.sync_proof import LogprobGap, measure_logprob_gap, require_synced
from grpo_ray.inference.trl_without_trackers import VLLMGeneration
from grpo_ray.inference.weight_proof import learner_weights, request_weights
from grpo_ray.models.adapters import frozen_weights, merged_weights

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LearnerEnd(VLLMGeneration):
    """The learner's end of the sync with one or more engines."""

    config: Config

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        accelerator: "Accelerator",
        tokenizer: "PreTrainedTokenizerBase",
        **arguments: Any,
    ):
        """
        Args:
            model: the learner's model, the source of the weights.
            arguments: further arguments of TRL's class.
        """
        tolerance = self.config.engine.logprob_tolerance
        self.logprob_tolerance = DEFAULT_LOGPROB_TOLERANCE[self.config.dtype] if tolerance is None else tolerance
        # 0: only the sampled token's log-probability; 1: a second value as well, its unprocessed log-probability.
        processing = 1 if self.config.sampling.processing else 0
        self.training_sampling = training_sampling(self.config) | {"logprobs": processing}
        """Arguments of `vllm.SamplingParams` for a completion of training, without its seed."""
        self.metrics: dict[str, float] = {}
        """Metrics of the engines after the latest proof."""
        super().__init__(model, accelerator, tokenizer, mode="colocate", **arguments)

    @property
    def _adapted(self) -> PeftModel:
        """The learner's model, which has an adapter."""
        assert isinstance(self.model, PeftModel)
        return self.model

    @property
    def _requests_name_adapter(self) -> bool:
        return self.config.adapter_sync == "request"

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the learner's weights under vLLM's names. Collective: it gathers shards, so every rank must iterate.

        TRL's version merges an adapter into the learner's weights and unmerges it afterwards, which in 16 bits changes
        them slightly each time. This version only reads them.
        """
        if self._requests_name_adapter:
            return frozen_weights(self._adapted)
        return merged_weights(self.model) if isinstance(self.model, PeftModel) else super()._iter_named_params()

    def weights_to_prove(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights whose checksums the engine's must have, under vLLM's names, whole or sharded.

        They are the policy's weights, merged with its adapter; or the frozen weights and the adapter's matrices, if
        requests name it.
        """
        named = request_weights(self._adapted) if self._requests_name_adapter else learner_weights(self.model)
        return ((self._fix_param_name_to_vllm(name), weight) for name, weight in named)

    def prove_sync(
        self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor, step: int
    ) -> LogprobGap:
        """Prove that the engine generated with the learner's weights, from both log-probabilities of its samples.

        Collective.

        Args:
            learner_logps, engine_logps: (B, T), in nats.
            mask: (B, T); 0 on padding.
            step: number of the step, for the error message.

        Raises:
            SyncError: on every worker, if the mean gap over all workers is above `logprob_tolerance`, or NaN.
        """
        gap = measure_logprob_gap(learner_logps, engine_logps, mask, self.accelerator)
        require_synced(gap, self.logprob_tolerance, step)
        return gap
