"""Bounded staleness with an environment: rounds of whole turns, checkpoints of open games, repeated requests."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_tools import ScriptedPool, tool_tokenizer
from staleness_steps import SampledSteps

from grpo_ray.config.loader import load_config
from grpo_ray.data.guessing import LARGEST
from grpo_ray.data.problem import Problem
from grpo_ray.errors import CheckpointError
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.inference.sampling import Completion, OnFinished, RunRound
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler
from grpo_ray.learner.rollouts.conversation_rounds import ConversationRounds
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Completions
from grpo_ray.learner.rollouts.sampler import MultiTurn, WeightSync
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import SyncProbe
from grpo_ray.storage.records.open_rollouts import load_open_rollouts, save_open_rollouts
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.tools.conversation import Conversation
from grpo_ray.tools.examples import Guess
from grpo_ray.tools.sandbox.protocol import CallResult

GROUP, STEPS, TURNS, LIMIT = 2, 6, 5, 4
"""Completions of a group, steps, and `rollout.max_turns`, with a limit of LIMIT guesses."""
TOKENIZER = tool_tokenizer("tiny-guess")
GAME = "grpo_ray.tools.examples:Guess"


def length_of(problem: int, index: int) -> int:
    """Return the number of guesses of a completion before it stops without a call, if the game has not ended."""
    return 1 + (2 * problem + 3 * index) % TURNS


@dataclass
class Engine:
    """Engine that guesses by the seed's row and turn; its log-probability is minus the version."""

    version: Callable[[], int]
    seeds: dict[int, tuple[int, int, int]]
    """Seed -> problem, index and turn."""
    training_sampling: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 400})
    proofs: int = 0
    rounds_run: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Requests of each call."""
    proven: int = 0

    def sync_weights(self) -> None:
        self.prove_weights()

    def prove_weights(self) -> None:
        self.proofs += 1

    def is_any_active(self, is_active: bool) -> bool:
        return is_active

    @contextmanager
    def rounds(self) -> Iterator[RunRound]:
        yield self._run_round

    def _run_round(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
    ) -> list[Completion]:
        self.rounds_run.append([self.seeds[each["seed"]] for each in sampling])
        completions = []
        for number, (problem, index, turn) in enumerate(self.rounds_run[-1]):
            guess = 1 + (7 * problem + 3 * index + 5 * turn) % LARGEST
            call = f'<|call|>{{"name": "guess", "arguments": {{"number": {guess}}}}}<|end|>'
            text = call if turn < length_of(problem, index) else "correct<|end|>"
            ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
            completions.append(Completion(ids, False, [-float(self.version())] * len(ids), []))
            on_finished(number, ids)
        return completions

    # Learner

    def logps(self, batch: Batch) -> torch.Tensor:
        return torch.full(batch["completion_ids"].shape, -float(self.version()))

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        self.proven += int(mask.sum())
        assert torch.equal(learner_logps[mask.bool()], engine_logps[mask.bool()])


@dataclass
class Run(SampledSteps):
    """One worker's steps with a real sampler, whose games run in this process."""

    staleness: int = 2
    first_problem: int = 0
    version: int = 0
    max_steps: int = STEPS
    limit: int = LIMIT
    secret: int = 0
    """Added to the secret number of each game."""
    graded: list[tuple[str, int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = load_config(
            None,
            [
                f"rollout.max_staleness={self.staleness}", f"rollout.environment='{GAME}'",
                f"rollout.settings={{'{GAME}': {{limit: {self.limit}}}}}", f"rollout.max_turns={TURNS}",
                "rewards.functions=[environment]", "grpo.max_completion_length=400",
            ],
        )  # fmt: skip
        self.engine = Engine(
            lambda: self.version,
            {
                request_seed(config.run.seed, f"{problem:016x}", 0, index, turn): (problem, index, turn)
                for problem in range(40)
                for index in range(GROUP)
                for turn in range(TURNS)
            },
        )
        engine: Any = self.engine
        source = ConversationSampler(config, TOKENIZER)
        self.games: dict[int, Guess] = {}
        self.pool = ScriptedPool(self._play)
        source.pool = self.pool  # type: ignore[assignment]
        workers, profiler = Workers(gather_objects=lambda own: [own]), PhaseProfiler()
        turns = MultiTurn(
            config, engine, source, lambda row, messages: self.graded.append((row["id"], row["index"])), workers,
            profiler, self.metrics.update,
        )  # fmt: skip
        schedule = StalenessSchedule(self.staleness, 400, STEPS)
        self.sampler = BoundedStalenessSampler(
            schedule, WeightSync(engine, lambda: self.version), ConversationRounds(turns, source, schedule),
            SyncProbe(engine, Padding(0, None, 1.0), workers), repeats=1, workers=workers, profiler=profiler,
            append_metrics=self.metrics.update, notify=self.lines.append,
        )  # fmt: skip
        prompt = [{"role": "user", "content": "Play."}]
        stream = [Problem(id=f"{n:016x}", prompt=prompt, solution="") for n in range(self.first_problem, 40)]
        drawn = GroupBatches([(problem, 0) for problem in stream], 2, num_generations=GROUP, repeats=1)
        self.batches = iter(self.sampler.attach(drawn))

    def _play(self, episode: int, operation: str, payload: Any) -> CallResult | str:
        if operation == "reset":
            game = self.games[episode] = Guess(self.limit)
            return game.reset(seed=self.pool.episodes[episode].opened["seed"] + self.secret)
        game = self.games[episode]
        if operation == "reward":
            return CallResult("ok", value=game.get_reward())
        return CallResult("ok", game.guess(**payload[1]), done=game.done)


def resume(folder: Path, step: int, **options: Any) -> Run:
    """Return a run that goes on from the checkpoint of a step; a step uses two problems."""
    resumed = Run(**({"first_problem": 2 * step, "version": step} | options))
    resumed.sampler.load(folder)
    return resumed


def conversations(steps: list[Completions]) -> list[Conversation]:
    return [each for step in steps for each in step.conversations or ()]


def without_times(conversation: Conversation) -> Conversation:
    conversation.calls = [(each.name, each.status, each.turn) for each in conversation.calls]  # type: ignore[misc]
    return conversation


def test_rounds_of_games_give_the_same_games_whatever_their_staleness() -> None:
    runs = [Run(staleness).steps(STEPS) for staleness in (1, 2, 3)]
    first, *others = [
        [(each.token_ids, each.messages, each.reward, each.ended) for each in conversations(steps)] for steps in runs
    ]
    assert len(first) == STEPS * 2 * GROUP and all(other == first for other in others)
    turns = Counter(each.turns for each in conversations(runs[0]))
    assert {"done", "stop"} <= {each.ended for each in conversations(runs[0])} and len(turns) > 2


def test_rounds_of_games_sample_each_turn_with_one_version() -> None:
    run = Run(2)
    steps = run.steps(STEPS)
    assert [each.is_on_policy for each in steps] == [True] + [False] * (STEPS - 1)
    for step, completions in enumerate(steps[2:], start=2):
        ages = set()
        assert completions.own is not None
        for logps, own, conversation in zip(
            completions.logps, completions.own, conversations([completions]), strict=True
        ):
            versions = [-logp for logp, mine in zip(logps, own, strict=True) if mine and logp is not None]
            assert versions == sorted(versions) and {step - version for version in versions} <= {1, 2}
            # The first of two rounds takes three of five turns.
            assert len(set(versions)) == (2 if conversation.turns > 3 else 1)
            ages |= {step - version for version in versions}
        assert ages == {1, 2}
    assert run.engine.proven > 0
    assert run.metrics["rollout/turns_mean"] > 1 and run.metrics["rollout/segments_mean"] > 1


def test_rounds_of_games_grade_each_once_and_close_its_processes() -> None:
    run = Run(2)
    run.steps(STEPS)
    assert len(run.graded) == len(set(run.graded)) == STEPS * 2 * GROUP
    assert [each.closed for each in run.pool.episodes] == [1] * len(run.graded)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("saved_at", [1, 3])
def test_rounds_of_games_resumed_play_the_same(tmp_path: Path, staleness: int, saved_at: int) -> None:
    whole = Run(staleness)
    expected = whole.steps(STEPS)
    run = Run(staleness)
    run.steps(saved_at)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, saved_at, staleness=staleness)
    ends = resumed.steps(STEPS - saved_at)
    for each in conversations(expected) + conversations(ends):
        without_times(each)
    assert [vars(each) for each in ends] == [vars(each) for each in expected[saved_at:]]
    taken = sum(len(rounds) for rounds in run.engine.rounds_run)
    assert taken + sum(map(len, resumed.engine.rounds_run)) == sum(map(len, whole.engine.rounds_run))
    # Unfinished games get their requests again, turn by turn.
    unfinished = [each.conversation or {} for each in load_open_rollouts(tmp_path)[0] if not each.finished]
    assert bool(unfinished) == (staleness > 1)
    repeated = [request for each in unfinished for request in each["requests"]]
    first = sorted(repeated, key=lambda request: request[3])
    assert [operation for operation, _ in resumed.pool.log[: len(first)]] == [request[0] for request in first]
    assert [turn for *_, turn, _ in repeated] == [turn for each in unfinished for turn in range(each["turns"] + 1)]


def test_game_that_answers_differently_after_a_resume_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(2)
    run.steps(2)
    run.sampler.save(tmp_path)
    open_before = [each for each in load_open_rollouts(tmp_path)[0] if not each.finished]
    resumed = resume(tmp_path, 2, secret=1)
    steps = resumed.steps(STEPS - 2)
    lines = [record.message for record in caplog.records if "begins anew" in record.message]
    assert 0 < len(lines) <= len(open_before) and "answered a repeated request differently" in lines[0]
    for completions in steps:
        assert completions.own is not None
        for conversation, ids, own in zip(
            completions.conversations or (), completions.token_ids, completions.own, strict=True
        ):
            assert (conversation.token_ids, conversation.own) == (ids, own)
            assert conversation.turns == sum(message["role"] == "assistant" for message in conversation.messages)
    opened = Counter(each.closed for each in resumed.pool.episodes)
    assert opened == {1: len(resumed.pool.episodes)}


def test_games_of_another_limit_are_discarded(tmp_path: Path) -> None:
    run = Run(2)
    run.steps(2)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, 2, limit=LIMIT - 1)
    assert resumed.sampler.saved.total == 0
    [line] = resumed.lines
    assert "sampled with another tools and environments; they are discarded" in line


def test_games_are_discarded_by_a_run_without_tools(tmp_path: Path) -> None:
    run = Run(2)
    run.steps(2)
    run.sampler.save(tmp_path)
    single = Run(2, first_problem=4, version=2)
    del single.sampler.settings["tools and environments"]  # as those of single turns
    single.sampler.load(tmp_path)
    assert single.sampler.saved.total == 0


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("messages", None, "lacks a part"),
        ("ended", "won", "cannot have ended with 'won'"),
        ("requests", [["call", "__init__", {}, 1, ""]], "called '__init__', which is no tool of the run"),
        ("requests", [["eval", "", {}, 1, ""]], "an episode has no request 'eval'"),
        ("requests", [["call", "guess", "7", 1, ""]], "a call has the argument '7'"),
        ("reward", "1", "the reward of a conversation is '1'"),
    ],
)
def test_damaged_game_of_a_checkpoint_raises_one_line(tmp_path: Path, part: str, value: Any, message: str) -> None:
    run = Run(2)
    run.steps(2)
    rollouts = [rollout for batch in run.sampler.open.values() for rollout in batch.rollouts]
    unfinished = next(each for each in rollouts if not each.finished)
    assert unfinished.conversation is not None
    unfinished.conversation[part] = value
    save_open_rollouts(tmp_path, rollouts, run.sampler.settings)
    with pytest.raises(CheckpointError, match=rf"open_rollouts\.parquet: problem .*{message}"):
        resume(tmp_path, 2).steps(2)
