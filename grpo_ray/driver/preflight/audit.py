r"""Audit of a run's problems, rewards and memory before anything is trained (`grpo-ray check`).

Every row of the training and held-out splits is read, the length of its prompt is counted in the policy's tokens, and
its solution is verified: graded as an answer to its own problem and to its neighbour's (`rewards/solution_check.py`). A
problem whose own solution does not verify can never be rewarded; `AuditReport.unverifiable_ids` lists these, so that
training can leave them out.

Ray Data does the work over the splits' shards. The driver receives 20 bytes per row, sums for each kind and topic, and
the rows that a person should look at.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_ray.config.heldout_keys import split_name, training_name
from grpo_ray.config.schema import Config, RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import Shard
from grpo_ray.data.stream import Split, open_splits, reason_if_empty
from grpo_ray.driver.preflight.overlong import (
    OverlongPrompt,
    PolicyTokenizer,
    describe_overlong,
    engine_context,
    prompt_limit,
    require_overlong_dropped,
)
from grpo_ray.driver.preflight.policy_files import fetch_policy_files
from grpo_ray.driver.preflight.tool_trial import PHASE, ToolReport, try_tools
from grpo_ray.errors import ConfigError, DataError, RewardError
from grpo_ray.models.memory import CardMemory, ModelShape, plan_cards, policy_shape, reward_model_memory
from grpo_ray.rewards.dry_run import DryRun, dry_run_reward
from grpo_ray.rewards.registry import needs_solutions
from grpo_ray.rewards.solution_check import (
    KINDS,
    AcceptedWrongAnswer,
    Coverage,
    Unverifiable,
    VerificationCounts,
    merge_coverage,
    verify_solutions,
)
from grpo_ray.tools.definitions import measuring_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

PROBLEMS_PER_TASK = 1_000
"""Problems verified by one task: some seconds of work, since a verifier process takes a second to start."""
PROMPTS_PER_BATCH = 256
"""Prompts tokenized in one call."""
DRY_RUN_PROBLEMS = 3
EXAMPLE_IDS = 5
"""Ids of repeated problems in the report."""

OnProgress = Callable[[str], None]
"""Called with a description of each phase."""


def ignore_progress(phase: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of prompts, in tokens of the policy."""

    p50: int
    p90: int
    p99: int
    max: int
    limit: int
    """Longest prompt that the run takes (`data.max_prompt_length`)."""
    over_limit: int
    """Rows with longer prompts: they are left out, or refused (`data.overlong_prompts`)."""


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Findings in one split."""

    name: str
    is_part_of_training: bool
    """True for a part of the training dataset that is held out of training."""
    problems: int
    lengths: LengthSummary
    overlong: tuple[OverlongPrompt, ...]
    """Problems with longer prompts than `lengths.limit`, sorted by id."""
    duplicates: int
    """Rows with the prompt and solution of an earlier row."""
    duplicate_ids: tuple[str, ...]
    """Some of the ids that occur more than once."""
    verified: int
    """Problems whose solution was verified: all, or about `sample`."""
    boxed: int
    """Problems among these whose solution is rewarded as `\\boxed{...}`."""
    formula: int
    """Problems among these whose solution is rewarded as `The answer is $...$`."""
    unverifiable: tuple[Unverifiable, ...]
    """Problems whose solution is rewarded in neither form."""
    probes: int
    """Problems for which the next row's solution was also graded as an answer; only where its text differs."""
    fooled: tuple[AcceptedWrongAnswer, ...]
    """Problems for which the next row's solution was graded as right."""
    kinds: Mapping[str, Coverage]
    topics: Mapping[str, Coverage]
    """Empty if the rows have no column `topic`."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Findings of an audit."""

    sources: Mapping[str, SplitReport]
    """Source of the training problems -> findings in it; a single dataset is the source ""."""
    heldout: Mapping[str, SplitReport]
    """Key of a held-out set -> findings in it."""
    heldout_in_training: Mapping[str, int]
    """Key of a held-out set -> problems that are also trained on: accuracy on them measures memorisation."""
    rewards: tuple[DryRun, ...]
    tools: ToolReport | None
    """Trial of tools and environments; None if the run has neither."""
    policy: ModelShape
    """Sizes of the policy."""
    memory: tuple[CardMemory, ...]
    """Memory of one worker on common GPUs, smallest first."""
    columns: tuple[str, ...]
    """Columns that occur in any training problem. Rewards receive all of them; null where a problem lacks one."""
    graded_sources: frozenset[str]
    """Sources whose problems have the reward correctness."""
    seconds: float
    """Duration of the audit."""

    @property
    def training(self) -> SplitReport:
        """Findings in the training problems of a single dataset."""
        (report,) = self.sources.values()
        return report

    @property
    def unverifiable_ids(self) -> list[str]:
        """Ids of training problems that can never be rewarded; those without the reward correctness do not count."""
        return sorted({row.id for name in self.graded_sources for row in self.sources[name].unverifiable})

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's types: `training` for a single dataset, `sources` for a mixture."""
        report = asdict(self) | {"memory": [each.to_dict() for each in self.memory]}
        sources = report.pop("sources")
        training = {"training": sources[""]} if list(sources) == [""] else {"sources": sources}
        counts = {"correctness_counts": bool(report.pop("graded_sources"))}
        return training | report | counts | {"unverifiable_ids": self.unverifiable_ids}


def audit(config: Config, *, sample: int | None = None, on_progress: OnProgress = ignore_progress) -> AuditReport:
    """Read and check everything that a run of this config would read. Ray must be connected.

    Args:
        sample: number of problems of each split to verify, approximately, chosen by content; None verifies all.

    Raises:
        DataError: a row cannot be used; the first one in the dataset's order, with file and row.
        ConfigError: the policy's config or tokenizer cannot be read, or a tool or environment cannot be used.
        RewardError: a reward cannot be loaded, or fails on the first problems.
    """
    if sample is not None and sample < 1:
        raise ConfigError(f"sample={sample} must be at least 1, or None for all problems")
    started = time.perf_counter()
    on_progress("reading the policy's config")
    policy = read_policy(config)
    limit = prompt_limit(config, policy.context_length)
    training, heldout = open_splits(config, partial(needs_solutions, config))
    named = {training_name(name): split for name, split in training.items()}
    named |= {split_name(key): split for key, split in heldout.items()}
    is_rewarded = config.run.kind == "grpo"  # demonstrations may have no solutions
    needs = [
        *(is_rewarded and config.needs_solutions_of(name) for name in training),
        *(config.needs_solutions_of(config.source_of(k)) for k in heldout),
    ]
    measured = []
    for name, split in named.items():
        on_progress(f"reading the {name} problems")
        measured.append(_measure_prompts(config, split))
    on_progress("trying the rewards")
    columns = tuple(sorted({name for prompts in measured[: len(training)] for name in prompts.columns}))
    first_problems = {
        name: list(islice(replace(split, columns=columns).read(), DRY_RUN_PROBLEMS + 1))
        for name, split in training.items()
    }
    tools = None
    if config.rollout.has_turns:
        on_progress(PHASE)
        splits = zip(named.values(), measured, strict=True)
        problems = chain.from_iterable(replace(split, columns=each.columns).read() for split, each in splits)
        tools = try_tools(config, problems, policy.tokenizer)
    dry_runs = _dry_run_rewards(config, first_problems, policy.tokenizer) if is_rewarded else ()
    reports: list[SplitReport] = []
    question_ids: list[np.ndarray] = []
    for (name, split), prompts, reads_solutions in zip(named.items(), measured, needs, strict=True):
        overlong = find_overlong_rows(prompts, limit.tokens)
        message = describe_overlong(name, len(prompts.ids), overlong, limit)
        require_overlong_dropped(config, split.name, message, overlong)
        lengths = summarise_lengths(prompts.lengths, limit.tokens)
        slices = []
        if reads_solutions:
            on_progress(f"verifying the {name} solutions")
            slices = _slice_shards(split, prompts, sample)
        reports.append(_report_split(split, prompts, lengths, overlong, _verify_slices(slices, config.rewards)))
        question_ids.append(np.unique(prompts.question_ids))
    of_training, of_heldout = reports[: len(training)], reports[len(training) :]
    longest = min(limit.tokens, *(report.lengths.max for report in of_training)) + config.grpo.max_completion_length
    trained_on = np.unique(np.concatenate(question_ids[: len(training)]))
    return AuditReport(
        sources=dict(zip(training, of_training, strict=True)),
        heldout=dict(zip(heldout, of_heldout, strict=True)),
        heldout_in_training={
            key: len(np.intersect1d(trained_on, each, assume_unique=True))
            for key, each in zip(heldout, question_ids[len(training) :], strict=True)
        },
        rewards=dry_runs,
        tools=tools,
        policy=policy.shape,
        memory=plan_cards(
            config,
            policy.shape,
            sequence_length=min(policy.context_length, longest),
            reward_models=reward_model_memory(config),
        ),
        columns=columns,
        graded_sources=frozenset(name for name in training if is_rewarded and "correctness" in config.rewards_of(name)),
        seconds=round(time.perf_counter() - started, 1),
    )


# The policy


@dataclass(frozen=True)
class PolicyInfo:
    """Properties of the initial policy, read without its weights."""

    shape: ModelShape
    tokenizer: "PreTrainedTokenizerBase"
    context_length: int
    """Context of the engine, tokens."""


def read_policy(config: Config) -> PolicyInfo:
    """Read the policy's config and tokenizer. Raises ConfigError."""
    from grpo_ray.models.tokenizer import require_end_token

    path = fetch_policy_files(config.model.path)
    source = PolicyTokenizer(config.model.path, config.model.trust_remote_code)
    shape = policy_shape(config, path)
    tokenizer = source.load()
    if config.run.kind == "sft":
        require_end_token(tokenizer, config.model.path)
    return PolicyInfo(shape, tokenizer, engine_context(config, source))


# Rows, prompts, duplicates


@dataclass(frozen=True)
class PromptLengths:
    """Ids, prompt lengths and columns of a split's problems, in the dataset's order."""

    ids: np.ndarray
    """Ids of the problems, (P,) uint64."""
    question_ids: np.ndarray
    """`Problem.question_id` of the problems, (P,) uint64."""
    lengths: np.ndarray
    """Lengths of the prompts in tokens, (P,) uint32."""
    shard_sizes: Sequence[int]
    """Problems that each shard contributes to the split; P in all."""
    columns: tuple[str, ...]
    """Further columns that any of the problems has, sorted."""


def _measure_prompts(config: Config, split: Split) -> PromptLengths:
    """Read every row and count its prompt's tokens, one Ray Data row for each shard. Raises DataError."""
    import ray.data

    bare_split = replace(split, shards=())  # a task needs its own shard, not the list of all
    arrays = ("ids", "question_ids", "lengths")

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        try:
            found = measure_shard(config, bare_split, row["shard"])
        except (DataError, OSError) as error:
            nothing = {**dict.fromkeys(arrays, b""), "columns": "[]"}
            kind = "unreachable" if isinstance(error, OSError) else "unusable"
            return {"number": row["number"], **nothing, "error": str(error), "kind": kind}
        contents = {name: getattr(found, name).tobytes() for name in arrays}
        return {"number": row["number"], **contents, "columns": json.dumps(found.columns), "error": "", "kind": ""}

    items = [{"number": number, "shard": shard} for number, shard in enumerate(split.shards)]
    rows = ray.data.from_items(items, override_num_blocks=min(len(items), 256)).map(measure).take_all()
    rows.sort(key=lambda row: row["number"])
    for row in rows:
        if row["error"]:
            raise (ConnectionError if row["kind"] == "unreachable" else DataError)(row["error"])

    def joined(name: str, dtype: type[np.unsignedinteger]) -> np.ndarray:
        return np.frombuffer(b"".join(row[name] for row in rows), dtype)[: split.limit]

    ids = joined("ids", np.uint64)
    if not len(ids):
        raise DataError(f"{split.name}: {reason_if_empty(split)}")
    ends = np.minimum(np.cumsum([len(row["ids"]) // ids.itemsize for row in rows]), len(ids))
    columns = sorted({name for row in rows for name in json.loads(row["columns"])})
    sizes = np.diff(ends, prepend=0).tolist()
    return PromptLengths(ids, joined("question_ids", np.uint64), joined("lengths", np.uint32), sizes, tuple(columns))


def measure_shard(config: Config, split: Split, shard: Shard) -> PromptLengths:
    """Read one shard of a split, and count the tokens of its prompts. Raises DataError if a row cannot be used."""
    from grpo_ray.models.tokenizer import tokenize_prompts

    tokenizer = PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()
    arguments = measuring_arguments(config)
    ids: list[int] = []
    question_ids: list[int] = []
    lengths: list[int] = []
    columns: set[str] = set()
    problems = split.read_shard(shard)
    while batch := list(islice(problems, PROMPTS_PER_BATCH)):
        ids += [int(problem.id, 16) for problem in batch]
        question_ids += [int(problem.question_id, 16) for problem in batch]
        columns.update(*(problem.columns for problem in batch))
        prompts = [problem.prompt for problem in batch]
        lengths += [len(tokens) for tokens in tokenize_prompts(tokenizer, prompts, arguments)]
    return PromptLengths(
        ids=np.array(ids, np.uint64),
        question_ids=np.array(question_ids, np.uint64),
        lengths=np.array(lengths, np.uint32),
        shard_sizes=[len(ids)],
        columns=tuple(sorted(columns)),
    )


def find_overlong_rows(prompts: PromptLengths, limit: int) -> list[OverlongPrompt]:
    """Return the problems with prompts of more than `limit` tokens, each once, sorted by id."""
    rows = np.flatnonzero(prompts.lengths > limit)
    ids, first = np.unique(prompts.ids[rows], return_index=True)
    lengths = prompts.lengths[rows][first]
    return [OverlongPrompt(f"{number:016x}", n) for number, n in zip(ids.tolist(), lengths.tolist(), strict=True)]


def summarise_lengths(lengths: np.ndarray, limit: int) -> LengthSummary:
    """Compute percentiles of prompt lengths (nearest rank, so each is a length that occurs), and count long prompts.

    Args:
        lengths: (P,) tokens.
        limit: longest prompt that the run takes, tokens.
    """
    p50, p90, p99 = (int(np.percentile(lengths, q, method="inverted_cdf")) for q in (50, 90, 99))
    return LengthSummary(p50, p90, p99, int(lengths.max()), limit, int((lengths > limit).sum()))


# Solutions


@dataclass(frozen=True)
class ShardSlice:
    """Consecutive problems of one shard that one task verifies."""

    split: Split
    """Split of the problems, without its list of shards."""
    shard: Shard
    start: int
    stop: int
    sample_share: float
    """Share of the problems that are verified, 0 to 1."""

    def pairs(self) -> list[tuple[Problem, Problem]]:
        """Return the sampled problems, each with the shard's next one; the shard's last with the problem before it."""
        first = max(0, self.start - 1)  # the shard's last problem may be alone in its slice
        problems = list(islice(self.split.read_shard(self.shard), first, self.stop + 1))
        own = problems[self.start - first :]
        neighbours = [*own[1:], *problems[-2:][:1]]
        pairs = list(zip(own, neighbours, strict=True))[: self.stop - self.start]
        return [pair for pair in pairs if is_sampled(pair[0].id, self.sample_share)]


def is_sampled(problem_id: str, share: float) -> bool:
    """Return True if a problem belongs to a sample that has this share (0 to 1), chosen by a hash of its content."""
    # Multiplied by a constant (Fibonacci hashing), because data.heldout_share already splits off the lowest ids.
    return int(problem_id, 16) * 0x9E3779B97F4A7C15 % 2**64 < share * 2**64


def _report_split(
    split: Split,
    prompts: PromptLengths,
    lengths: LengthSummary,
    overlong: Sequence[OverlongPrompt],
    counts: Sequence[VerificationCounts],
) -> SplitReport:
    """Merge the findings in a split; `counts` has one entry for each slice of verified solutions."""
    ids, repeats = np.unique(prompts.ids, return_counts=True)
    return SplitReport(
        name=split.name,
        is_part_of_training=split.keep_heldout,
        problems=len(prompts.ids),
        lengths=lengths,
        overlong=tuple(overlong),
        duplicates=len(prompts.ids) - len(ids),
        duplicate_ids=tuple(f"{number:016x}" for number in ids[repeats > 1][:EXAMPLE_IDS].tolist()),
        verified=sum(each["verified"] for each in counts),
        boxed=sum(each["boxed"] for each in counts),
        formula=sum(each["formula"] for each in counts),
        unverifiable=tuple(Unverifiable(**row) for each in counts for row in each["unverifiable"]),
        probes=sum(each["probes"] for each in counts),
        fooled=tuple(AcceptedWrongAnswer(**row) for each in counts for row in each["fooled"]),
        kinds=merge_coverage([each["kinds"] for each in counts], KINDS),
        topics=merge_coverage([each["topics"] for each in counts]),
    )


def _slice_shards(split: Split, prompts: PromptLengths, sample: int | None) -> list[ShardSlice]:
    bare_split = replace(split, shards=())
    share = 1.0 if sample is None else min(1.0, sample / len(prompts.ids))
    return [
        ShardSlice(bare_split, shard, start, min(start + PROBLEMS_PER_TASK, size), share)
        for shard, size in zip(split.shards, prompts.shard_sizes, strict=True)
        for start in range(0, size, PROBLEMS_PER_TASK)
    ]


def _verify_slices(slices: Sequence[ShardSlice], rewards: RewardsConfig) -> list[VerificationCounts]:
    """Verify each slice in a Ray Data task, and return the counts in order."""
    import ray.data

    if not slices:
        return []
    items = [{"number": number, "slice": each} for number, each in enumerate(slices)]
    rows = ray.data.from_items(items, override_num_blocks=min(len(items), 1024)).map(
        # The counts are sent as JSON: Arrow requires one type for all rows, but the keys of the tables differ.
        lambda row: {"number": row["number"], "counts": json.dumps(verify_solutions(row["slice"].pairs(), rewards))}
    )
    return [json.loads(row["counts"]) for row in sorted(rows.take_all(), key=lambda row: row["number"])]


# Rewards


def _dry_run_rewards(
    config: Config, first_problems: Mapping[str, Sequence[Problem]], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[DryRun, ...]:
    """Run every reward once.

    Args:
        first_problems: the first problems of each source; a reward is tried on those of the first source that it
            applies to.

    Raises:
        RewardError: a reward cannot be loaded, or fails.
    """
    rewards, runs = config.rewards, []
    for index, name in enumerate(rewards.functions):
        applicable = (each for source, each in first_problems.items() if name in config.rewards_of(source))
        if not (problems := next(applicable, ())):
            continue
        failure = f"reward {name!r} fails on the first problems"
        runs.append(call_rewards(dry_run_reward, rewards, index, problems, tokenizer, failure=failure))
    return tuple(runs)


def call_rewards(function: Callable[..., T], *arguments: Any, failure: str) -> T:
    """Run a function that calls rewards in a Ray task, with the workers' Python path; a crash does not end the driver.

    Args:
        failure: beginning of the message if it raises, such as "reward 'x' fails on the first problems".

    Raises:
        RewardError: the function has raised, or its process died.
    """
    import ray

    try:
        return ray.get(ray.remote(num_cpus=0, max_retries=0)(function).remote(*arguments))
    except (ray.exceptions.RayTaskError, ray.exceptions.WorkerCrashedError) as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, RewardError):
            raise RewardError(str(cause)) from None
        reason = (str(cause).strip().splitlines() or ["no message"])[0]
        raise RewardError(f"{failure}: {type(cause).__name__}: {reason}") from None
