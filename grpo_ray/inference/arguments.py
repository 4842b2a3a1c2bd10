"""Arguments of vLLM engines, and seeds of requests, shared by training and evaluation."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError

if TYPE_CHECKING:
    from vllm import SamplingParams

MIN_BATCHED_TOKENS = 4096
"""Smallest default for `max_num_batched_tokens`, the tokens of one engine pass. vLLM's own default is larger, and makes
its memory profiler overestimate."""

DEFAULT_CAPTURED = 512
"""Largest batch, in sequences, that vLLM captures a CUDA graph for by default (1,024 on some GPUs)."""

CAPTURE_ARGUMENTS = frozenset({
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager",
    "speculative_config", "spec_method", "spec_model", "spec_tokens",
})  # fmt: skip
"""Arguments in `engine.vllm` that determine which batches get a CUDA graph."""


def llm_arguments(path: str, config: Config, *, max_num_seqs: int | None = None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that training and evaluation engines share.

    Args:
        path: local folder or hub id of the policy.
        max_num_seqs: maximum number of completions that are generated at the same time; None for vLLM's default.

    Raises:
        ConfigError: the installed vLLM does not have an argument of `engine.vllm`.
    """
    import vllm
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    own = config.engine.vllm
    require_known(own, {field.name for field in dataclasses.fields(EngineArgs)}, vllm.__version__)
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
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, max_num_seqs or 0),  # vLLM requires at least one per sequence
        "disable_log_stats": True,
    }
    if max_num_seqs is not None:
        arguments["max_num_seqs"] = max_num_seqs
    if (form := config.rollout.structured_outputs) is not None:
        # Always the same library: vLLM's own choice depends on the form.
        arguments["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": form.compact}
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
            "max_num_batched_tokens": max(arguments["max_num_batched_tokens"], longest),
        }
    else:
        # Other mixture-of-experts kernels reorder the weights after loading, but a weight sync writes them in the
        # checkpoint's order. Other models are not affected.
        arguments["moe_backend"] = "triton"
        if max_num_seqs is not None and max_num_seqs > DEFAULT_CAPTURED and not CAPTURE_ARGUMENTS & own.keys():
            arguments["cudagraph_capture_sizes"] = capture_sizes(max_num_seqs)
    return arguments | dict(own)


def request_parameters(arguments: Mapping[str, Any], **own: Any) -> "SamplingParams":
    """Return vLLM's parameters of one request.

    Args:
        arguments: options of the run, as plain values, with the completion's seed.
        own: further fields of `vllm.SamplingParams`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if form := arguments.get("structured_outputs"):
        if "json" in form:  # as text, since vLLM treats an empty mapping as no schema
            form = {"json": json.dumps(form["json"])}
        own["structured_outputs"] = StructuredOutputsParams(**form)
    # Log-probabilities in one list of numbers: with an object for each token, Python spends 10 us per token on them
    # instead of 2 (measured on a busy CPU with 256 requests of 2,000 tokens).
    return SamplingParams(**{**arguments, **own}, flat_logprobs=True)


def require_known(given: Mapping[str, Any], known: set[str], version: str) -> None:
    """Raise ConfigError if an argument of `engine.vllm` is not among those of the installed version of vLLM."""
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"engine.vllm.{unknown[0]}: the installed vLLM {version} does not have this argument, though another "
            "supported release does; remove it, or install that release"
        )


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture CUDA graphs for: vLLM's up to 512, then multiples of 128, and the maximum.

    vLLM runs a batch in the graph of the next larger size, and a batch above the largest size without a graph. vLLM's
    own sizes would continue in steps of 16, and each graph takes memory and start-up time.
    """
    small = [1, 2, 4, *range(8, 256, 8), *range(256, DEFAULT_CAPTURED + 1, 16)]
    return [*small, *range(DEFAULT_CAPTURED + 128, max_num_seqs, 128), max_num_seqs]


def request_seed(run_seed: int, problem_id: str, epoch: int, index: int, turn: int = 0) -> int:
    """Derive the seed of one request from the run, the problem, the epoch, the index in the group and the turn only.

    The completion then does not depend on the worker, the batch or the attempt that generates it (worker-count
    invariance, exact resume).

    Args:
        turn: number of the request within the completion, from 0.
    """
    name = f"{run_seed}/{problem_id}/{epoch}/{index}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # vLLM takes a signed 64-bit integer


def group_seed(run_seed: int, problem_id: str, epoch: int) -> int:
    """Derive an environment's seed from the run, the problem and the epoch, so that a group shares one task."""
    digest = hashlib.blake2b(f"{run_seed}/{problem_id}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33  # 31 bits, which every library accepts as a seed
