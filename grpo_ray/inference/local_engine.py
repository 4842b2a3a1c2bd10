"""A vLLM engine in this process, which generates with the weights that a learner sends.

The colocated engine of a worker (`engine.py`) and a dedicated engine's process (`pool/engine_process.py`) are built on
it. It has no part of the learner. Several processes can share one engine (tensor parallelism): each of them makes the
same calls, and vLLM communicates in their process group.

- Every request has its own seed, so a completion depends on its problem only, and not on the batch, the worker or the
  attempt that generates it.
- New weights must reach every parameter of the engine, and on the CPU every packed copy of a weight
  (`cpu_packing.py`). Checksums show that the engine then holds the learner's weights bit for bit (`weight_proof.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import LLM, RequestOutput
from vllm.sampling_params import RequestOutputKind

from grpo_ray.config.schema import Config
from grpo_ray.errors import SyncError
from grpo_ray.inference.arguments import llm_arguments, request_parameters
from grpo_ray.inference.cpu_packing import is_packed, pack_on_next_use, repackable_layers
from grpo_ray.inference.cpu_sampler import install_cpu_sampler
from grpo_ray.inference.lora_requests import LoraSlot, base_layers, lora_arguments
from grpo_ray.inference.sampling import (
    Completion,
    OnFinished,
    RunRound,
    completion_of,
    ignore_finished,
    limit_tokens,
    require_space,
)
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
from grpo_ray.inference.weight_proof import LearnerSums, WeightProof
from grpo_ray.models.adapters import LoraUpdate
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalEngine:
    """An engine in this process, or this process's part of one."""

    config: Config
    device: torch.device
    profiler: PhaseProfiler
    notify: Callable[[str], None]
    """Shows the user a line."""
    training_sampling: dict[str, Any]
    """Arguments of `vllm.SamplingParams` for a completion of training, without its seed."""
    tensor_parallel_size: int
    tp_group: "ProcessGroup | None"
    """Process group of the processes that share this engine; None for a single one."""
    enable_sleep_mode: bool

    def start_llm(
        self,
        path: str,
        *,
        max_num_seqs: int,
        gpu_memory_utilization: float,
        lora_ranks: Mapping[str, int] | None,
        shared_memory: str,
        wait_for_others: Callable[[], None],
        **arguments: Any,
    ) -> None:
        """Start vLLM; collective among the processes that share the engine.

        Args:
            path: local folder or hub id of the policy.
            max_num_seqs: maximum number of completions that are generated at the same time.
            gpu_memory_utilization: fraction of the GPU's memory that the engine takes.
            lora_ranks: name of each adapted layer -> rank of its update, if requests name an adapter; otherwise None.
            shared_memory: part of the name of the shared memory of processes on the CPU, the same in all of them.
            wait_for_others: returns once all processes have called it.
            arguments: further arguments of `vllm.LLM`.
        """
        self._next_request_id = 0
        self.proofs = 0
        """Number of proofs by checksums so far."""
        prefer_second_runner()
        with repackable_layers() as self._repackable_layers, named_shared_memory(shared_memory):
            self.llm = LLM(
                **llm_arguments(path, self.config, max_num_seqs=max_num_seqs),
                **({} if lora_ranks is None else lora_arguments(lora_ranks)),
                tensor_parallel_size=self.tensor_parallel_size,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_sleep_mode=self.enable_sleep_mode,
                # vLLM joins this process's own process group instead of starting worker processes.
                distributed_executor_backend="external_launcher",
                **arguments,
            )
        self.slot = None if lora_ranks is None else LoraSlot(self.llm)
        """The adapter that requests name; None if it is merged, or there is none."""
        self._holds_frozen_weights = False
        self._has_new_weights = True
        """False once weights have been proven that were sent before the adapter."""
        if self.device.type == "cpu":
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
        self.weight_proof = WeightProof(self.notify, self.gather_in_group, rank)
        wait_for_others()
        unlink_shared_memory(shared_memory)  # every process has joined it

    def gather_in_group(self, value: Any) -> list[Any]:
        """Return the values of all processes that share this engine, by rank in the group; collective."""
        if self.tensor_parallel_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, value, group=self.tp_group)
        return gathered

    def wait_for_group(self) -> None:
        """Wait for all processes that share this engine; collective."""
        self.gather_in_group(None)

    @property
    def description(self) -> str:
        """Version of vLLM, its model runner, and the arguments of `engine.vllm`, for the log."""
        own = ", ".join(f"{name}={value}" for name, value in redact(dict(self.config.engine.vllm)).items())
        return f"vLLM {vllm.__version__}, model runner {runner_number(self.llm)}" + (f", {own}" if own else "")

    def empty_prefix_cache(self) -> None:
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

    def receive_weights(self, weights: Iterable[tuple[str, torch.Tensor]], updates: Iterable[LoraUpdate] = ()) -> None:
        """Copy weights into the engine: merged, or the frozen ones below an adapter that requests name.

        Args:
            weights: the learner's, under the names of a checkpoint.
            updates: updates of that adapter. Only their shapes are read, in the first call.

        Raises:
            SyncError: a parameter of the engine was not set.
        """
        self._has_new_weights = True
        with base_layers(engine_model(self.llm)):
            loaded, expected = self._load_weights(weights, updates)
        if missing := sorted(expected - loaded):
            raise SyncError(
                f"weight sync did not reach {len(missing)} of the engine's {len(expected)} parameters, first "
                f"{missing[0]}; nothing was generated with them. Check that vLLM can load this model's parameter names"
            )
        for layer in self._repackable_layers:
            pack_on_next_use(layer)
        self._holds_frozen_weights = self.slot is not None

    def _load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], updates: Iterable[LoraUpdate]
    ) -> tuple[set[str], set[str]]:
        """Load the weights through vLLM; return the names of the parameters set, and of those that must be.

        The first load also records where vLLM stores each weight.
        """
        parameters = self._parameters()
        if (method := self.llm.llm_engine.model_config.quantization) is not None:
            self.weight_proof.set_quantized(method)
            return load_weights(self.llm, weights)
        if self.weight_proof.has_layout:
            names = load_weights(self.llm, weights)
        else:
            with self.weight_proof.recorder(parameters) as recorder:
                names = load_weights(self.llm, recorder.watch(weights))
            if names[1] <= names[0]:  # otherwise `receive_weights` raises an error that names the parameters
                recorded = recorder.recorded()
                if self.slot is not None:
                    recorded = self.slot.with_matrices(recorded, updates)
                self.weight_proof.set_layout(recorded)
        self.weight_proof.note_precision(self._parameters())
        return names

    def prove_sums(self, learner: LearnerSums) -> None:
        """Prove that the engine holds the learner's weights; collective among the processes that share it.

        Args:
            learner: checksums of the learner's weights, in the engine's precision (`WeightProof.precision`).

        Raises:
            SyncError: a weight differs, or the engine still keeps data that was computed with older weights.
        """
        if self.slot is not None:
            self.slot.require_nothing_else()
        self.weight_proof.compare_sums(learner, self._parameters(), self._stale_copies)
        self.proofs += 1
        self._has_new_weights = self.slot is None

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the engine's parameters, and the matrices of the adapter that requests name."""
        model = engine_model(self.llm)
        with base_layers(model):
            return dict(model.named_parameters()) | ({} if self.slot is None else self.slot.tensors())

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
        self.empty_prefix_cache()

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
        yield self._run_round

    def is_any_active(self, is_active: bool) -> bool:
        """Return True if any of the workers that share this engine is active; collective among them."""
        return any(self.gather_in_group(is_active)) if self.tensor_parallel_size > 1 else is_active

    def _run_round(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
    ) -> list[Completion]:
        require_space(prompts, self.max_model_len)
        own = slice(0, len(prompts))
        if self.tensor_parallel_size > 1:
            gathered = self.gather_in_group((prompts, sampling))
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
        torch.distributed.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def _complete(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], own: slice, on_finished: OnFinished
    ) -> list["RequestOutput"]:
        """Run the requests until all are finished; call `on_finished` for each of `own` while others still run.

        Returns:
            The outputs of `own`, in the order of the prompts.
        """
        finished: dict[int, RequestOutput] = {}
        own_numbers = range(len(prompts))[own]
        for outputs in self.steps(prompts, sampling):
            for number, output in outputs:
                finished[number] = output
                if number in own_numbers:
                    on_finished(number - own_numbers.start, list(output.outputs[0].token_ids))
        return [finished[number] for number in own_numbers]

    def steps(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]]
    ) -> Iterator[list[tuple[int, "RequestOutput"]]]:
        """Run the requests until all are finished, one step of the engine at a time: a token of each running request.

        A generator that is closed earlier aborts the remaining requests.

        Yields:
            The requests that the step has finished, each with its index.
        """
        engine = self.llm.llm_engine
        first_id = self._next_request_id
        self._next_request_id += len(prompts)
        running = {str(first_id + number): number for number in range(len(prompts))}
        try:
            for name, prompt, arguments in zip(list(running), prompts, sampling, strict=True):
                engine.add_request(
                    name,
                    {"prompt_token_ids": prompt},
                    request_parameters(arguments, output_kind=RequestOutputKind.FINAL_ONLY),
                    lora_request=None if self.slot is None else self.slot.request,
                )
            while engine.has_unfinished_requests():
                outputs = engine.step()
                self.profiler.note_progress()
                yield [(running.pop(output.request_id), output) for output in outputs]
        finally:
            if running:
                engine.abort_request(list(running))
