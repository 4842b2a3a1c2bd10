"""Collecting of steps by the real collector, with scripted samplers and passes in place of an engine and a policy."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from scripted_tools import tool_tokenizer
from transformers import TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import SyncError
from grpo_ray.inference.sampling import Completion, OnFinished, ignore_finished
from grpo_ray.learner.advantages import trl_advantages
from grpo_ray.learner.batch import Batch
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.bounded_staleness import BoundedStalenessSampler
from grpo_ray.learner.rollouts.collector import Collector, LossNeeds
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.recorded_samples import SampleChooser
from grpo_ray.learner.rollouts.rollout import Rollout, Rows
from grpo_ray.learner.rollouts.sampler import OnPolicySampler, Sampler, SingleTurn, WeightSync
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.learner.rollouts.segment_rounds import SegmentRounds
from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule
from grpo_ray.learner.rollouts.sync_probe import SyncProbe
from grpo_ray.learner.schedule import DrawOrder
from grpo_ray.learner.sync_check import ImportanceSampling
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.telemetry.profiler import PhaseProfiler

TOKENIZER = tool_tokenizer("tiny-arithmetic")
ANSWER = [40, 41, TOKENIZER.eos_token_id]
GROUP = 2
LOGP, MOVED = -2.0, -2.0 + math.log(2)
"""Log-probability of a token by the engine, and by the learner: their ratio is 2."""
IMPORTANCE = ImportanceSampling("token_truncate", high=1.5)
STATE = TrainerState(global_step=0, save_steps=5, max_steps=9)


@dataclass
class Script:
    """Engine and learner that record their calls."""

    calls: list[str] = field(default_factory=list)
    unprocessed: list[float | None] | None = None
    checked: list[list[float]] = field(default_factory=list)
    fails: bool = False
    proofs: int = 0
    training_sampling: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 1000

    # Engine

    def sync_weights(self) -> None:
        self.calls.append("sync")
        self.prove_weights()

    def prove_weights(self) -> None:
        self.proofs += 1

    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished = ignore_finished
    ) -> list[Completion]:
        self.calls.append("generate")
        assert len({each["seed"] for each in sampling}) == len(prompts)
        return [Completion(ANSWER, False, [LOGP, None, LOGP], self.unprocessed or []) for _ in prompts]

    # Learner

    def logps(self, batch: Batch) -> torch.Tensor:
        self.calls.append("score")
        return torch.full(batch["completion_ids"].shape, MOVED)

    def reference_logps(self, batch: Batch) -> torch.Tensor | None:
        return None

    def prove_batch(self, logps: torch.Tensor, batch: Batch) -> None:
        self.calls.append("prove")
        assert logps.shape == batch["completion_ids"].shape

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        self.calls.append("compare")
        assert learner_logps.shape == engine_logps.shape == mask.shape
        self.checked.append(engine_logps[0].tolist())
        if self.fails:
            raise SyncError("not in sync")


def pay(completions: list[Any], id: list[str], index: list[int], **columns: Any) -> list[float]:
    """Pay the second completion of each problem whose number is even; the groups of all others have no signal."""
    return [float(int(each, 16) % 2 == 0 and place == 1) for each, place in zip(id, index, strict=True)]


def make_collector(
    script: Script, *, ahead: bool = False, filter_logps: bool = False, rounds: int = 0, one_pass: bool = False,
    steps: Callable[[], int] = lambda: 0, metrics: Callable[[Mapping[str, float]], None] = lambda values: None,
) -> Collector:  # fmt: skip
    """Return a real collector on one worker."""
    engine: Any = script
    config = load_config(None, ["grpo.top_p=0.9", "grpo.vllm_importance_sampling_mode=token_mask"] * filter_logps)
    workers, profiler = Workers(gather_objects=lambda own: [own]), PhaseProfiler()
    padding = Padding(0, None, 1.0)
    sync = WeightSync(engine, steps)
    turn = SingleTurn(config, engine, TOKENIZER, None)
    sampler: Sampler = OnPolicySampler(sync, turn, workers, profiler)
    if ahead:
        schedule = StalenessSchedule(1, longest=len(ANSWER), max_steps=9)
        sampler = BoundedStalenessSampler(
            schedule, sync, SegmentRounds(turn, schedule), SyncProbe(script, padding, workers),
            repeats=1, workers=workers, profiler=profiler, append_metrics=metrics,
            notify=lambda line: None,
        )  # fmt: skip
    weights = torch.ones(1)
    return Collector(
        sampler=sampler, padding=padding,
        scorer=Scorer(
            rewards=[Reward("pay", pay)], functions=("pay",), tokenizer=TOKENIZER, workers=workers, profiler=profiler,
            state=TrainerState, notify=lambda line: None,
        ),
        advantage=trl_advantages("group", "sum_then_normalize"),
        needs=lambda: LossNeeds(importance=IMPORTANCE, old_logps=False, one_pass=one_pass, masks_truncated=False),
        passes=script, prove=script.prove_batch,
        filler=DynamicSampler(rounds, GROUP, weights, padding, workers) if rounds else None,
        recorder=GroupRecorder(GROUP, ("pay",), weights, TOKENIZER, {TOKENIZER.eos_token_id}),
        chooser=SampleChooser(GROUP, weights, DrawOrder(workers)), order=DrawOrder(workers), workers=workers,
        state=lambda: STATE,
        append_metrics=metrics, count_tokens=lambda tokens: None,
    )  # fmt: skip


def batches(problems: int, prompts: int = 2) -> GroupBatches:
    prompt = [{"role": "user", "content": "1 + 1"}]
    stream = [Problem(id=f"{n:016x}", prompt=prompt, solution="2", columns={}) for n in range(problems)]
    return GroupBatches([(problem, 0) for problem in stream], prompts, num_generations=GROUP, repeats=1)


def numbers(groups: Iterable[GroupRecord]) -> list[int]:
    return [int(group.problem, 16) for group in groups]


def collect_all(collector: Collector, problems: int) -> list[Rollout]:
    return [collector.collect(rows) for rows in collector.attach(batches(problems))]


# On-policy


def test_collect_samples_scores_and_proves_a_step() -> None:
    script = Script()
    [rollout] = collect_all(make_collector(script), 2)
    assert script.calls == ["sync", "generate", "score", "prove"]
    assert numbers(rollout.groups) == [0, 1] and all(group.trained for group in rollout.groups)
    assert rollout.rewards.tolist() == [[0.0], [1.0], [0.0], [0.0]]
    scaled = 0.5 / (0.5**0.5 + 1e-4)  # distance from the mean, and standard deviation of 0 and 1
    assert rollout.batch["advantages"].tolist() == pytest.approx([-scaled, scaled, 0.0, 0.0])
    assert rollout.batch["num_items_in_batch"].item() == 4 * len(ANSWER)


def test_collect_leaves_scoring_and_proof_to_the_pass_of_the_loss() -> None:
    script = Script()
    [rollout] = collect_all(make_collector(script, one_pass=True), 2)
    assert script.calls == ["sync", "generate"]
    assert rollout.batch.keys().isdisjoint({"old_per_token_logps", "importance_sampling_ratio"})


def test_collect_syncs_once_per_optimizer_step_and_proves_each_generation() -> None:
    script = Script()
    collect_all(make_collector(script, one_pass=True), 4)
    assert script.calls == ["sync", "generate", "generate"] and script.proofs == 2


def test_collect_dynamic_sampling_records_all_rounds() -> None:
    found: dict[str, float] = {}
    collector = make_collector(Script(), rounds=3, metrics=found.update)
    rollout = collector.collect(next(iter(collector.attach(batches(8)))))
    # Problems 0 and 2 have signal; the second round has drawn 2 and 3.
    assert numbers(rollout.groups) == [0, 1, 2, 3]
    assert [group.trained for group in rollout.groups] == [True, False, True, False]
    assert [row["id"] for row in rollout.rows[::GROUP]] == [f"{0:016x}", f"{2:016x}"]
    assert found["group/rounds"] == 2.0 and found["group/signal_share"] == 1.0


def test_roll_out_masked_truncated_completion_counts_no_token() -> None:
    class CutScript(Script):
        def run_requests(self, *args: Any) -> list[Completion]:
            first, *others = super().run_requests(*args)
            return [replace(first, token_ids=[40, 41, 42]), *others]

    collector = make_collector(CutScript(), one_pass=True)
    collector.needs = lambda: LossNeeds(importance=None, old_logps=False, one_pass=True, masks_truncated=True)
    rollout = collector.roll_out(next(iter(batches(2))))
    assert rollout.batch["completion_mask"].sum(dim=1).tolist() == [0, 3, 3, 3]
    assert rollout.batch["num_items_in_batch"].item() == 9


# One step ahead


def start(script: Script, **options: Any) -> tuple[Collector, Iterable[Rows]]:
    """Collect the first step, sample for the second one, and take the first; return the batches that are left."""
    taken: list[int] = []
    collector = make_collector(script, ahead=True, steps=lambda: len(taken), **options)
    attached = iter(collector.attach(batches(4)))
    collector.collect(next(attached))
    collector.sampler.start_ahead(STATE)
    collector.sampler.finish_ahead()
    taken.append(1)
    return collector, attached


def test_ahead_collects_what_was_sampled_ahead() -> None:
    script = Script()
    collector, [rows] = start(script)
    # The first step is proven with its whole batch, the round with two of its completions.
    assert script.calls == ["sync", "generate", "score", "prove", "generate", "score", "compare"]
    assert len(script.checked) == 1 and math.isnan(script.checked[0][1])
    rollout = collector.collect(rows)
    assert script.calls[7:] == ["score"]  # nothing is sampled or proven again; the present weights are the old policy
    assert numbers(rollout.groups) == [2, 3]  # the batch that was looked at is drawn, and not the one after it
    assert not rollout.is_on_policy
    torch.testing.assert_close(rollout.batch["old_per_token_logps"], torch.full((4, 3), MOVED))
    ratio = rollout.batch["importance_sampling_ratio"]
    torch.testing.assert_close(ratio, torch.tensor([[1.5, 1.0, 1.5]] * 4))  # 2, truncated; 1 where there is none


def test_ahead_one_pass_leaves_stale_batch_to_the_loss() -> None:
    script = Script()
    collector, [rows] = start(script, one_pass=True)
    collector.collect(rows)
    assert script.calls == ["sync", "generate", "generate", "score", "compare"]


def test_ahead_behaviour_anchor_replaces_old_policy() -> None:
    script = Script()
    collector, [rows] = start(script)
    needs = LossNeeds(
        importance=IMPORTANCE, old_logps=False, one_pass=False, behaviour_anchor=True, masks_truncated=False
    )
    collector.needs = lambda: needs
    batch = collector.collect(rows).batch
    torch.testing.assert_close(batch["old_per_token_logps"], torch.tensor([[LOGP, MOVED, LOGP]] * 4))
    assert batch["importance_sampling_ratio"].eq(1).all()


def test_ahead_for_other_rows_raises() -> None:
    collector, [rows] = start(Script())
    other = [row | {"id": f"{9:016x}"} for row in rows]
    with pytest.raises(RuntimeError, match="not those that its completions were begun for"):
        collector.sampler.sample(other)


def test_ahead_filters_checks_logps_before_them() -> None:
    script = Script(unprocessed=[-3.0, -4.0, -5.0])
    collector, [rows] = start(script, filter_logps=True)
    assert script.checked == [[-3.0, -4.0, -5.0]]
    # The importance ratio takes those after the filters.
    assert collector.sampler.sample(rows).logps[0] == [LOGP, None, LOGP]


def test_ahead_failed_check_raises() -> None:
    with pytest.raises(SyncError):
        start(Script(fails=True))
