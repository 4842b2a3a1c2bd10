"""Sampler of bounded staleness with a scripted engine: rounds, grading, checkpoints and what they hold."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_tools import tool_tokenizer
from staleness_steps import SampledSteps

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.sampler import SingleTurn, WeightSync
from grpo_ray.learner.rollouts.segment_rounds import SegmentRounds
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import SyncProbe
from grpo_ray.storage.records.open_rollouts import load_open_rollouts
from grpo_ray.telemetry.profiler import PhaseProfiler

TOKENIZER = tool_tokenizer("tiny-arithmetic")
LONGEST, GROUP, STEPS = 6, 2, 6
END = TOKENIZER.eos_token_id


def length_of(problem: int, index: int) -> int:
    """Return the length of a completion, from 1 to LONGEST; the last token is the end, except at LONGEST."""
    return 1 + (2 * problem + 3 * index) % LONGEST


@dataclass
class Engine:
    """Engine whose tokens follow from the seed's row and the position; its log-probability is minus the version."""

    seeds: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Seed -> problem, index and segment."""
    version: Callable[[], int] = lambda: 0
    prompt: int = 0
    training_sampling: dict[str, Any] = field(default_factory=lambda: {"max_tokens": LONGEST})
    proofs: int = 0
    max_model_len: int = 1000
    rounds: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    """Problem, index, segment and limit of each request, for each call."""

    def sync_weights(self) -> None:
        self.prove_weights()

    def prove_weights(self) -> None:
        self.proofs += 1

    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: Callable[[int, list[int]], None]
    ) -> list[Completion]:
        self.rounds.append([])
        completions = []
        for number, (prompt, arguments) in enumerate(zip(prompts, sampling, strict=True)):
            problem, index, segment = self.seeds[arguments["seed"]]
            limit = arguments["max_tokens"]
            self.rounds[-1].append((problem, index, segment, limit))
            length, before = length_of(problem, index), len(prompt) - self.prompt
            ids = [20 + place for place in range(before, min(before + limit, length))]
            ended = before + len(ids) == length < LONGEST
            if ended:
                ids[-1] = END
            completions.append(Completion(ids, not ended, [-float(self.version())] * len(ids), []))
            on_finished(number, ids)
        return completions

    # Learner

    def logps(self, batch: Batch) -> torch.Tensor:
        return torch.full(batch["completion_ids"].shape, -float(self.version()))

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        assert torch.equal(learner_logps[mask.bool()], engine_logps[mask.bool()])


@dataclass
class Run(SampledSteps):
    """One worker's steps with a real sampler."""

    staleness: int = 2
    first_problem: int = 0
    version: int = 0
    max_steps: int = STEPS
    settings: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    graded: list[tuple[str, int, str]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = load_config(
            None,
            [f"rollout.max_staleness={self.staleness}", f"grpo.max_completion_length={LONGEST}", *self.settings],
        )
        self.engine = Engine(version=lambda: self.version)
        for problem in range(40):
            for index in range(GROUP):
                for segment in range(9):
                    seed = request_seed(config.run.seed, f"{problem:016x}", 0, index, segment)
                    self.engine.seeds[seed] = (problem, index, segment)
        engine: Any = self.engine
        workers = Workers(gather_objects=lambda own: [own])
        turn = SingleTurn(
            config, engine, TOKENIZER, lambda row, text: self.graded.append((row["id"], row["index"], str(text)))
        )
        schedule = StalenessSchedule(self.staleness, LONGEST, STEPS)
        self.sampler = BoundedStalenessSampler(
            schedule, WeightSync(engine, lambda: self.version),
            SegmentRounds(turn, schedule), SyncProbe(engine, Padding(0, None, 1.0), workers), repeats=1,
            workers=workers, profiler=PhaseProfiler(), append_metrics=lambda values: self.metrics.append(dict(values)),
            notify=self.lines.append,
        )  # fmt: skip
        prompt = [{"role": "user", "content": "1 + 1"}]
        stream = [Problem(id=f"{n:016x}", prompt=prompt, solution="2") for n in range(self.first_problem, 40)]
        drawn = GroupBatches([(problem, 0) for problem in stream], 2, num_generations=GROUP, repeats=1)
        self.batches = iter(self.sampler.attach(drawn))
        engine.prompt = len(turn.render([{"prompt": prompt}])[0])


def resume(folder: Path, step: int, **options: Any) -> Run:
    """Return a run that goes on from the checkpoint of a step; a step uses two problems."""
    resumed = Run(**({"first_problem": 2 * step, "version": step} | options))
    resumed.sampler.load(folder)
    return resumed


def test_sampler_two_versions_continues_unfinished_completions() -> None:
    run = Run()
    completions = run.steps(STEPS)
    first, start, second, *_ = run.engine.rounds
    assert [problem for problem, *_ in first] == [0, 0, 1, 1] and {limit for *_, limit in first} == {6}
    # Batch 1 has one round, batch 2 the first of two.
    assert [(problem, limit) for problem, _, _, limit in start] == [
        (problem, limit) for problem, limit in ((2, 6), (3, 6), (4, 3), (5, 3)) for _ in range(GROUP)
    ]
    # Problems 4 and 5 have completions of 3, 6, 5 and 2 tokens: two of them go on, with a seed of their own.
    assert second[:2] == [(4, 1, 1, 3), (5, 0, 1, 3)] and [problem for problem, *_ in second[2:]] == [6, 6, 7, 7]
    assert len(run.engine.rounds) == STEPS  # the first batch, and no round in the last step
    for step, each in enumerate(completions):
        problems = (2 * step, 2 * step + 1)
        lengths = [length_of(problem, index) for problem in problems for index in range(GROUP)]
        assert [len(ids) for ids in each.token_ids] == lengths
        assert each.is_on_policy == (step == 0)
    # Tokens of the third batch: the version that sampled each.
    assert completions[2].logps == [[0.0] * 3, [0.0] * 3 + [-1.0] * 3, [0.0] * 3 + [-1.0] * 2, [0.0] * 2]


def test_sampler_grades_each_completion_once_when_it_finishes() -> None:
    run = Run()
    run.step()
    graded = {(problem, index) for problem, index, _ in run.graded}
    assert len(graded) == len(run.graded) == 10  # of twelve begun, two go on
    run.steps(STEPS - 1)
    assert len(set(run.graded)) == len(run.graded) == 4 * STEPS
    [text] = [text for problem, index, text in run.graded if (int(problem, 16), index) == (5, 0)]
    assert text == TOKENIZER.decode([20, 21, 22, 23, END], skip_special_tokens=True)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("saved_at", [1, 3, 5])
def test_sampler_resumed_samples_the_same(tmp_path: Path, staleness: int, saved_at: int) -> None:
    whole = Run(staleness)
    expected = whole.steps(STEPS)
    run = Run(staleness)
    run.steps(saved_at)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, saved_at, staleness=staleness)
    assert resumed.steps(STEPS - saved_at) == expected[saved_at:]
    assert resumed.engine.rounds == whole.engine.rounds[1 + saved_at :]  # nothing is sampled twice
    [line] = resumed.lines
    assert re.fullmatch(r"\d+ completions of later steps are in the checkpoint, \d+ unfinished", line)


def test_sampler_save_holds_all_batches_that_have_begun(tmp_path: Path) -> None:
    run = Run(staleness=4)
    run.steps(2)
    run.sampler.save(tmp_path)
    rollouts, settings = load_open_rollouts(tmp_path)
    assert [each.batch for each in rollouts] == [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4
    assert all(each.finished for each in rollouts[:4]) and not all(each.finished for each in rollouts)
    assert settings["rollout.max_staleness"] == 4


def test_sampler_last_step_saves_nothing(tmp_path: Path) -> None:
    run = Run()
    run.steps(STEPS)
    run.sampler.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"staleness": 1}, "rollout.max_staleness"),
        ({"settings": ("run.seed=7",)}, "run.seed"),
        ({"settings": ("grpo.temperature=0.5",)}, "sampling options"),
        ({"settings": ("engine.max_model_len=500",)}, "engine.max_model_len"),
    ],
)
def test_sampler_load_with_other_settings_discards_with_one_line(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    run = Run()
    run.steps(2)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, 2, **options)
    [line] = resumed.lines
    assert line.startswith("8 completions of later steps") and f"another {name};" in line
    assert resumed.step().is_on_policy and resumed.lines == [line]


def test_sampler_load_for_other_problems_discards_with_one_line(tmp_path: Path) -> None:
    run = Run()
    run.steps(2)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, 2, first_problem=6)  # those of the second batch are drawn one step earlier
    assert resumed.step().is_on_policy
    assert resumed.lines[1:] == [
        "8 of 8 completions of later steps in the checkpoint belong to problems that are not drawn in the same step "
        "again; they are discarded"
    ]


def test_sampler_load_part_of_a_batch_proves_the_rest_at_once(tmp_path: Path) -> None:
    run = Run()
    run.steps(2)
    run.sampler.save(tmp_path)
    resumed = resume(tmp_path, 2, first_problem=5)  # problem 5 is found, problem 6 is not
    completions = resumed.step()
    assert not completions.is_on_policy
    assert [(problem, segment) for problem, _, segment, _ in resumed.engine.rounds[0]] == [(6, 0), (6, 0)]
    assert resumed.lines[1].startswith("4 of 8 completions")  # problem 7 is drawn in the next step again


def test_sampler_metrics_of_a_step() -> None:
    run = Run()
    run.steps(3)
    of_batch = [each for each in run.metrics if "rollout/segments_mean" in each]
    assert [each["rollout/staleness_0"] for each in of_batch] == [1.0, 0.0, 0.0]
    # Batch 2 has completions of 3, 6, 5 and 2 tokens, of which 3 and 2 are one version newer.
    assert of_batch[2]["rollout/staleness_2"] == 11 / 16 and of_batch[2]["rollout/staleness_1"] == 5 / 16
    assert of_batch[2]["rollout/segments_mean"] == 1.5
    assert of_batch[2]["rollout/recomputed_share"] == 2 * (run.engine.prompt + 3) / 16
    of_times = [each for each in run.metrics if "engine/idle_share" in each]
    assert len(of_times) == 3
    assert all(0 <= each[name] <= 1 for each in of_times for name in ("engine/idle_share", "learner/idle_share"))


def test_sampler_segment_that_fills_the_engines_context_is_the_last() -> None:
    run = Run(staleness=2)
    run.engine.max_model_len = run.engine.prompt + 3
    completions = run.steps(4)[2]
    lengths = [length_of(problem, index) for problem in (4, 5) for index in range(GROUP)]
    assert max(lengths) > 3 and [len(ids) for ids in completions.token_ids] == [min(3, each) for each in lengths]
