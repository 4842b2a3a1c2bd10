"""Arguments of vLLM engines, and seeds of requests, shared by training and evaluation."""

import hashlib
from typing import Any

from grpo_ray.config.schema import Config


def llm_arguments(path: str, config: Config) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that the engines of training and of evaluation have in common.

    Args:
        path: local folder or hub id of the policy.
    """
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": path,
        "dtype": config.dtype,
        "max_model_len": config.engine.max_model_len,
        "model_impl": config.grpo.trl.get("vllm_model_impl", "auto"),
        "trust_remote_code": config.model.trust_remote_code,
        # The same on all workers: each request has its own seed, and a tensor-parallel group must agree.
        "seed": 0,
        # The temperature is part of the policy that is trained, so the log-probabilities must include it.
        "logprobs_mode": "processed_logprobs",
        "max_num_batched_tokens": 4096,  # vLLM's memory profiler overestimates with its own, larger default
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
        longest = config.engine.max_model_len or model.get_text_config().max_position_embeddings
        arguments |= {
            # Compilation takes longer than it saves.
            "enforce_eager": True,
            # A group shares the KV cache of its prompt only in whole blocks, and vLLM's default for the CPU, 128
            # tokens, is longer than most problems. With prompts of 20 to 60 tokens, 32 reduces the generation time of
            # a step by 6 to 13 %.
            "block_size": 32,
            # With chunked prefill vLLM rewinds the request's random generator, which torch's CPU generator does not
            # support. A prompt is therefore read in one pass, and a batch must have room for the longest one.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, longest),
        }
    return arguments


def request_seed(run_seed: int, problem_id: str, epoch: int, index: int) -> int:
    """Derive the seed of one completion from the run, the problem, the epoch and its index in the group only.

    The completion then does not depend on the worker, the batch or the attempt that generates it (worker-count
    invariance, exact resume).
    """
    digest = hashlib.blake2b(f"{run_seed}/{problem_id}/{epoch}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # vLLM takes a signed 64-bit integer
