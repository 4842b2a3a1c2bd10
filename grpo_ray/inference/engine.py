"""The colocated vLLM engine of a worker: in the worker's process, on the same device as its learner.

It runs on CUDA and on the CPU, with a proven weight sync. The engine itself is `local_engine.py`, and the learner's end
of the sync `learner_end.py`; here are the sync between them and the sharing of a device.
"""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel

from grpo_ray.config.schema import Config
from grpo_ray.inference.learner_end import LearnerEnd
from grpo_ray.inference.local_engine import LocalEngine
from grpo_ray.inference.lora_requests import base_layers
from grpo_ray.inference.quantized_base import (
    engine_layers,
    frozen_places,
    output_slices,
    require_same_base,
    write_compressed_policy,
)
from grpo_ray.inference.sampling import RunRound
from grpo_ray.inference.shared_base import share_base
from grpo_ray.inference.trl_without_trackers import empty_cache
from grpo_ray.inference.vllm_internals import engine_model
from grpo_ray.inference.weight_proof import is_matrix, learner_sums
from grpo_ray.models.adapters import lora_updates, require_plain_lora
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig


class Engine(LocalEngine, LearnerEnd):
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
        self.device = accelerator.device
        self.tp_group = None
        self._shares_four_bits = config.model.quantization == "int4"
        self._shares_base = False
        self._folder = Path(args.output_dir)
        super().__init__(
            model,
            accelerator,
            tokenizer,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=config.engine_fraction,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
        )

    def _init_vllm(self) -> None:
        """Start vLLM in this process. TRL's version lets vLLM choose the precision, and cannot sync on the CPU."""
        self.enable_sleep_mode = self.enable_sleep_mode and self.device.type != "cpu"
        token = self._join_tensor_parallel_group(secrets.token_hex(8))
        adapted = self.config.adapter_sync == "request"

        def end_start() -> None:
            if self.enable_sleep_mode:
                self._sleep()
            self._llm_weights_sleeping = self.enable_sleep_mode
            self.accelerator.wait_for_everyone()

        with self._policy_files() as path:
            self.start_llm(
                path,
                max_num_seqs=self.max_num_seqs,
                gpu_memory_utilization=self.gpu_memory_utilization,
                lora_ranks=require_plain_lora(self.model) if adapted else None,
                shared_memory=token,
                wait_for_others=end_start,
            )

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
        return self.gather_in_group(token)[0]

    def _sleep(self) -> None:
        """Release the memory of weights and KV cache."""
        # vLLM schedules one step ahead, so a last step, whose results are not used, may still be running.
        self.profiler.wait_for_device()
        # Weights that no sync sends again are kept in main memory.
        self.llm.sleep(level=1 if self._shares_four_bits else 2)
        self._holds_frozen_weights = self._shares_four_bits and self._holds_frozen_weights

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
        self.empty_prefix_cache()
        self._prove_weights()
        if self.config.model.share_base and not self._shares_base:
            self._share_base()
        self.profiler.wait_for_device()  # otherwise the copies would count as generation

    def _send_weights(self) -> None:
        """Copy all weights into the engine: merged, or the frozen ones below an adapter that requests name."""
        self.receive_weights(self._iter_named_params(), () if self.slot is None else lora_updates(self._adapted))

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
        named = self.weights_to_prove()
        if self._shares_four_bits:
            with base_layers(engine_model(self.llm)):
                require_same_base(self._adapted, engine_model(self.llm))
            named = ((name, weight) for name, weight in named if is_matrix(name))
        self.prove_sums(learner_sums(named, self.weight_proof.precision()))

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
