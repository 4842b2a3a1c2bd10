r"""Is this run worth its money? What its problems, rewards and memory say before anything is trained.

Every row of both splits is read; its prompt is counted in the policy's tokens, and its solution is held against itself
and against its neighbour's (`rewards/solutions.py`). A problem whose own solution does not verify can never be
rewarded; `AuditReport.unverifiable_ids` names it, so that training can leave it out.

The work is done by Ray Data over the split's shards. What comes back to the driver is 12 bytes for each row, sums for
each kind and topic, and the rows that are worth a look.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_ray.config.schema import Config, ModelConfig, RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import Shard
from grpo_ray.data.stream import Split, open_splits
from grpo_ray.errors import ConfigError, DataError, RewardError
from grpo_ray.models.memory import GPU_SIZES, MemoryEstimate, estimate_memory, model_shape
from grpo_ray.rewards.dry_run import DryRun, try_reward
from grpo_ray.rewards.solution_check import (
    KINDS,
    AcceptedWrongAnswer,
    Coverage,
    Unverifiable,
    merge_coverage,
    verify_solutions,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED = ModelConfig.path
"""The default policy is the embedded one."""
ROWS_PER_PIECE = 1_000
"""Problems verified by one task: some seconds of work for the second that a verifier takes to start."""
PROMPTS_AT_ONCE = 256
DRY_RUN_ROWS = 3
SHOWN = 5
"""How many of the rows worth a look are printed; the report holds them all."""


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of prompts, in tokens of the policy."""

    p50: int
    p90: int
    p99: int
    max: int
    limit: int
    """Longest prompt that leaves room for grpo.max_completion_length: the engine's context less that."""
    over_limit: int
    """Prompts longer than that: their completions are cut short."""
    over_context: int
    """Prompts that fill the context alone: the engine refuses them, and the run ends."""


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What was found in one split."""

    name: str
    problems: int
    lengths: LengthSummary
    duplicates: int
    """Rows that say again what an earlier row says, prompt and solution alike."""
    duplicate_ids: tuple[str, ...]
    """Some of the ids that come more than once."""
    verified: int
    """Problems whose solution was held against itself: all, or about `sample`."""
    boxed: int
    """Of them, rewarded as `\\boxed{...}`."""
    formula: int
    """Of them, rewarded as `The answer is $...$`."""
    unverifiable: tuple[Unverifiable, ...]
    """Rewarded in neither form."""
    probes: int
    """Problems that were also given the next row's solution, where it differs as text."""
    fooled: tuple[AcceptedWrongAnswer, ...]
    """Those that it solved."""
    kinds: Mapping[str, Coverage]
    topics: Mapping[str, Coverage]
    """Empty where the rows have no column `topic`."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """All that `check` found."""

    training: SplitReport
    heldout: SplitReport
    heldout_in_training: int
    """Held-out problems that stand in the training split too: what is measured on them is memory."""
    rewards: tuple[DryRun, ...]
    memory: MemoryEstimate
    correctness_counts: bool
    """Whether the run pays for correctness at all."""
    seconds: float
    """Of the whole check."""

    @property
    def unverifiable_ids(self) -> list[str]:
        """Training problems that can never be rewarded; none where the run does not pay for correctness."""
        return sorted({row.id for row in self.training.unverifiable}) if self.correctness_counts else []

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self) | {"memory": self.memory.to_dict(), "unverifiable_ids": self.unverifiable_ids}


def audit(config: Config, *, sample: int | None = None, say: Callable[[str], None] = lambda phase: None) -> AuditReport:
    """Look at everything that a run of this config would read. Ray must be connected.

    sample: hold about so many problems of each split against themselves, chosen by their content; None takes all.
    say: told what is being done.
    Raises DataError for the first bad row, naming file and row; ConfigError if the policy's config or tokenizer cannot
    be read; RewardError if a reward cannot be loaded, or fails on the first problems.
    """
    if sample is not None and sample < 1:
        raise ConfigError(f"sample={sample} must be at least 1, or None for all problems")
    begun = time.perf_counter()
    say("reading the policy's config")
    path = policy_files(config, say)
    shape, tokenizer = model_shape(path, config.model.trust_remote_code), _tokenizer(config, path)
    context = config.engine.max_context or int(config.grpo.trl.get("vllm_max_model_length") or shape.context)
    splits = dict(zip(("training", "held-out"), open_splits(config), strict=True))
    say("trying the rewards")
    dry_runs = _dry_runs(config.rewards, list(islice(splits["training"].read(), DRY_RUN_ROWS + 1)), tokenizer)
    reports, ids = [], []
    for name, split in splits.items():
        say(f"reading the {name} problems")
        prompts = _measure(config, split)
        lengths = summarise_lengths(prompts.lengths, context, config.grpo.max_completion_length)
        say(f"holding the {name} solutions against themselves")
        reports.append(_verify(config.rewards, split, prompts, lengths, sample))
        ids.append(np.unique(prompts.ids))
    longest = reports[0].lengths.max + config.grpo.max_completion_length
    return AuditReport(
        training=reports[0],
        heldout=reports[1],
        heldout_in_training=len(np.intersect1d(ids[0], ids[1], assume_unique=True)),
        rewards=dry_runs,
        memory=estimate_memory(config, shape, tokens=min(context, longest)),
        correctness_counts="correctness" in config.rewards.functions,
        seconds=round(time.perf_counter() - begun, 1),
    )


# The policy


def policy_files(config: Config, say: Callable[[str], None] = lambda phase: None) -> str:
    """A local folder (or the hub id) with the policy's config and tokenizer; its weights are not fetched."""
    path = config.model.path
    if path == EMBEDDED:
        from grpo_ray.models.toy_policy import tiny_policy

        said = "warming up the embedded policy (once, about a minute)"
        return str(tiny_policy(config.run.seed, progress=lambda step, steps: say(said) if step == 1 else None))
    if "://" not in path:
        return path
    import pyarrow.fs

    filesystem, remote = pyarrow.fs.FileSystem.from_uri(path)
    local = tempfile.mkdtemp(prefix="grpo_ray-")
    for file in filesystem.get_file_info(pyarrow.fs.FileSelector(remote)):
        if file.is_file and file.extension not in ("safetensors", "bin", "pt", "pth", "gguf"):
            pyarrow.fs.copy_files(file.path, f"{local}/{file.base_name}", source_filesystem=filesystem)
    return local


def _tokenizer(config: Config, path: str) -> "PreTrainedTokenizerBase":
    from grpo_ray.models.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"model.path={config.model.path}: its tokenizer cannot be read: {said}") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path={config.model.path}: its tokenizer has no chat template to put prompts into")
    return tokenizer


# Rows, prompts, duplicates


@dataclass(frozen=True)
class PromptLengths:
    """What the first reading leaves of a split, in the dataset's order."""

    ids: np.ndarray
    """(P,) uint64, the problems' ids."""
    lengths: np.ndarray
    """(P,) uint32, their prompts' lengths in tokens."""
    taken: Sequence[int]
    """How many problems each shard gives to the split, P in all."""


def _measure(config: Config, split: Split) -> PromptLengths:
    """Read every row and count its prompt's tokens, shard by shard."""
    import ray.data

    bare = replace(split, shards=())  # a task needs its own shard, not the list of all

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        try:
            ids, lengths = measure_shard(config, bare, row["shard"])
        except DataError as error:
            return {"number": row["number"], "ids": b"", "lengths": b"", "error": str(error)}
        return {"number": row["number"], "ids": ids.tobytes(), "lengths": lengths.tobytes(), "error": ""}

    items = [{"number": number, "shard": shard} for number, shard in enumerate(split.shards)]
    rows = ray.data.from_items(items, override_num_blocks=min(len(items), 256)).map(measure).take_all()
    rows.sort(key=lambda row: row["number"])
    for row in rows:
        if row["error"]:
            raise DataError(row["error"])
    ids = np.frombuffer(b"".join(row["ids"] for row in rows), np.uint64)[: split.limit]
    lengths = np.frombuffer(b"".join(row["lengths"] for row in rows), np.uint32)[: split.limit]
    if not len(ids):
        raise DataError(f"{split.name}: no problems left after data.heldout_share={split.heldout_share}")
    ends = np.minimum(np.cumsum([len(row["ids"]) // 8 for row in rows]), len(ids))
    return PromptLengths(ids, lengths, np.diff(ends, prepend=0).tolist())


def measure_shard(config: Config, split: Split, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Ids (P,) uint64 and prompt lengths (P,) uint32 of one shard's problems. Raises DataError for a bad row."""
    from grpo_ray.models.tokenizer import tokenize_prompts

    tokenizer = _tokenizer(config, policy_files(config))
    ids: list[int] = []
    lengths: list[int] = []
    problems = split.read_shard(shard)
    while some := list(islice(problems, PROMPTS_AT_ONCE)):
        ids += [int(problem.id, 16) for problem in some]
        lengths += [len(tokens) for tokens in tokenize_prompts(tokenizer, [problem.prompt for problem in some])]
    return np.array(ids, np.uint64), np.array(lengths, np.uint32)


def summarise_lengths(lengths: np.ndarray, context: int, completion: int) -> LengthSummary:
    """Percentiles (the smallest length that so many do not exceed) and limits.

    lengths: (P,) tokens. context: of the engine, tokens. completion: the longest, tokens.
    """
    p50, p90, p99 = (int(np.percentile(lengths, q, method="inverted_cdf")) for q in (50, 90, 99))
    limit = max(0, context - completion)
    over_limit, over_context = int((lengths > limit).sum()), int((lengths >= context).sum())
    return LengthSummary(p50, p90, p99, int(lengths.max()), limit, over_limit, over_context)


# Solutions


@dataclass(frozen=True)
class AuditShard:
    """A run of one shard's problems that one task verifies."""

    split: Split
    """Which of the shard's problems belong to it; without its list of shards."""
    shard: Shard
    start: int
    stop: int
    share: float
    """Share of the problems that are held against themselves, 0 to 1."""

    def pairs(self) -> list[tuple[Problem, Problem]]:
        """The chosen problems, each with the one behind it in the shard; the shard's last with the one before."""
        problems = list(islice(self.split.read_shard(self.shard), self.start, self.stop + 1))
        neighbours = [*problems[1:], *problems[-2:][:1]]
        pairs = list(zip(problems, neighbours, strict=True))[: self.stop - self.start]
        return [pair for pair in pairs if is_chosen(pair[0].id, self.share)]


def is_chosen(problem_id: str, share: float) -> bool:
    """Whether a problem is in a sample of this share (0 to 1): by a hash of its content, wherever it stands."""
    # Multiplied, because the lowest ids are what data.heldout_share cuts off.
    return int(problem_id, 16) * 0x9E3779B97F4A7C15 % 2**64 < share * 2**64


def _verify(
    rewards: RewardsConfig, split: Split, prompts: PromptLengths, lengths: LengthSummary, sample: int | None
) -> SplitReport:
    """Verify a split's solutions in parallel, and put together what was found."""
    import ray.data

    problems, bare = len(prompts.ids), replace(split, shards=())
    share = 1.0 if sample is None else min(1.0, sample / problems)
    pieces = [
        AuditShard(bare, shard, start, min(start + ROWS_PER_PIECE, taken), share)
        for shard, taken in zip(split.shards, prompts.taken, strict=True)
        for start in range(0, taken, ROWS_PER_PIECE)
    ]
    items = [{"number": number, "piece": piece} for number, piece in enumerate(pieces)]
    rows = ray.data.from_items(items, override_num_blocks=min(len(items), 1024)).map(
        # As JSON: Arrow would want one type for tables whose keys differ from piece to piece.
        lambda row: {"number": row["number"], "found": json.dumps(verify_solutions(row["piece"].pairs(), rewards))}
    )
    found = [json.loads(row["found"]) for row in sorted(rows.take_all(), key=lambda row: row["number"])]
    ids, counts = np.unique(prompts.ids, return_counts=True)
    return SplitReport(
        name=split.name,
        problems=problems,
        lengths=lengths,
        duplicates=problems - len(ids),
        duplicate_ids=tuple(f"{number:016x}" for number in ids[counts > 1][:SHOWN].tolist()),
        **{count: sum(each[count] for each in found) for count in ("verified", "boxed", "formula", "probes")},
        unverifiable=tuple(Unverifiable(**row) for each in found for row in each["unverifiable"]),
        fooled=tuple(AcceptedWrongAnswer(**row) for each in found for row in each["fooled"]),
        kinds=merge_coverage([each["kinds"] for each in found], KINDS),
        topics=merge_coverage([each["topics"] for each in found]),
    )


# Rewards


def _dry_runs(
    rewards: RewardsConfig, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[DryRun, ...]:
    """Run every reward in a task, where a worker's Python path holds and what crashes is not the driver."""
    import ray

    if not problems:
        return ()
    task = ray.remote(num_cpus=0, max_retries=0)(try_reward)
    runs = []
    for index, name in enumerate(rewards.functions):
        try:
            runs.append(ray.get(task.remote(rewards, index, problems, tokenizer)))
        except (ray.exceptions.RayTaskError, ray.exceptions.WorkerCrashedError) as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, RewardError):
                raise RewardError(str(cause)) from None
            said = (str(cause).strip().splitlines() or ["no message"])[0]
            raise RewardError(f"reward {name!r} fails on the first problems: {type(cause).__name__}: {said}") from None
    return tuple(runs)


# What is shown


def print_report(report: AuditReport) -> None:
    """The report as tables: the splits, their kinds and topics, the rows worth a look, rewards, memory."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    # Off a terminal nothing limits the width, and a broken id cannot be searched for.
    console.width = max(console.width, 160) if not console.is_terminal else console.width

    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(*columns)
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))  # a solution such as [0, 1] is no markup
        console.print(escape(title), table, sep="\n", highlight=False)

    both = (report.training, report.heldout)
    lengths = [split.lengths for split in both]
    problems: dict[str, list[object]] = {
        "problems": [f"{s.problems} of {s.name}" for s in both],
        "prompt tokens, 50/90/99 %/max": [f"{x.p50} / {x.p90} / {x.p99} / {x.max}" for x in lengths],
        "leave too little for a completion": [f"{x.over_limit} (over {x.limit} tokens)" for x in lengths],
        "do not fit the context at all": [x.over_context for x in lengths],
        "say again what an earlier row says": [" ".join((str(s.duplicates), *s.duplicate_ids)) for s in both],
        "held-out problems also in training": ["", report.heldout_in_training],
        "solutions held against themselves": [s.verified for s in both],
        "rewarded in a box / in a formula": [f"{s.boxed} / {s.formula}" for s in both],
        "can never be rewarded": [len(s.unverifiable) for s in both],
        "solved by the next row's solution": [f"{len(s.fooled)} of {s.probes}" for s in both],
    }
    show(f"checked in {report.seconds:.0f} s", ["", "training", "held-out"], [[k, *v] for k, v in problems.items()])
    for title, table in (("kind of answer", report.training.kinds), ("topic", report.training.topics)):
        rows = [[k, c.problems, f"{c.verified / c.problems:.1%}", f"{c.seconds * 1e3:.1f}"] for k, c in table.items()]
        if rows:
            show("training solutions", [title, "problems", "verified", "ms a verdict"], rows[:20])
    if never := [[row.id, row.solution, row.reason] for row in report.training.unverifiable[:SHOWN]]:
        show("can never be rewarded", ["id", "solution", "why"], never)
    if fooled := [[row.id, row.solution, row.answer] for row in report.training.fooled[:SHOWN]]:
        show("solved by the next row's solution", ["id", "solution", "next row's"], fooled)
    tried = [[run.reward, run.note or _numbers(run.right), _numbers(run.wrong)] for run in report.rewards]
    show("rewards, tried on the first problems", ["reward", "right completions", "wrong completions"], tried)
    parts, million = report.memory.parts, report.memory.parameters / 1e6
    shares = [
        [f"engine.memory_share on {size} GiB", report.memory.memory_share(size) or "no room"] for size in GPU_SIZES
    ]
    sizes = [[name, f"{value / 2**30:.2f} GiB"] for name, value in parts.items()]
    show(f"memory of one worker, {million:,.1f}M parameters (estimated)", ["", ""], [*sizes, *shares])


def _numbers(values: Sequence[float | None]) -> str:
    return "  ".join("none" if value is None else f"{value:g}" for value in values)
