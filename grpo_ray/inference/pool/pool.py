"""The pool of a run's dedicated engines: a Ray actor on the driver's node, between the workers and the engines.

    workers --rows--> pool --shards--> engines        rank 0 --weights--> object store --> engines

It collects the requests of all workers for a round, divides them into shards, gives each shard to an engine, and
returns each completion to its worker as soon as it is finished. A shard is one call of an engine, with the same
requests in the same order whatever engine runs it, so the number of engines changes no result.

It keeps the engines alive: one that dies, hangs, is frozen or is lost with its node is started again, gets the present
weights and proves that it holds them, and its shard is generated again. Completions that the dead engine had delivered
are not used twice.

Each engine has a task (`_keep`), which starts it, brings it to the present version of the weights, and lets it work.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_ray.errors import EngineError, GrpoRayError, SupersededError
from grpo_ray.inference.pool.engine_process import (
    Disturbance,
    EngineProcess,
    EngineSpec,
    RoundAborted,
)
from grpo_ray.inference.pool.messages import Address, Announcement, EngineFacts, EngineRequest
from grpo_ray.inference.sampling import Completion
from grpo_ray.resilience.error_triage import describe_worker_error

POLL_SECONDS = 1.0
"""Longest time that a request for results waits before it is answered without new ones."""
MAX_LOSSES = 2
"""Engines that may die on the same shard. One death can be an accident; a second one is taken for the shard's fault."""
MAX_FAILED_STARTS = 3
"""Starts of an engine that may fail one after the other before the run ends, if no other runs or may still start."""
CONTROL = "control"
"""Ray's concurrency group of the calls that an engine's process answers while it generates."""
START_SECONDS = 3600.0
"""Time limit of an engine's start, in which a large policy may be fetched and compiled."""
PLACE_SECONDS, PLACE_PAUSE_SECONDS = 5.0, 10.0
"""Time for which the place of a further engine is asked for, and the pause before the next time."""
ANSWER_PAUSE_SECONDS = 5.0
"""Time between two questions to the processes of an engine that works, which show that they are not frozen."""
RETRY_SECONDS = 2.0
"""Pause before an engine is started again, for each of its starts that have failed one after the other."""


@dataclass
class Version:
    """One version of the learner's weights."""

    number: int
    chunks: list[Any]
    """References to the weights in the object store; those of the frozen weights if requests name an adapter."""
    updates: Any
    """Reference to the updates of that adapter; None without one."""
    announcement: Announcement | None = None
    """Weights that are broadcast to some engines; None if every engine can load them from the object store."""
    sums: Any = None
    """Reference to the checksums of the learner's weights (`LearnerSums`); None until they are computed."""

    def is_for(self, engine: "Engine") -> bool:
        """Return True if an engine can get this version."""
        return self.announcement is None or self.is_broadcast_to(engine)

    def is_broadcast_to(self, engine: "Engine") -> bool:
        """Return True if an engine is a member of the group to which the weights are broadcast."""
        return self.announcement is not None and engine.incarnation in self.announcement.members


@dataclass(eq=False)
class Shard:
    """Part of a round that one engine runs in one call."""

    round: "Round"
    number: int
    rows: list[tuple[int, int]]
    """Rank and index of each request."""
    losses: int = 0
    """Engines that have died on it."""

    @property
    def is_delivered(self) -> bool:
        """True if all its requests are answered."""
        return self.round.delivered.issuperset(self.rows)


@dataclass(eq=False)
class Round:
    """Requests of all workers that are answered together."""

    token: str
    owner: Any
    """Key of the work that may reuse cached keys and values (`EngineProcess.run`)."""
    requests: dict[int, list[EngineRequest]] = field(default_factory=dict)
    """Rank -> its requests; complete once every worker has sent its own."""
    delivered: set[tuple[int, int]] = field(default_factory=set)
    """Rank and index of the requests that are answered."""
    waiting: dict[int, list[tuple[int, Completion]]] = field(default_factory=dict)
    """Rank -> its completions that it has not fetched yet."""
    ended: set[int] = field(default_factory=set)
    """Ranks that have all their completions. Their requests stay, since a shard is repeated as a whole."""


@dataclass(eq=False)
class Engine:
    """A running engine."""

    number: int
    incarnation: int
    """Different for each engine that was ever started."""
    group: PlacementGroup
    processes: list[Any]
    """Handles of its processes, by rank in the engine."""
    facts: EngineFacts | None = None
    """None while it starts."""
    loaded: int = 0
    """Number of the version of the weights that it has loaded; 0: none yet."""
    proven: int = 0
    """Number of the version that it has been proven to hold."""
    has_frozen_weights: bool = False
    shard: Shard | None = None
    """Work under way."""


class EnginePool:
    """Pool of a run's engines."""

    process_class: type[EngineProcess] = EngineProcess
    answer_grace = 30.0
    """Seconds beyond `run.hang_seconds` after which a process without an answer is ended. Until then the watchdog in
    the process itself can write its stacks and end it (`resilience/watchdog.py`)."""

    def __init__(self, spec: EngineSpec) -> None:
        engine = spec.config.engine
        self._spec = spec
        self._least, self._most = engine.replica_range
        self._size = engine.tensor_parallel_size
        self._waits_for_ranks = spec.config.adapter_sync == "request" and spec.config.model.adapter is not None
        self._lora_ranks: Mapping[str, int] | None = None
        self._changed = asyncio.Condition()
        self._engines: dict[int, Engine] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: deque[Shard] = deque()
        self._rounds: dict[int, Round] = {}
        self._votes: dict[int, dict[int, bool]] = {}
        """Number of a question whether any worker is active -> rank -> its answer."""
        self._token = ""
        self._workers = 0
        self._version: Version | None = None
        self._numbers = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._precision: dict[str, str] | None = None
        self._error: BaseException | None = None
        self._lost = 0
        """Engines that were lost after they had started."""
        self._failed_starts: dict[int, int] = {}
        """Number of an engine -> its starts that have failed one after the other."""

    # The driver's calls

    async def reserve(self) -> None:
        """Reserve the resources of the fewest engines that the run needs, and begin to start them."""
        groups = [self._reserve_group() for _ in range(self._least)]
        await asyncio.gather(*(group.ready() for group in groups))
        self._tasks += [asyncio.create_task(self._keep(number, group)) for number, group in enumerate(groups)]

    async def stop(self) -> None:
        """End all engines, and release their resources."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The workers' calls

    async def begin(self, token: str, workers: int, lora_ranks: Mapping[str, int] | None) -> list[EngineFacts]:
        """Begin an attempt to train: end the work for an earlier one, and wait for the first engine.

        Args:
            token: name of the attempt, which its later calls repeat.
            workers: number of its workers.
            lora_ranks: name of each adapted layer -> rank of its update, if requests name an adapter; otherwise None.

        Returns:
            The facts of the engines that have started.

        Raises:
            EngineError: no engine can be started.
        """
        async with self._changed:
            self._token, self._workers = token, workers
            self._waits_for_ranks, self._lora_ranks = False, lora_ranks
            self._rounds.clear()
            self._votes.clear()
            self._pending.clear()
            version, self._version = self._version, None  # its objects belong to a worker that has ended
            if not isinstance(self._error, EngineError):  # the others concern what the last attempt sent
                self._error = None
            self._changed.notify_all()
        for engine in self._engines.values():
            if version is not None and version.is_broadcast_to(engine) and engine.loaded != version.number:
                _end(engine)  # it may wait for weights that the earlier attempt does not send any more
            elif engine.shard is not None:
                for process in engine.processes:
                    process.abort.options(concurrency_group=CONTROL).remote(engine.shard.round.token)
        # Only now, when the workers have their resources, further engines may take what is free.
        further = range(len(self._tasks), self._most)
        self._tasks += [asyncio.create_task(self._keep_further(number)) for number in further]
        await self._wait_until(token, lambda: bool(self._started()))
        return [engine.facts for engine in self._started() if engine.facts is not None]

    async def load(self, token: str, chunks: list[Any], updates: list[Any]) -> dict[str, str]:
        """Begin to load a version of the weights into all engines.

        Args:
            chunks: references to all weights; empty if only the adapter that requests name has changed.
            updates: a reference to the updates of that adapter, in a list; an empty list without one.

        Returns:
            The name of the precision in which the engines hold each weight.

        Raises:
            SyncError: an engine did not take the weights.
            EngineError: there is no engine left.
        """
        async with self._changed:
            self._require_current(token)
            before = [] if self._version is None else self._version.chunks
            number = next(self._numbers)
            self._version = Version(number, chunks or before, updates[0] if updates else None)
            if chunks:
                for engine in self._engines.values():
                    engine.has_frozen_weights = False
            self._changed.notify_all()
        await self._wait_until(token, lambda: any(each.loaded == number for each in self._started()))
        assert self._precision is not None
        return self._precision

    async def members(self, token: str) -> tuple[int, ...]:
        """Return the incarnations of the engines that can receive a broadcast, in the order of their ranks."""
        self._require_current(token)
        return tuple(sorted(engine.incarnation for engine in self._started()))

    async def receive(self, token: str, announcement: Announcement) -> dict[str, str]:
        """Let the engines receive a version of the weights that rank 0 broadcasts; see `load`.

        Raises:
            ConnectionError: an engine was lost meanwhile.
        """
        async with self._changed:
            self._require_current(token)
            started = {engine.incarnation for engine in self._started()}
            if not started.issuperset(announcement.members):
                raise ConnectionError("an engine was lost before the weights were broadcast to it; they are sent again")
            version = self._version = Version(next(self._numbers), [], None, announcement)
            self._changed.notify_all()

        def is_received() -> bool:
            return all(each.loaded == version.number for each in self._started() if version.is_for(each))

        await self._wait_until(token, is_received)
        assert self._precision is not None
        return self._precision

    async def prove(self, token: str, sums: list[Any]) -> tuple[int, int]:
        """Prove that every engine that runs holds the version that was loaded last.

        Args:
            sums: a reference to the checksums of the learner's weights (`LearnerSums`), in a list.

        Returns:
            The number of these engines, and of those that were lost so far.

        Raises:
            SyncError: an engine holds other weights.
            EngineError: there is no engine left.
        """
        async with self._changed:
            self._require_current(token)
            version = self._version
            assert version is not None
            (version.sums,) = sums
            for engine in self._engines.values():
                engine.proven = 0  # again before each use, although the weights may be the same
            self._changed.notify_all()

        def is_proven() -> bool:
            engines = [each for each in self._started() if version.is_for(each)]
            return bool(engines) and all(each.proven == version.number for each in engines)

        await self._wait_until(token, is_proven)
        return sum(each.proven == version.number for each in self._started()), self._lost

    async def submit(self, token: str, number: int, owner: Any, rank: int, requests: Sequence[EngineRequest]) -> None:
        """Submit a worker's requests for a round; it begins once every worker has submitted its own.

        Args:
            number: number of the round in the attempt, the same on all workers.
            owner: key of the work that may reuse cached keys and values, the same on all workers.
        """
        async with self._changed:
            self._require_current(token)
            each = self._rounds.setdefault(number, Round(token, owner))
            each.requests[rank], each.waiting[rank] = list(requests), []
            if len(each.requests) == self._workers:
                self._pending.extend(divide(each, self._most))
                self._changed.notify_all()

    async def results(self, token: str, number: int, rank: int) -> tuple[list[tuple[int, Completion]], bool]:
        """Return the completions of a worker that have finished since the last call, each with its index.

        Waits for at most `POLL_SECONDS` if there are none. The second value is False while other workers have not
        submitted their requests.

        Raises:
            GrpoRayError: the round has failed.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._wait_until(token, lambda: bool(self._rounds[number].waiting[rank])), POLL_SECONDS
            )
        self._require_current(token)
        each = self._rounds[number]
        finished, each.waiting[rank] = each.waiting[rank], []
        return finished, len(each.requests) == self._workers

    async def end_round(self, token: str, number: int, rank: int) -> None:
        """Forget a round, once every worker has its completions."""
        async with self._changed:
            if token == self._token and (each := self._rounds.get(number)) is not None:
                each.ended.add(rank)
                if len(each.ended) == self._workers:
                    del self._rounds[number]

    async def is_any_active(self, token: str, number: int, rank: int, is_active: bool) -> bool:
        """Return True if any worker is active, once every worker has asked.

        Workers ask in the thread that samples, where they cannot use the collectives of the learner's thread.

        Args:
            number: number of the question in the attempt, the same on all workers.
        """
        async with self._changed:
            self._require_current(token)
            votes = self._votes.setdefault(number, {})
            votes[rank] = is_active
            self._votes.pop(number - 1, None)  # a worker that asks again has its last answer
            self._changed.notify_all()
        await self._wait_until(token, lambda: len(votes) == self._workers)
        return any(votes.values())

    async def disturb(self, token: str, number: int, kind: Disturbance) -> None:
        """Disturb a started engine on purpose, one that works if any does (`resilience/chaos.py`).

        Args:
            number: chooses among them.
        """
        await self._wait_until(token, lambda: bool(self._started()))  # the last one may have been lost just now
        started = self._started()
        engines = [engine for engine in started if engine.shard is not None] or started
        process = engines[number % len(engines)].processes[0]
        process.disturb.options(concurrency_group=CONTROL).remote(kind)

    async def engines(self) -> list[dict[str, Any]]:
        """Return the state of each engine, for displays and tests."""
        return [
            {
                "number": each.number,
                "node": each.facts.node if each.facts else None,
                "version": each.proven,
                "busy": each.shard is not None,
                "pids": await asyncio.gather(
                    *(
                        _within(process.pid.options(concurrency_group=CONTROL).remote(), 5.0)
                        for process in each.processes
                    )
                ),
            }
            for each in list(self._engines.values())
        ]

    def _started(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.facts is not None]

    def _require_current(self, token: str) -> None:
        if token != self._token:
            raise SupersededError("another attempt to train uses the engines now")
        if self._error is not None:
            raise self._error

    async def _wait_until(self, token: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raises the pool's error, or SupersededError once another attempt has begun."""
        async with self._changed:
            while True:
                self._require_current(token)
                if condition():
                    return
                await self._changed.wait()

    # Engines

    def _reserve_group(self) -> PlacementGroup:
        cluster = self._spec.config.cluster
        bundle = {"CPU": float(cluster.cpus_per_worker)} | ({"GPU": 1.0} if cluster.use_gpu else {})
        # The processes of an engine communicate for each token, so they share a node.
        return placement_group([bundle] * self._size, strategy="STRICT_PACK")

    async def _keep_further(self, number: int) -> None:
        """Keep an engine beyond the fewest running while there is a place for it.

        The place is asked for while a round is under way, for a short time. At that time the workers have their
        resources. A place that is still asked for when workers are restarted would take theirs, so that of an engine
        that has ended is given back.
        """
        while True:
            async with self._changed:
                while not self._rounds:
                    await self._changed.wait()
            group = self._reserve_group()
            try:
                await asyncio.wait_for(_ready(group), PLACE_SECONDS)
                await self._run_engine(number, group, failed_starts=0)
            except TimeoutError:
                pass
            finally:
                remove_placement_group(group)
            await asyncio.sleep(PLACE_PAUSE_SECONDS)

    async def _keep(self, number: int, group: PlacementGroup) -> None:
        """Keep one engine running: start it, let it work, and start another in its place when it is lost."""
        failed_starts = 0
        try:
            while True:
                async with self._changed:
                    while self._error is not None:
                        await self._changed.wait()
                failed_starts = await self._run_engine(number, group, failed_starts)
                await asyncio.sleep(RETRY_SECONDS * failed_starts)
        finally:
            remove_placement_group(group)

    async def _run_engine(self, number: int, group: PlacementGroup, failed_starts: int) -> int:
        """Start an engine and let it work until it is lost.

        Args:
            failed_starts: number of starts that have failed one after the other.

        Returns:
            The same, counting this one.
        """
        engine = Engine(number, next(self._incarnations), group, [])
        try:
            await group.ready()
            await self._start(engine)
            await self._serve(engine)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of Ray, vLLM or torch: whatever it is, this engine has ended
            failed_starts = failed_starts + 1 if engine.facts is None else 0
            await self._lose(engine, error, failed_starts)
        finally:
            self._engines.pop(number, None)
            _end(engine)
        return failed_starts

    async def _start(self, engine: Engine) -> None:
        """Start the processes of an engine, and wait until it has loaded the initial policy."""
        async with self._changed:
            while self._waits_for_ranks:
                await self._changed.wait()
        self._engines[engine.number] = engine
        for rank in range(self._size):
            engine.processes.append(self._process(engine, rank))
        try:
            facts = await asyncio.wait_for(self._start_processes(engine), START_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"it has not started within {START_SECONDS:g} s") from None
        async with self._changed:
            engine.facts = facts
            self._changed.notify_all()

    async def _start_processes(self, engine: Engine) -> EngineFacts:
        store: Address | None = await engine.processes[0].open_store.remote() if self._size > 1 else None
        facts: list[EngineFacts] = await _of_all(engine, "start", store, self._lora_ranks)
        return facts[0]

    def _process(self, engine: Engine, rank: int) -> Any:
        cluster = self._spec.config.cluster
        return (
            ray.remote(concurrency_groups={CONTROL: 1})(self.process_class)
            .options(
                num_cpus=cluster.cpus_per_worker,
                num_gpus=1 if cluster.use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(engine.group, placement_group_bundle_index=rank),
                runtime_env={"env_vars": dict(self._spec.environment)},
            )
            .remote(self._spec, engine.number, rank)
        )

    async def _serve(self, engine: Engine) -> None:
        """Bring an engine to the present version of the weights and give it shards, until it fails."""
        while True:
            work = await self._next_work(engine)
            await self._while_it_answers(engine, work())
            async with self._changed:
                self._changed.notify_all()

    async def _while_it_answers(self, engine: Engine, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the end of an engine's work while all its processes answer.

        The watchdog in a process ends it if the work makes no progress, but cannot run if the whole process is stopped.

        Raises:
            TimeoutError: a process does not answer for longer than its watchdog would wait.
        """
        limit = self._spec.config.run.hang_seconds + self.answer_grace
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=ANSWER_PAUSE_SECONDS))[0]:
                # An error here is that of a process that has ended, with which the work fails too.
                answers = asyncio.gather(
                    *(each.pid.options(concurrency_group=CONTROL).remote() for each in engine.processes),
                    return_exceptions=True,
                )
                either: list[asyncio.Future[Any]] = [task, answers]
                ended, _ = await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not ended:
                    raise TimeoutError(f"its process has not answered for {limit:g} s (run.hang_seconds)")
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _next_work(self, engine: Engine) -> Callable[[], Coroutine[Any, Any, None]]:
        async with self._changed:
            while True:
                version = self._version
                if version is not None and version.is_for(engine):
                    if engine.loaded != version.number:
                        return lambda: self._load(engine, version)
                    if version.sums is not None and engine.proven != version.number:
                        return lambda: self._prove(engine, version)
                    if self._pending and engine.proven == version.number:
                        shard = engine.shard = self._next_shard(engine)
                        return lambda: self._run(engine, shard)
                await self._changed.wait()

    def _next_shard(self, engine: Engine) -> Shard:
        """Take a shard from the pending ones: that of the engine's number, whose turns it may hold, or the first."""
        own = (each for each in self._pending if each.number == engine.number)
        shard = next(own, self._pending[0])
        self._pending.remove(shard)
        return shard

    async def _load(self, engine: Engine, version: Version) -> None:
        if (announcement := version.announcement) is not None:
            first = 1 + announcement.members.index(engine.incarnation) * self._size
            received = [
                process.receive.remote(announcement, first + rank) for rank, process in enumerate(engine.processes)
            ]
            self._precision = (await asyncio.gather(*received))[0]
            engine.loaded = version.number
            return
        chunks = [] if engine.has_frozen_weights else version.chunks
        with self._ending_if_lost(version):
            # A list of references, which the engine fetches one after the other.
            self._precision = (await _of_all(engine, "load", chunks, version.updates))[0]
            engine.loaded = version.number
            engine.has_frozen_weights = version.updates is not None

    async def _prove(self, engine: Engine, version: Version) -> None:
        with self._ending_if_lost(version):
            await _of_all(engine, "prove", version.sums)
            engine.proven = version.number

    @contextlib.contextmanager
    def _ending_if_lost(self, version: Version) -> Iterator[None]:
        """End the attempt if objects of its version are lost, as those of a worker that has died are; engines stay."""
        try:
            yield
        except ray.exceptions.ObjectLostError as error:
            if self._version is version:
                self._version = None
                self._error = ConnectionError(
                    f"an engine cannot fetch the weights ({type(error).__name__}); the workers send them again when "
                    "they restart"
                )

    async def _run(self, engine: Engine, shard: Shard) -> None:
        """Let an engine run a shard, and hand out its completions as they come."""
        each = shard.round
        requests = [each.requests[rank][index] for rank, index in shard.rows]
        prompts, sampling = [each.prompt for each in requests], [each.sampling for each in requests]
        work = each.token, (engine.proven, each.owner, shard.number), prompts, sampling
        first, *others = engine.processes
        followers = [process.follow.remote(*work) for process in others]
        try:
            async for reference in first.run.options(num_returns="streaming").remote(*work):
                finished = await reference
                async with self._changed:
                    for place, completion in finished:
                        rank, index = key = shard.rows[place]
                        if key not in each.delivered:  # an engine that has died may have delivered it
                            each.delivered.add(key)
                            each.waiting[rank].append((index, replace(completion, shard=shard.number)))
                    self._changed.notify_all()
            await asyncio.gather(*followers)
        except RoundAborted:
            pass
        engine.shard = None

    def _may_still_run(self) -> bool:
        """Return True if an engine runs, or one that has not failed to start too often starts or will start again."""
        runs = any(engine.facts is not None for engine in self._engines.values())
        starts = any(self._failed_starts.get(number, 0) < MAX_FAILED_STARTS for number in self._engines)
        # Between two starts. Further engines do not count, since they may get no place any more; nor do engines without
        # a failed start, which still wait for their place.
        starts_again = any(
            number < self._least and 0 < failed < MAX_FAILED_STARTS for number, failed in self._failed_starts.items()
        )
        return runs or starts or starts_again

    def _require_weights_of(self, lost: Engine, reason: str) -> None:
        """End the attempt if nobody can send the weights again that an engine had or waited for."""
        version = self._version
        if version is None or not version.is_broadcast_to(lost):
            return
        if lost.loaded == version.number and any(each.loaded == version.number for each in self._started()):
            return
        self._error = ConnectionError(
            f"engine {lost.number} was lost ({reason}) while or after the weights were broadcast, and no engine can go "
            "on with them; the workers send them again when they restart"
        )

    async def _lose(self, engine: Engine, error: Exception, failed_starts: int) -> None:
        """React to the end of an engine: repeat its shard, or end the run."""
        cause = getattr(error, "cause", None) or error
        shard = engine.shard
        text = describe_worker_error(error)
        async with self._changed:
            self._engines.pop(engine.number, None)
            self._failed_starts[engine.number] = failed_starts
            is_current = shard is None or shard.round.token == self._token
            if isinstance(cause, GrpoRayError):
                # Wrong weights, a prompt that is too long, a node that does not fit: another engine would fail too.
                self._error = cause if is_current else self._error
            elif engine.facts is None:
                if failed_starts >= MAX_FAILED_STARTS and not self._may_still_run():
                    self._error = EngineError(f"engine {engine.number} cannot be started: {text}")
            else:
                self._lost += 1
                self._require_weights_of(engine, text)
            if shard is not None and is_current and not shard.is_delivered:
                shard.losses += 1
                if shard.losses < MAX_LOSSES:
                    self._pending.appendleft(shard)
                else:
                    self._error = EngineError(
                        f"{shard.losses} engines have died on the same {len(shard.rows)} completions, so no other is "
                        f"started: {text}"
                    )
            self._changed.notify_all()
        if self._error is None:
            what = f"engine {engine.number} was lost and is started again: {text}"
            self._spec.coordinator.record_event.remote("notice", what=what)


def divide(of: Round, shards: int) -> list[Shard]:
    """Divide the requests of a round into shards: the groups in turn, in the order of the workers.

    A group is a run of requests with the same prompt, whose keys and values one engine computes once.

    Args:
        shards: largest number of shards.
    """
    rows: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    group, last = -1, None
    for rank in sorted(of.requests):
        for index, request in enumerate(of.requests[rank]):
            if request.prompt != last:
                group, last = group + 1, request.prompt
            rows[group % shards].append((rank, index))
    return [Shard(of, number, part) for number, part in enumerate(rows) if part]


async def _ready(group: PlacementGroup) -> None:
    """Wait until a placement group has its resources."""
    await group.ready()


async def _of_all(engine: Engine, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all processes of an engine; return their results."""
    return await asyncio.gather(*(getattr(process, method).remote(*arguments) for process in engine.processes))


async def _within(reference: Any, seconds: float) -> Any:
    """Return the value of a reference; None if it fails or takes longer."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except (TimeoutError, ray.exceptions.RayError):
        return None


def _end(engine: Engine) -> None:
    """End the processes of an engine; one that has ended already is no error."""
    for process in engine.processes:
        ray.kill(process)
