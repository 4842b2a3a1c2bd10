"""The colocated vLLM engine: TRL's `VLLMGeneration`, extended to run on CUDA and CPU and with a proven weight sync.

Differences from TRL:

- Every request has its own seed, so a completion depends on its problem only, and not on the batch, the worker or the
  attempt that generates it.
- A weight sync must reach every parameter of the engine, and on the CPU every packed copy of a weight
  (`cpu_packing.py`). Checksums show that the engine then holds the learner's weights bit for bit (`weight_proof.py`).
- The engine's log-probabilities of its own samples are compared with the learner's, which shows within a tolerance that
  it computes with these weights (`sync_proof.py`).
"""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from peft import PeftModel
from vllm import LLM, RequestOutput
from vllm.sampling_params import RequestOutputKind

from grpo_ray.config.schema import DEFAULT_LOGPROB_TOLERANCE, Config
from grpo_ray.errors import DataError, SyncError
from grpo_ray.inference.arguments import llm_arguments, request_parameters
from grpo_ray.inference.cpu_packing import is_packed, pack_on_next_use, repackable_layers
from grpo_ray.inference.cpu_sampler import install_cpu_sampler
from grpo_ray.inference.lora_requests import LoraSlot, base_layers, lora_arguments
from grpo_ray.inference.quantized_base import (
    engine_layers,
    frozen_places,
    output_slices,
    require_same_base,
    write_compressed_policy,
)
from grpo_ray.inference.sampling import (
    Completion,
    OnFinished,
    RunRound,
    completion_of,
    ignore_finished,
    limit_tokens,
    training_sampling,
)
from grpo_ray.inference.shared_base import share_base
from grpo_ray.inference.sync_proof import LogprobGap, measure_logprob_gap, require_synced
from grpo_ray.inference.trl_without_trackers import VLLMGeneration, empty_cache
from grpo_ray.inference.unprocessed_logprobs import install_unprocessed_logprobs
from grpo_ray.inference.vllm_internals import (
    FormMasks,
    bound_to_current_stream,
    cached_blocks,
    engine_model,
    load_weights,
    logits_sampler,
    named_shared_memory,
    prefer_second_runner,
    runner_number,
    token_sampler,
    unlink_shared_memory,
)
from grpo_ray.inference.weight_proof import WeightProof, is_matrix, learner_weights, request_weights
from grpo_ray.models.adapters import frozen_weights, lora_updates, merged_weights, require_plain_lora
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig


class Engine(VLLMGeneration):
    """One worker's vLLM engine, in the worker's process, generating with the learner's weights."""

    enable_sleep_mode: bool

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        accelerator: "Accelerator",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        config: Config,
        args: "GRPOConfig",
        profiler: PhaseProfiler | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ):
        """Start the engine. Collective: every rank must create its engine.

        Args:
            model: the learner's model, the source of the weights.
            config: the run's config.
            args: TRL's arguments, with the sizes of this worker.
            profiler: the worker's profiler; by default a new one.
            notify: shows the user a line.
        """
        self.notify = notify
        self.profiler = profiler or PhaseProfiler()
        self.config = config
        tolerance = config.engine.logprob_tolerance
        self.logprob_tolerance = DEFAULT_LOGPROB_TOLERANCE[config.dtype] if tolerance is None else tolerance
        # 0: only the sampled token's log-probability; 1: a second value as well, its unprocessed log-probability.
        self.training_sampling = training_sampling(config) | {"logprobs": 1 if config.sampling.processing else 0}
        """Arguments of `vllm.SamplingParams` for a completion of training, without its seed."""
        self._shares_four_bits = config.model.quantization == "int4"
        self._folder = Path(args.output_dir)
        self._next_request_id = 0
        self.proofs = 0
        """Number of proofs by checksums so far."""
        super().__init__(
            model,
            accelerator,
            tokenizer,
            mode="colocate",
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=config.engine.gpu_memory_utilization,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
        )

    def _init_vllm(self) -> None:
        """Start vLLM in this process. TRL's version lets vLLM choose the precision, and cannot sync on the CPU."""
        on_cpu = self.accelerator.device.type == "cpu"
        self.enable_sleep_mode = self.enable_sleep_mode and not on_cpu
        token = self._join_tensor_parallel_group(secrets.token_hex(8))
        prefer_second_runner()
        lora: dict[str, Any] = {}
        if self.config.adapter_sync == "request":
            lora = lora_arguments(require_plain_lora(self.model))
        with (
            repackable_layers() as self._repackable_layers,
            named_shared_memory(token),
            self._policy_files() as path,
        ):
            self.llm = LLM(
                **llm_arguments(path, self.config, max_num_seqs=self.max_num_seqs),
                **lora,
                tensor_parallel_size=self.tensor_parallel_size,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_sleep_mode=self.enable_sleep_mode,
                # vLLM joins the worker's own process group instead of starting worker processes.
                distributed_executor_backend="external_launcher",
            )
        self.slot = LoraSlot(self.llm) if lora else None
        """The adapter that requests name; None if it is merged, or there is none."""
        self._holds_frozen_weights = False
        self._shares_base = False
        self._has_new_weights = True
        """False once weights have been proven that were sent before the adapter."""
        if on_cpu:
            # On CUDA vLLM's own sampler stays; see `prefer_second_runner` for the cost of a seed per request.
            install_cpu_sampler(token_sampler(self.llm))
        if self.config.sampling.processing:
            install_unprocessed_logprobs(logits_sampler(self.llm))
        self.form_masks = FormMasks(self.llm) if self.config.sampling.structured_outputs else None
        """Tokens that the form of the run's completions allows; None without a form."""
        if self.form_masks is not None:
            # vLLM compiles a form with the first request, and a learner that resumes with completions of later steps
            # reads the form before it.
            shortest = request_parameters(limit_tokens(self.training_sampling, 1))
            self.llm.generate([{"prompt_token_ids": [0]}], shortest, use_tqdm=False)
        rank = torch.distributed.get_rank(group=self.tp_group) if self.tensor_parallel_size > 1 else 0
        self.weight_proof = WeightProof(self.notify, self._gather_in_group, rank)
        if self.enable_sleep_mode:
            self._sleep()
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()
        unlink_shared_memory(token)  # every worker has joined it

    @contextmanager
    def _policy_files(self) -> Iterator[str]:
        """Yield the folder or hub id from which vLLM loads the policy; with int4 that of the learner's codes."""
        if not self._shares_four_bits:
            yield self.model.name_or_path
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            folder = Path(scratch, "int4")
            write_compressed_policy(self._adapted, self.processing_class, folder)
            yield str(folder)

    def _join_tensor_parallel_group(self, token: str) -> str:
        """Create the process group of the workers that share an engine; return the first worker's token."""
        if self.tensor_parallel_size == 1:
            return token
        ranks = range(self.accelerator.num_processes)
        self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(
            [list(ranks[i : i + self.tensor_parallel_size]) for i in ranks[:: self.tensor_parallel_size]]
        )
        return self._gather_in_group(token)[0]

    def _gather_in_group(self, value: Any) -> list[Any]:
        """Return the values of all workers that share this engine, by rank in the group; collective."""
        if self.tensor_parallel_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, value, group=self.tp_group)
        return gathered

    @property
    def description(self) -> str:
        """Version of vLLM, its model runner, and the arguments of `engine.vllm`, for the log."""
        own = ", ".join(f"{name}={value}" for name, value in redact(dict(self.config.engine.vllm)).items())
        return f"vLLM {vllm.__version__}, model runner {runner_number(self.llm)}" + (f", {own}" if own else "")

    def _sleep(self) -> None:
        """Release the memory of weights and KV cache."""
        # vLLM schedules one step ahead, so a last step, whose results are not used, may still be running.
        self.profiler.wait_for_device()
        # Weights that no sync sends again are kept in main memory.
        self.llm.sleep(level=1 if self._shares_four_bits else 2)
        self._holds_frozen_weights = self._shares_four_bits and self._holds_frozen_weights

    def _empty_prefix_cache(self) -> None:
        """Delete the cached keys and values of earlier prompts.

        Raises:
            SyncError: some are still in use, so vLLM would continue with keys and values of older weights.
        """
        if not self.llm.reset_prefix_cache():
            raise SyncError(
                "the engine could not empty its prefix cache, which holds keys and values of older weights: blocks are "
                "still in use although all requests are finished; set engine.vllm={enable_prefix_caching: false}"
            )

    @property
    def max_model_len(self) -> int:
        """Longest prompt with its completion, in tokens."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    @property
    def vocabulary_size(self) -> int:
        """Number of the policy's token ids."""
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    @in_phase("sync")
    def sync_weights(self) -> None:
        """Copy the learner's weights into the engine, and prove that it holds them bit for bit; collective.

        Raises:
            SyncError: a parameter of the engine was not set, or differs from the learner's weights.
        """
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if self._shares_four_bits:
            self._find_places()
        elif self.slot is None or not self._holds_frozen_weights:
            self._send_weights()
        if self.slot is not None:
            self.slot.send(lora_updates(self._adapted))
        self._empty_prefix_cache()
        self._prove_weights()
        if self.config.model.share_base and not self._shares_base:
            self._share_base()
        self.profiler.wait_for_device()  # otherwise the copies would count as generation

    def _send_weights(self) -> None:
        """Copy all weights into the engine: merged, or the frozen ones below an adapter that requests name."""
        self._has_new_weights = True
        with base_layers(engine_model(self.llm)):
            loaded, expected = self._load_weights()
        if missing := sorted(expected - loaded):
            raise SyncError(
                f"weight sync did not reach {len(missing)} of the engine's {len(expected)} parameters, first "
                f"{missing[0]}; nothing was generated with them. Check that vLLM can load this model's parameter names"
            )
        for layer in self._repackable_layers:
            pack_on_next_use(layer)
        self._holds_frozen_weights = self.slot is not None

    def _share_base(self) -> None:
        """Replace the learner's frozen weights, which have just been proven to be the engine's, by views of them."""
        regions, parameters = self.weight_proof.single_regions(), self._parameters()
        names = share_base(self._adapted, regions, parameters, self._fix_param_name_to_vllm)
        self.weight_proof.keep_constant(names)
        self._shares_base = True
        empty_cache()

    def _find_places(self) -> None:
        """Find the places of the adapter's matrices in an engine that has loaded its base from a file; once."""
        if self._holds_frozen_weights:
            return
        assert self.slot is not None
        model = engine_model(self.llm)
        with base_layers(model):
            slices = {name: output_slices(layer) for name, layer in engine_layers(model).items()}
        places = frozen_places(self._adapted, slices)
        self.weight_proof.set_layout(self.slot.of_matrices(places, lora_updates(self._adapted)))
        self.weight_proof.note_precision(self._parameters())
        self._holds_frozen_weights = True

    def _load_weights(self) -> tuple[set[str], set[str]]:
        """Load the weights through vLLM; return the names of the parameters set, and of those that must be.

        The first load also records where vLLM stores each weight.
        """
        weights, parameters = self._iter_named_params(), self._parameters()
        if (method := self.llm.llm_engine.model_config.quantization) is not None:
            self.weight_proof.set_quantized(method)
            return load_weights(self.llm, weights)
        if self.weight_proof.has_layout:
            names = load_weights(self.llm, weights)
        else:
            with self.weight_proof.recorder(parameters) as recorder:
                names = load_weights(self.llm, recorder.watch(weights))
            if names[1] <= names[0]:  # otherwise `sync_weights` raises an error that names the parameters
                recorded = recorder.recorded()
                if self.slot is not None:
                    recorded = self.slot.with_matrices(recorded, lora_updates(self._adapted))
                self.weight_proof.set_layout(recorded)
        self.weight_proof.note_precision(self._parameters())
        return names

    @in_phase("sync")
    def prove_weights(self) -> None:
        """Prove that the engine holds the learner's weights bit for bit; collective.

        Used before a generation that no sync precedes. An engine that sleeps without its weights receives and proves
        them when it wakes up.

        Raises:
            SyncError: a weight differs, or the engine still keeps data that was computed with older weights.
        """
        if not self._llm_weights_sleeping:
            self._prove_weights()

    def _prove_weights(self) -> None:
        if self.slot is not None:
            self.slot.require_nothing_else()
        named = learner_weights(self.model) if self.slot is None else request_weights(self._adapted)
        if self._shares_four_bits:
            with base_layers(engine_model(self.llm)):
                require_same_base(self._adapted, engine_model(self.llm))
            named = ((name, weight) for name, weight in named if is_matrix(name))
        weights = ((self._fix_param_name_to_vllm(name), weight) for name, weight in named)
        self.weight_proof.compare(weights, self._parameters(), self._stale_copies)
        self.proofs += 1
        self._has_new_weights = self.slot is None

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the engine's parameters, and the matrices of the adapter that requests name."""
        model = engine_model(self.llm)
        with base_layers(model):
            return dict(model.named_parameters()) | ({} if self.slot is None else self.slot.tensors())

    @property
    def _adapted(self) -> PeftModel:
        """The learner's model, which has an adapter."""
        assert isinstance(self.model, PeftModel)
        return self.model

    def _stale_copies(self) -> list[str]:
        """Describe the data that the engine has computed with its weights and still keeps, one text for each kind."""
        copies = []
        if blocks := cached_blocks(self.llm):
            copies.append(f"keys and values of earlier prompts ({blocks} blocks of its prefix cache)")
        if self.llm.llm_engine.has_unfinished_requests():
            copies.append("requests that were begun with older weights")
        # Those of the frozen weights stay while the adapter changes.
        if self._has_new_weights and (packed := sum(map(is_packed, self._repackable_layers))):
            copies.append(f"packed weights of {packed} linear layers")
        return copies

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the learner's weights under vLLM's names. Collective: it gathers shards, so every rank must iterate.

        TRL's version merges an adapter into the learner's weights and unmerges it afterwards, which in 16 bits changes
        them slightly each time. This version only reads them.
        """
        if self.slot is not None:
            return frozen_weights(self._adapted)
        return merged_weights(self.model) if isinstance(self.model, PeftModel) else super()._iter_named_params()

    @in_phase("generate")
    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished = ignore_finished
    ) -> list[Completion]:
        """Sample one completion per prompt, as one round of `rounds`.

        Args:
            prompts: (B,) lists of token ids, a group's prompt once for each of its completions.
            sampling: (B,) arguments of `vllm.SamplingParams`, with the completion's own seed.
            on_finished: called for each completion while others are still sampled.
        """
        with self.rounds() as run_round:
            completions = run_round(prompts, sampling, on_finished)
        self.profiler.count_tokens("engine", sum(len(each.token_ids) for each in completions))
        return completions

    @contextmanager
    def heldout_rounds(self) -> Iterator[RunRound]:
        """Wake the engine up as `rounds` does, for held-out problems, and empty the prefix cache afterwards."""
        with self._awake() as run_round:
            yield run_round
        # The next step must not reuse cached prompt prefixes. A restarted worker would have to compute them, and in a
        # batch with other prompts they are rounded differently (exact resume).
        self._empty_prefix_cache()

    def rounds(self) -> AbstractContextManager[RunRound]:
        """Return a context in which the engine is awake; it yields a function that runs one round of requests.

        The function may be called any number of times. It is collective in a tensor-parallel group, which generates for
        all its workers together: each of them must call it equally often, without prompts if it has none
        (`is_any_active`).

            prompts: (B,) lists of token ids.
            sampling: (B,) arguments of `vllm.SamplingParams`.
            on_finished: called for each completion as soon as it is finished, with its index and its token ids.
            returns: the completions of this worker's prompts.
            raises DataError: a prompt leaves no space for a completion.
        """
        return self._awake()

    @contextmanager
    def _awake(self) -> Iterator[RunRound]:
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        yield self._run_round
        if self.enable_sleep_mode:
            self._sleep()
            self._llm_weights_sleeping = True

    def is_any_active(self, is_active: bool) -> bool:
        """Return True if any of the workers that share this engine is active; collective among them."""
        return any(self._gather_in_group(is_active)) if self.tensor_parallel_size > 1 else is_active

    def _run_round(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
    ) -> list[Completion]:
        longest = max(map(len, prompts), default=0)
        if longest >= self.max_model_len:
            raise DataError(
                f"a prompt has {longest} tokens, but the engine's context of {self.max_model_len} tokens must hold "
                "prompt and completion; increase engine.max_model_len or remove such problems"
            )
        own = slice(0, len(prompts))
        if self.tensor_parallel_size > 1:
            gathered = self._gather_in_group((prompts, sampling))
            first = sum(len(each) for each, _ in gathered[: torch.distributed.get_rank(group=self.tp_group)])
            own = slice(first, first + len(prompts))
            prompts = [prompt for each, _ in gathered for prompt in each]
            sampling = [arguments for _, each in gathered for arguments in each]
            self._drain_collectives()
        with bound_to_current_stream(self.llm):
            outputs = self._complete(prompts, sampling, own, on_finished)
        return [completion_of(output) for output in outputs]

    def _drain_collectives(self) -> None:
        """Wait until all workers have finished their collectives of the last optimizer step; collective.

        Without NVLink the communication inside vLLM may otherwise overlap with NCCL's cleanup after an all-reduce of
        gradients and hang, above all with an adapter, whose all-reduce is short (TRL has the same barrier, for its
        issue 3671).
        NCCL's barrier also blocks the host until the device has finished; Gloo's would not.
        """
        device = self.accelerator.device
        torch.distributed.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def _complete(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], own: slice, on_finished: OnFinished
    ) -> list["RequestOutput"]:
        """Run the requests until all are finished; call `on_finished` for each of `own` while others still run.

        Returns:
            The outputs of `own`, in the order of the prompts.
        """
        engine = self.llm.llm_engine
        first_id = self._next_request_id
        self._next_request_id += len(prompts)
        for number, (prompt, arguments) in enumerate(zip(prompts, sampling, strict=True)):
            parameters = request_parameters(arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(
                str(first_id + number),
                {"prompt_token_ids": prompt},
                parameters,
                lora_request=None if self.slot is None else self.slot.request,
            )
        finished: dict[int, RequestOutput] = {}
        own_numbers = range(len(prompts))[own]
        while engine.has_unfinished_requests():
            outputs = engine.step()
            self.profiler.note_progress()
            for output in outputs:
                number = int(output.request_id) - first_id
                finished[number] = output
                if number in own_numbers:
                    on_finished(number - own_numbers.start, list(output.outputs[0].token_ids))
        return [finished[number] for number in own_numbers]

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
