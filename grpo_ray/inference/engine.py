"""The colocated vLLM engine: TRL's, made to run on CUDA and on the CPU alike, with its weights proven (law 4).

Three things are ours. Every request has a seed of its own, so a completion depends on its problem and not on the
batch, the worker or the restart it happened to be drawn in. A weight sync must reach every parameter of the engine, and
every packed copy of one. And what the engine says of its own tokens is held against what the learner says of them.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from trl.generation.vllm_generation import VLLMGeneration, empty_cache, extract_logprobs
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from grpo_ray.config.schema import EngineConfig
from grpo_ray.errors import DataError, SyncError
from grpo_ray.inference.cpu_sampler import use_low_noise_sampler
from grpo_ray.models.lora import merged_weights
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase

if TYPE_CHECKING:
    from trl import GRPOConfig

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Mean gap of log-probabilities, in nats, that rounding alone can explain, with room to spare. Measured on the embedded
policy in float32: 4e-7 with the right weights."""

LEAST_PACKED = 100_000
"""Weights of a float32 layer from which on vLLM's packed product is faster on the CPU than torch's. Measured with 1 to
128 rows and 1 and 2 threads: torch's takes 0.4 to 1.5 times the time of the packed one with 12,000 weights, 0.9 to 1.6
times with 98,000 and 1.1 to 2.2 times with 440,000. In 16 bits it is never faster."""


@dataclass(frozen=True)
class LogprobGap:
    """How far apart engine and learner are about the same tokens, in nats."""

    mean: float
    max: float
    tokens: int


class Engine(VLLMGeneration):
    """One worker's vLLM engine, in the worker's own process, generating with the learner's weights."""

    enable_sleep_mode: bool

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        tokenizer: Any,
        *,
        config: EngineConfig,
        dtype: str,
        args: "GRPOConfig",
        phases: PhaseProfiler | None = None,
    ):
        self.config = config
        self.phases = phases or PhaseProfiler()
        self.dtype = dtype
        self.tolerance = TOLERANCE[dtype] if config.logprob_tolerance is None else config.logprob_tolerance
        self.seeds: Sequence[int] = ()
        """Seeds of the next call of `generate`, one for each prompt in it."""
        self.on_finished: Callable[[int, list[int]], None] = lambda index, token_ids: None
        """Told of each completion as soon as it is finished: its index in the call, and its token ids."""
        self._requests = 0
        super().__init__(
            model,
            accelerator,
            tokenizer,
            mode="colocate",
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=config.memory_share,
            max_model_length=config.max_context or args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            repetition_penalty=args.repetition_penalty,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_completion_length=args.max_completion_length,
            logprobs=0,
            generation_kwargs=args.generation_kwargs,
        )

    def _init_vllm(self) -> None:
        """Start vLLM in this process. TRL's version leaves the precision to vLLM and cannot sync on the CPU."""
        on_cpu = self.accelerator.device.type == "cpu"
        tensor_parallel = self.tensor_parallel_size
        token = [secrets.token_hex(8)] * tensor_parallel
        if tensor_parallel > 1:
            ranks = range(self.accelerator.num_processes)
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(
                [list(ranks[i : i + tensor_parallel]) for i in ranks[::tensor_parallel]]
            )
            torch.distributed.all_gather_object(token, token[0], group=self.tp_group)
        with packing_on_use() as self._packed_layers, shared_memory_named(token[0]):
            self.llm = LLM(
                **llm_settings(self.model.name_or_path, self.dtype, self.max_model_length, self.trust_remote_code),
                tensor_parallel_size=tensor_parallel,
                gpu_memory_utilization=self.gpu_memory_utilization,
                max_num_seqs=self.max_num_seqs,
                enable_sleep_mode=self.enable_sleep_mode and not on_cpu,
                model_impl=self.model_impl,
                # vLLM joins the worker's own process group instead of starting processes of its own.
                distributed_executor_backend="external_launcher",
            )
        if on_cpu:
            # On CUDA vLLM's own stays: its kernels for requests with seeds draw noise for every word too, in one launch
            # for each request and token. What that costs there has not been measured.
            use_low_noise_sampler(self._runner.sampler.topk_topp_sampler)
        self.enable_sleep_mode = self.enable_sleep_mode and not on_cpu
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()
        forget_shared_memory(token[0])  # all have joined

    @property
    def _runner(self) -> Any:
        """What runs the engine's model: vLLM's `model_runner`."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    @property
    def _model(self) -> Any:
        """The engine's own model, a torch module."""
        return self._runner.model

    @property
    def max_context(self) -> int:
        """Longest prompt with completion, in tokens."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    @in_phase("sync")
    def sync_weights(self) -> None:
        """Give the engine the learner's weights. Raises SyncError if a parameter of the engine got none."""
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        loaded = self._model.load_weights(self._iter_named_params())
        expected = {name for name, _ in self._model.named_parameters()}
        if missing := sorted(expected - (loaded or set())):
            raise SyncError(
                f"weight sync left {len(missing)} of the engine's {len(expected)} parameters as they were, "
                f"the first of them {missing[0]}; nothing was generated with them"
            )
        for layer in self._packed_layers:
            pack_on_use(layer)
        self.llm.reset_prefix_cache()
        self.phases.wait_for_device()  # or the copies would count as generation

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The learner's weights under the names that vLLM knows. Gathering shards, so every worker must iterate.

        TRL's version merges an adapter into the learner's own weights and takes it out again. In 16 bits that leaves
        them changed a little each time; here they are only read.
        """
        return merged_weights(self.model) if isinstance(self.model, PeftModel) else super()._iter_named_params()

    @in_phase("generate")
    def generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list, list, list, list]:
        """Sample one completion for each prompt, each with its own seed from `self.seeds`.

        prompts: (B,) lists of token ids, a group's prompt repeated `num_generations` times.
        Returns (prompt ids, completion ids, log-probabilities, their token ids); log-probabilities are
        (B, T_b, 1) in nats, of the sampled tokens, after temperature and top-p.
        """
        if len(self.seeds) != len(prompts):
            raise ValueError(f"{len(self.seeds)} seeds for {len(prompts)} prompts")
        settings = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
        } | self.generation_kwargs
        generated = self._run(prompts, [settings | {"seed": seed} for seed in self.seeds])
        self.phases.count("engine", sum(map(len, generated[1])))
        return generated

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """The most likely completion of each prompt: (B,) lists of token ids."""
        settings = {"temperature": 0.0, "max_tokens": self.max_completion_length}
        completions = self._run(prompts, [settings] * len(prompts))[1]
        # The next step must not find a prompt's beginning here that a worker which starts over would have to read:
        # read together with others it is rounded otherwise (law 1).
        self.llm.reset_prefix_cache()
        return completions

    def _run(self, prompts: list[list[int]], settings: list[dict[str, Any]]) -> tuple[list, list, list, list]:
        """Generate, with the weights awake; a tensor-parallel group works on all its workers' prompts together."""
        longest = max(map(len, prompts), default=0)
        if longest >= self.max_context:
            raise DataError(
                f"a prompt has {longest} tokens, and the engine's context holds {self.max_context} with the "
                "completion; raise engine.max_context or leave such problems out"
            )
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        mine = slice(0, len(prompts))
        if self.tensor_parallel_size > 1:
            gathered: list[Any] = [None] * self.tensor_parallel_size
            torch.distributed.all_gather_object(gathered, (prompts, settings), group=self.tp_group)
            rank = torch.distributed.get_rank(group=self.tp_group)
            first = sum(len(p) for p, _ in gathered[:rank])
            mine = slice(first, first + len(prompts))
            prompts = [ids for p, _ in gathered for ids in p]
            settings = [s for _, each in gathered for s in each]
        outputs = self._finish_all(prompts, settings, mine)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        logprobs, token_ids = extract_logprobs(outputs)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        return [output.prompt_token_ids for output in outputs], completions, logprobs, token_ids

    def _finish_all(
        self, prompts: list[list[int]], settings: list[dict[str, Any]], mine: slice
    ) -> list["RequestOutput"]:
        """Run the requests to their ends, and tell `on_finished` of each of `mine` while others still run."""
        engine = self.llm.llm_engine
        # Token ids are all that is wanted; vLLM needs their text only to find a stop string in it.
        text = {"detokenize": bool(self.generation_kwargs.get("stop"))}
        first = self._requests
        self._requests += len(prompts)
        for number, (ids, each) in enumerate(zip(prompts, settings, strict=True)):
            sampling = SamplingParams(**text | each, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(first + number), {"prompt_token_ids": ids}, sampling)
        finished: dict[int, RequestOutput] = {}
        wanted = range(len(prompts))[mine]
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id) - first
                finished[number] = output
                if number in wanted:
                    self.on_finished(number - wanted.start, list(output.outputs[0].token_ids))
        return [finished[number] for number in wanted]

    def prove_sync(
        self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor, step: int
    ) -> LogprobGap:
        """Hold the engine's log-probabilities of its own tokens against the learner's, over all workers (law 4).

        learner_logps, engine_logps, mask: (B, T), nats; mask is 0 on padding. Every worker must call it.
        Raises SyncError on all workers alike if the mean gap is past the tolerance, or not a number.
        """
        gaps = (learner_logps - engine_logps).abs().float()[mask.bool()]
        totals = self.accelerator.reduce(
            torch.stack([gaps.sum(), torch.tensor(float(gaps.numel()), device=gaps.device)]), reduction="sum"
        )
        largest = self.accelerator.gather(gaps.max() if gaps.numel() else gaps.new_zeros(())).max()
        tokens = int(totals[1])
        gap = LogprobGap(mean=(totals[0] / totals[1].clamp(min=1)).item(), max=largest.item(), tokens=tokens)
        if not gap.mean <= self.tolerance:  # written so that NaN stops the run too
            raise SyncError(
                f"step {step}: the engine does not hold the learner's weights: their log-probabilities of "
                f"{tokens} sampled tokens differ by {gap.mean:.4g} on average and {gap.max:.4g} at most, and "
                f"engine.logprob_tolerance is {self.tolerance:g}"
            )
        return gap


def llm_settings(path: str, dtype: str, max_context: int | None, trust_remote_code: bool) -> dict[str, Any]:
    """What every vLLM engine of ours is started with, in training and in measuring alike.

    max_context: longest prompt with completion, in tokens; None takes the model's own.
    """
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        "max_model_len": max_context,
        "trust_remote_code": trust_remote_code,
        "seed": 0,  # one for all workers: each request carries its own, and a tensor-parallel group must agree
        # The temperature is part of the policy that is trained, so the log-probabilities must include it.
        "logprobs_mode": "processed_logprobs",
        "max_num_batched_tokens": 4096,  # vLLM's memory profiler overestimates with its own, larger default
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        model = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        longest = max_context or model.get_text_config().max_position_embeddings
        settings |= {
            # Compiling takes longer than it saves.
            "enforce_eager": True,
            # A group shares its prompt as far as that fills whole blocks, and vLLM's 128 tokens for the CPU are more
            # than most problems have. Prompts of 20 to 60 tokens: a step is generated in 6 to 13 % less time.
            "block_size": 32,
            # A prompt read in chunks makes vLLM turn back the request's random generator, which torch's CPU
            # generator cannot do. So a prompt is read whole, and a batch must hold the longest one.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, longest),
        }
    return settings


def request_seed(run_seed: int, problem_id: str, epoch: int, index: int) -> int:
    """Seed of one completion: from the run, the problem, the epoch and the index in its group, and nothing else."""
    digest = hashlib.blake2b(f"{run_seed}/{problem_id}/{epoch}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # vLLM takes a signed 64-bit number


@contextmanager
def packing_on_use() -> Iterator[list[torch.nn.Module]]:
    """Let an engine on the CPU be given weights again after each step. Gives the layers that `pack_on_use` must be
    called for whenever their weights have changed, filled in as the engine is made; on CUDA there are none.

    vLLM's CPU backend packs linear weights into a layout of oneDNN's after loading, and throws the weights away. What
    is loaded later never reaches the packed copy, and the engine would go on with stale ones in silence. Here the
    weights are kept beside it, so the engine's take twice the memory, and are packed again: that takes as long as a few
    products, and a step takes hundreds.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    layers: list[torch.nn.Module] = []

    def keep_and_pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            dispatch(layer, remove_weight)  # no linear layer
            return
        layers.append(layer)
        pack_on_use(layer)

    utils.dispatch_cpu_unquantized_gemm = keep_and_pack
    try:
        yield layers
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch


def pack_on_use(layer: Any) -> None:
    """Have a linear layer of vLLM's CPU backend pack its present weights when it is next used.

    Embeddings, which vLLM packs too, are never used as a linear layer, unless the output layer shares them.
    """
    from vllm.model_executor.layers import utils

    def pack(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer.cpu_linear(x, weight, bias)

    layer.cpu_linear = pack if gains_from_packing(layer.weight) else torch.nn.functional.linear


def gains_from_packing(weight: torch.Tensor) -> bool:
    """Whether products with a linear layer's weight, (out, in), are faster packed than not, packing included."""
    return weight.dtype != torch.float32 or weight.numel() >= LEAST_PACKED


@contextmanager
def shared_memory_named(token: str) -> Iterator[None]:
    """Have the workers that share an engine on the CPU share memory under a name with a token of their own.

    vLLM names it by their ranks alone, and refuses a name that is there. What a killed worker left would keep every
    later engine of the machine from starting, and so would another run's.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"{token}{named(group).replace('/', '')}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(named)


def forget_shared_memory(token: str) -> None:
    """Take the names away that hold a token: who has joined goes on, and nothing is left when all have ended."""
    for file in Path("/dev/shm").glob(f"*{token}*"):
        file.unlink(missing_ok=True)
