"""Dedicated engines as a worker sees them: the interface of a colocated engine (`engine.py`), in front of the pool.

A sync stores the learner's weights in Ray's object store, from where every engine loads them, and compares checksums:
each engine proves that it holds the weights of every worker's learner bit for bit. Requests go to the pool, together
with those of the other workers.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.distributed import TCPStore

from grpo_ray.config.schema import Config
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import GrpoRayError, SyncError
from grpo_ray.inference.learner_end import LearnerEnd
from grpo_ray.inference.pool.broadcast import Channel, open_store
from grpo_ray.inference.pool.messages import Announced, Announcement, EngineFacts, EngineRequest
from grpo_ray.inference.pool.weights import chunks, dtype_name
from grpo_ray.inference.sampling import Completion, OnFinished, RunRound, ignore_finished, require_space
from grpo_ray.inference.weight_proof import learner_sums
from grpo_ray.models.adapters import lora_updates, require_plain_lora
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_ray.inference.pool.engine_process import Disturbance


WAIT_SECONDS = 1.0
"""Time between two signs of progress while a call of the pool is waited for."""
WAITS_FOR_WORKERS = ("results", "is_any_active")
"""Calls of the pool that may wait for other workers, and not for engines."""


class DedicatedEngine(LearnerEnd):
    """A worker's access to the run's dedicated engines. Its methods are collective among the workers."""

    def __init__(
        self,
        model: "PreTrainedModel",
        accelerator: "Accelerator",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        config: Config,
        pool: Any,
        profiler: PhaseProfiler | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ):
        """Wait for the first engine.

        Args:
            model: the learner's model, the source of the weights.
            config: the run's config.
            pool: handle of the run's `EnginePool` actor.
            profiler: the worker's profiler; by default a new one.
            notify: shows the user a line.
        """
        self.config = config
        self.profiler = profiler or PhaseProfiler()
        self.notify = notify
        self.form_masks = None
        self.proofs = 0
        """Number of proofs by checksums so far."""
        self._pool = pool
        self._rounds = 0
        self._owners = 0
        self._votes = 0
        self._precision: Mapping[str, torch.dtype] | None = None
        self._sent_frozen_weights = False
        self._sent: list[Announced] = []
        """Weights of the first version, in the order in which they were sent."""
        self._announced = False
        """True if the next version is broadcast."""
        self._members: tuple[int, ...] = ()
        self._group = ""
        """Name of the process group of the broadcasts."""
        self._store: TCPStore | None = None
        self._channel: Channel | None = None
        super().__init__(model, accelerator, tokenizer)

    def _init_vllm(self) -> None:
        """Begin an attempt at the pool. TRL's constructor calls this method to start its own engine."""
        self._token: str = all_gather_object(secrets.token_hex(8))[0]
        facts: list[EngineFacts] = []
        if is_rank_zero():
            ranks = require_plain_lora(self._adapted) if self._requests_name_adapter else None
            facts = self._call("begin", self.accelerator.num_processes, ranks)
        self._facts = all_gather_object(facts)[0]

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the pool for this attempt; return its result, or raise its error without Ray's wrapper.

        The wait for engines counts as progress for the worker's hang watchdog: each engine has a watchdog of its own,
        and the pool replaces an engine that hangs. The wait for other workers does not.
        """
        reference = getattr(self._pool, method).remote(self._token, *arguments)
        while not ray.wait([reference], timeout=WAIT_SECONDS)[0]:
            if method not in WAITS_FOR_WORKERS:
                self.profiler.note_progress()
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GrpoRayError | ConnectionError):
                raise error.cause from None
            raise

    @property
    def description(self) -> str:
        """Number of engines that have started, and the description of the first one, for the log."""
        nodes = len({each.node for each in self._facts})
        return f"{len(self._facts)} dedicated on {nodes} node{'s' * (nodes > 1)}, {self._facts[0].description}"

    @property
    def max_model_len(self) -> int:
        """Longest prompt with its completion, in tokens."""
        return int(self._facts[0].max_model_len)

    @property
    def vocabulary_size(self) -> int:
        """Number of the policy's token ids."""
        return int(self._facts[0].vocabulary_size)

    @in_phase("sync")
    def sync_weights(self) -> None:
        """Publish the learner's weights, and prove that every engine holds them bit for bit.

        Raises:
            SyncError: a parameter of an engine was not set, or differs from the learner's weights.
        """
        if self._announced:
            self._broadcast_weights()
            self._prove()
            return
        updates = list(lora_updates(self._adapted)) if self._requests_name_adapter else None
        stored: list[Any] = []
        precision = None
        if updates is None or not self._sent_frozen_weights:
            stored = self._store_weights()
            self._sent_frozen_weights = True
        if is_rank_zero():
            on_host = [] if updates is None else [ray.put([update.to("cpu") for update in updates])]
            precision = self._call("load", stored, on_host)
        if self._precision is None:
            named: Mapping[str, str] = all_gather_object(precision)[0]
            self._precision = {name: getattr(torch, dtype) for name, dtype in named.items()}
        self._prove()

    def _store_weights(self) -> list[Any]:
        """Put all weights into the object store, on rank 0; return the references."""
        weights = self._iter_named_params()
        stored: list[Any] = []
        if is_rank_zero():
            for chunk in chunks(weights):
                stored.append(ray.put(chunk))
                if self.config.engine.transport == "nccl":
                    self._sent += [Announced(each.name, dtype_name(each.dtype), each.shape) for each in chunk]
        elif self.config.cluster.shard_learner:  # its weights are gathered on all workers
            for _ in weights:
                pass
        # The first version goes through the store, and tells which weights there are.
        self._announced = self.config.engine.transport == "nccl" and not self._requests_name_adapter
        return stored

    def _broadcast_weights(self) -> None:
        """Send all weights to all engines at once, from rank 0."""
        weights = self._iter_named_params()
        if not is_rank_zero():
            if self.config.cluster.shard_learner:
                for _ in weights:
                    pass
            return
        members = self._call("members")
        if members != self._members:
            self._store, self._channel, self._members = open_store(), None, members
            self._group = secrets.token_hex(8)
        assert self._store is not None
        size = 1 + len(members) * self.config.engine.tensor_parallel_size
        address = ray.util.get_node_ip_address(), self._store.port
        announcement = Announcement(self._group, address, members, size, tuple(self._sent))

        failed: list[Exception] = []

        def send() -> None:
            try:
                if self._channel is None:
                    self._channel = Channel(self._store, 0, size, self.accelerator.device)
                self._channel.send(weights)
            except Exception as error:  # of torch or NCCL; the engines only report that nothing has arrived
                failed.append(error)

        # In a thread: a broadcast to an engine that is lost does not return, but the call below does.
        threading.Thread(target=send, name="sending weights", daemon=True).start()
        try:
            self._call("receive", announcement)
        except ConnectionError as error:
            raise error from (failed[0] if failed else None)

    @in_phase("sync")
    def prove_weights(self) -> None:
        """Prove that the engines hold the learner's weights bit for bit. Used before a generation without a sync.

        Raises:
            SyncError: a weight differs, or an engine still keeps data that was computed with older weights.
        """
        self._prove()

    def _prove(self) -> None:
        assert self._precision is not None
        sums = learner_sums(self.weights_to_prove(), self._precision)
        require_equal_learners(all_gather_object(sums.digest))
        counts = self._call("prove", [ray.put(sums)]) if is_rank_zero() else None
        # No worker sends requests before the proof.
        engines, lost = all_gather_object(counts)[0]
        self.metrics = {"engine/count": engines, "engine/replaced": lost}
        self.proofs += 1

    @in_phase("generate")
    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished = ignore_finished
    ) -> list[Completion]:
        """Sample one completion per prompt, as one round of `rounds`; see `LocalEngine.run_requests`."""
        with self.rounds() as run_round:
            completions = run_round(prompts, sampling, on_finished)
        self.profiler.count_tokens("engine", sum(len(each.token_ids) for each in completions))
        return completions

    def rounds(self) -> AbstractContextManager[RunRound]:
        """Return a context that yields a function which runs one round of requests; see `LocalEngine.rounds`.

        Every worker must call the function equally often, without prompts if it has none (`is_any_active`). It may be
        called in a thread.
        """
        return self._turns()

    def heldout_rounds(self) -> AbstractContextManager[RunRound]:
        """Return the same context for held-out problems."""
        return self._turns()

    @contextmanager
    def _turns(self) -> Iterator[RunRound]:
        """Yield a function that runs rounds, which on GPUs may reuse each other's keys and values."""
        self._owners += 1
        owner = self._owners

        def run_round(
            prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
        ) -> list[Completion]:
            return self._run_round(owner, prompts, sampling, on_finished)

        yield run_round

    def _run_round(
        self, owner: int, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
    ) -> list[Completion]:
        require_space(prompts, self.max_model_len)
        self._rounds += 1
        number, rank = self._rounds, self.accelerator.process_index
        requests = list(map(EngineRequest, prompts, sampling))
        # The next turn's shard may go to another engine, which has to compute its prompts. Cached keys and values are
        # rounded differently, so on the CPU, where runs are repeated bit for bit, every engine computes them.
        key = owner if self.config.cluster.use_gpu else (owner, number)
        self._call("submit", number, key, rank, requests)
        completions: dict[int, Completion] = {}
        while len(completions) < len(requests):
            finished, is_generating = self._call("results", number, rank)
            if is_generating:
                self.profiler.note_progress()
            for index, completion in finished:
                completions[index] = completion
                on_finished(index, completion.token_ids)
        self._call("end_round", number, rank)
        return [completions[index] for index in range(len(requests))]

    def disturb(self, number: int, kind: "Disturbance") -> None:
        """Disturb an engine on purpose; see `EnginePool.disturb`."""
        self._call("disturb", number, kind)

    def is_any_active(self, is_active: bool) -> bool:
        """Return True if any worker is active; may be called in a thread."""
        if self.accelerator.num_processes == 1:
            return is_active
        self._votes += 1
        return bool(self._call("is_any_active", self._votes, self.accelerator.process_index, is_active))


def require_equal_learners(digests: Sequence[str]) -> None:
    """Raise SyncError if workers have different weights. The engines get those of the first one.

    Args:
        digests: digest of each worker's checksums.
    """
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise SyncError(
            f"the engines do not hold the learner's weights: those of worker {differing[0]} differ from those of "
            "worker 0, from which they were sent"
        )
