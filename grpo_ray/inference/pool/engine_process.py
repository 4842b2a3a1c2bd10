"""One process of a dedicated engine, a Ray actor: it receives weights and generates what the pool sends it.

An engine of several GPUs (`engine.tensor_parallel_size`) has as many processes. All of them get the same calls in the
same order, and vLLM communicates in their process group, as among the workers that share a colocated engine.
"""

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_ray.config.schema import Config
from grpo_ray.device import compute_device, select_device
from grpo_ray.inference.pool.messages import Address, Announcement, EngineFacts
from grpo_ray.inference.sampling import Completion
from grpo_ray.resilience.nodes import check_joined_node
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage.filesystem import fetch_folder
from grpo_ray.storage.process_output import redirect_output
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.scratch_folder import create_scratch_folder
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    import torch

    from grpo_ray.inference.pool.weights import Chunk
    from grpo_ray.inference.weight_proof import LearnerSums
    from grpo_ray.models.adapters import LoraUpdate

GROUP_TIMEOUT = timedelta(hours=2)
"""Timeout of the start of an engine's process group, in which other processes may still load libraries."""
AGREED_STEPS = 64
"""Steps of an engine between two times at which its processes agree on whether to go on: a few seconds."""
Disturbance = Literal["kill", "hang"]
"""A process is killed, or makes no further step."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Arguments of an engine's processes, the same for all engines of a run."""

    config: Config
    model_path: str
    """Folder, URI or hub id of the initial policy."""
    max_num_seqs: int
    """Largest number of completions that an engine generates at the same time."""
    versions: dict[str, str]
    """The driver's versions (`nodes.versions`); empty: they are not compared."""
    environment: Mapping[str, str]
    """Environment variables of the engines' processes."""
    coordinator: Any
    """Handle of the run's `RunCoordinator` actor."""


class RoundAborted(Exception):
    """The round is not needed any more: the attempt that it belongs to has ended."""


class EngineProcess:
    """A process of an engine. Its methods are called one after the other, but for `abort`, `disturb` and `pid`."""

    def __init__(self, spec: EngineSpec, number: int, rank: int) -> None:
        """
        Args:
            number: number of the engine in the pool.
            rank: number of the process in the engine.
        """
        self._spec, self._number, self._rank = spec, number, rank
        self._name = f"engine-{number}" + (f"-{rank}" if spec.config.engine.tensor_parallel_size > 1 else "")
        self._config = spec.config
        self._folder = RunFolder(
            spec.config.run.storage_path, spec.config.run.name, spec.config.run.storage_retry_seconds
        )
        self._ended: set[str] = set()
        """Attempts that have ended."""
        self._hangs = threading.Event()
        self._owner: Any = None
        """Owner of the keys and values in the prefix cache."""
        self._group = ""
        """Name of the process group of the last broadcast."""

    def open_store(self) -> Address:
        """Open the store of the engine's process group, in its first process; return its address."""
        import ray
        from torch.distributed import TCPStore

        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        return ray.util.get_node_ip_address(), self._store.port

    def start(self, store: Address | None, lora_ranks: Mapping[str, int] | None) -> EngineFacts:
        """Start vLLM with the initial policy; collective among the engine's processes.

        Args:
            store: address of the store; None for an engine of one process.
            lora_ranks: name of each adapted layer -> rank of its update, if requests name an adapter; otherwise None.
        """
        import ray

        check_joined_node(self._spec.versions, self._folder)
        redirect_output(self._folder, f"{self._name}.log")
        select_device(self._config.cluster.use_gpu)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
        scratch = create_scratch_folder(f"{self._config.run.name}-{self._name}")
        run = self._config.run
        self._watchdog = Watchdog(
            Path(scratch, f"stacks-{self._name}.txt"),  # on this node, since the storage may hang
            run.hang_factor,
            run.hang_seconds,
            self._report_hang,
            lambda: self._engine.profiler.progress,
        )
        path = fetch_folder(self._spec.model_path, run.storage_retry_seconds, into=scratch)
        self._engine = self._start_engine(path, store, lora_ranks)
        return EngineFacts(
            self._engine.description,
            self._engine.max_model_len,
            self._engine.vocabulary_size,
            ray.util.get_node_ip_address(),
        )

    def _start_engine(self, path: str, store: Address | None, lora_ranks: Mapping[str, int] | None) -> Any:
        from grpo_ray.inference.local_engine import LocalEngine
        from grpo_ray.inference.sampling import training_sampling
        from grpo_ray.telemetry.profiler import PhaseProfiler

        size = self._config.engine.tensor_parallel_size
        self._join_group(store, size)
        engine = LocalEngine()
        engine.config = self._config
        engine.device = _device(self._config.cluster.use_gpu)
        engine.profiler = PhaseProfiler()
        engine.notify = self._notify
        engine.training_sampling = training_sampling(self._config)
        engine.tensor_parallel_size = size
        engine.tp_group = _world() if size > 1 else None
        engine.enable_sleep_mode = False
        token = engine.gather_in_group(secrets.token_hex(8))[0]
        engine.start_llm(
            path,
            max_num_seqs=self._spec.max_num_seqs,
            gpu_memory_utilization=self._config.engine_fraction,
            lora_ranks=lora_ranks,
            shared_memory=token,
            wait_for_others=engine.wait_for_group,
            # Each process sees its own GPU only, and vLLM's own all-reduce would need to see those of the others.
            **({"disable_custom_all_reduce": True} if size > 1 else {}),
        )
        return engine

    def _join_group(self, store: Address | None, size: int) -> None:
        """Create the process group of the engine's processes; vLLM needs one even for a single process."""
        import torch
        from torch.distributed import HashStore, TCPStore

        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
        backend = "cuda:nccl,cpu:gloo" if compute_device(self._config.cluster.use_gpu) == "cuda" else "gloo"
        if store is None:
            shared: Any = HashStore()
        elif self._rank == 0:
            shared = self._store
        else:
            shared = TCPStore(*store, is_master=False, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        # vLLM reads them although the group exists.
        os.environ |= {"MASTER_ADDR": "127.0.0.1" if store is None else store[0], "MASTER_PORT": "0"}
        torch.distributed.init_process_group(
            backend, store=shared, rank=self._rank, world_size=size, timeout=GROUP_TIMEOUT
        )

    def load(self, chunks: Sequence["Chunk"], updates: Sequence["LoraUpdate"] | None) -> dict[str, str]:
        """Replace the engine's weights.

        Args:
            chunks: references to the weights in the object store. Empty if the engine keeps the frozen weights, below
                an adapter that requests name.
            updates: updates of that adapter; None without one.

        Returns:
            The name of the precision in which the engine holds each weight (`WeightProof.precision`).

        Raises:
            SyncError: a parameter of the engine was not set.
        """
        import ray

        from grpo_ray.inference.pool.weights import tensors

        engine = self._engine
        with self._watched("receiving weights"):
            if chunks:
                engine.receive_weights(tensors(ray.get(chunk) for chunk in chunks), updates or ())
            if updates is not None:
                assert engine.slot is not None
                engine.slot.send(updates)
            return self._end_load()

    def receive(self, announcement: Announcement, rank: int) -> dict[str, str]:
        """Replace the engine's weights by those that the learner broadcasts; see `load`.

        Args:
            announcement: the version that is about to be sent.
            rank: this process's rank in the group of the broadcast.
        """
        from grpo_ray.inference.pool.broadcast import Channel, join_store

        engine = self._engine
        with self._watched("receiving weights"):
            if self._group != announcement.group:
                self._channel = Channel(join_store(announcement.store), rank, announcement.size, engine.device)
                self._group = announcement.group
            engine.receive_weights(self._channel.receive(announcement.weights))
            return self._end_load()

    def _end_load(self) -> dict[str, str]:
        from grpo_ray.inference.pool.weights import dtype_name

        engine = self._engine
        engine.empty_prefix_cache()
        self._owner = None
        engine.profiler.wait_for_device()
        return {name: dtype_name(dtype) for name, dtype in engine.weight_proof.precision().items()}

    def prove(self, learner: "LearnerSums") -> None:
        """Compare the engine's weights with the learner's checksums.

        Raises:
            SyncError: a weight differs, or the engine keeps data of older weights.
        """
        with self._watched("comparing weights"):
            self._engine.prove_sums(learner)

    def run(
        self, token: str, owner: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Generate a completion for each prompt; yield those that have finished, each with its index.

        Args:
            token: the attempt that the work is for.
            owner: key of the work that may reuse keys and values of these prompts: a later call with the same key. The
                cached ones of another owner are deleted first, so that a result does not depend on what the engine
                did before.
            prompts: (B,) lists of token ids.
            sampling: (B,) arguments of `vllm.SamplingParams`, each with its own seed.

        Raises:
            RoundAborted: the attempt has ended.
        """
        from grpo_ray.inference.sampling import completion_of

        engine = self._engine
        if (token, owner) != self._owner:
            engine.empty_prefix_cache()
            self._owner = (token, owner)
        with self._watched("generating"), contextlib.closing(engine.steps(prompts, sampling)) as steps:
            for number, outputs in enumerate(steps):
                if self._is_aborted(token, number):
                    raise RoundAborted
                while self._hangs.is_set():
                    time.sleep(1)  # until the watchdog ends this process
                if outputs:
                    yield [(index, completion_of(output)) for index, output in outputs]

    def _is_aborted(self, token: str, step: int) -> bool:
        """Return True if the attempt has ended; the processes of one engine stop after the same step."""
        is_ended = token in self._ended
        if self._engine.tensor_parallel_size == 1:
            return is_ended
        return step % AGREED_STEPS == 0 and any(self._engine.gather_in_group(is_ended))

    def follow(self, token: str, owner: Any, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> None:
        """Take part in `run`, without results, in the other processes of an engine."""
        for _ in self.run(token, owner, prompts, sampling):
            pass

    def abort(self, token: str) -> None:
        """End all work for an attempt that has ended."""
        self._ended.add(token)

    def disturb(self, kind: Disturbance) -> None:
        """Fail on purpose."""
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._hangs.set()

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    @contextlib.contextmanager
    def _watched(self, activity: str) -> Iterator[None]:
        """End this process if the block makes no progress for `run.hang_seconds`."""
        self._watchdog.heartbeat(f"{self._name}: {activity}")
        try:
            yield
        finally:
            self._watchdog.suspend()

    def _notify(self, text: str, event: str = "notice") -> None:
        if self._rank == 0:
            self._spec.coordinator.record_event.remote(event, what=text)

    def _report_hang(self, message: str, stacks: Path) -> None:
        """Notify the user, and copy the stacks of all threads to the run folder."""
        uri = self._folder.uri_of("logs", stacks.name)
        self._notify(f"{message}; stacks of all threads are in {uri}", event="hang")
        self._folder.write_text(redact(stacks.read_text()), "logs", stacks.name)


def _device(use_gpu: bool) -> "torch.device":
    import torch

    return torch.device("cuda", 0) if compute_device(use_gpu) == "cuda" else torch.device("cpu")


def _world() -> Any:
    from torch.distributed import group

    return group.WORLD
