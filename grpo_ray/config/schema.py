"""The sections of a run's YAML: one frozen dataclass for each, with what every field means and its default."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from grpo_ray.config.validation import check, divides

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run as a whole: its name, where it lies, how it starts again."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str = "arithmetic"
    """Name of the run; its folder is <storage_path>/<name>. The same name again goes on from where the run was. Not
    given, it is made of the names of model and data."""
    storage_path: str = "~/grpo_ray_runs"
    """Where run folders lie: a local path, or s3://, gs:// or NFS that every node of the cluster sees."""
    seed: int = 0
    """Decides the order of problems, every sampled token and the weights of the embedded policy. Whole number."""
    resume: Literal["latest", "best", "never"] = "latest"
    """Checkpoint to go on from when the run exists. "never" starts over and keeps the old run under another name."""
    from_checkpoint: str | None = None
    """Where a run that has no checkpoint of its own begins: a checkpoint of another run, or a run folder, whose best
    one is taken; off (null), from `model.path`."""
    max_failures: int = 3
    """How often a dead worker group is started again from its checkpoint inside one run; -1 without limit. The same
    error at the same step twice ends the run whatever is left of them."""
    best_metric: str = "heldout/accuracy"
    """Metric that ranks checkpoints, higher is better; "reward/mean" ranks by the (noisy) training reward."""
    keep_checkpoints: int = 2
    """How many of the best checkpoints are kept; the latest is kept besides. With 2 there is always one to fall back on
    when the storage spoils another."""
    measure: Literal["inline", "background"] = "inline"
    """How checkpoints are measured on the held-out problems: by the workers' own engines while training waits, or by
    a task of its own beside the training, which needs a free GPU (without GPUs: free cores)."""
    storage_patience: float = 600.0
    """Seconds that storage may be out of reach, or full, before the run gives up; training goes on meanwhile."""
    hang_factor: float = 20.0
    """A step that takes so many times its usual time counts as hanging: the workers' stacks are written to the run
    folder and the worker group starts again."""
    hang_seconds: float = 900.0
    """No step counts as hanging before so many seconds; what the first step of all may take."""
    max_bad_steps: int = 3
    """How many steps in a row may be skipped because loss or gradient is not a finite number."""
    trace: bool = False
    """Write what each worker did when to `trace/` in the run folder, as Chrome traces (ui.perfetto.dev shows them)."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What the run takes of the Ray cluster."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_workers: int | tuple[int, int] = 2
    """Workers, each one process with an engine and a learner. Changing it does not change the mathematics. With
    [least, most] the run takes what the cluster has: fewer when machines are lost, more when some are added."""
    use_gpu: bool = False
    """Give each worker one GPU; off, everything runs on the CPU."""
    cpus_per_worker: int = 1
    """CPU cores that Ray reserves for each worker."""
    threads_per_worker: int | None = None
    """Compute threads of each worker; off (null), a node's cores are shared out among its workers."""
    shard_learner: bool = False
    """Share weights, gradients and optimizer state out among the workers (FSDP2), for a policy too large for one; off,
    each worker has all of them. The engines are not sharded by it: see `grpo.vllm_tensor_parallel_size`."""

    @property
    def max_workers(self) -> int:
        """Most workers that the run may have."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def min_workers(self) -> int:
        """Fewest workers that the run goes on with."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv 2106.09685): it is trained, and the policy's own weights stay as they are."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rank: int = 64
    """Rank of the update of each adapted layer."""
    alpha: int = 128
    """The update counts alpha / rank times."""
    dropout: float = 0.0
    """Share of an adapter's inputs dropped in the forward pass of the loss, 0 (off) to below 1."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Layers with an adapter: "all-linear" for all but the output layer, or names such as [q_proj, v_proj]."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy to start from."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str = "tiny-arithmetic"
    """Hub id, local folder or s3://, gs:// folder of a causal language model; "tiny-arithmetic" is the embedded one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of learner and engine; off (null), bfloat16 with a GPU and float32 without."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole policy: {rank: 64, alpha: 128, dropout: 0.0, target_modules: all-linear},
    or {} for these defaults; off: null. Checkpoints hold the adapter alone; `grpo-ray export` merges it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to train on and to measure with."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    train: str = "arithmetic"
    """A built-in dataset (arithmetic, deepmath, gsm8k), a hub id, or parquet, jsonl, csv files (path, folder, glob or
    URI)."""
    heldout: str | None = "arithmetic"
    """Problems to measure with, as in `train`; off (null), they are cut off `train` by `heldout_share`."""
    heldout_share: float = 0.005
    """Share of the problems, 0 to 1, cut off `train` by a hash of their content when `heldout` is null."""
    limit: int | None = None
    """Use at most so many problems of `train`; off (null), all."""
    heldout_limit: int | None = 600
    """Measure with at most so many problems; off (null), all."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column -> the file's, for files of another shape: {prompt: question, solution: answer}."""
    keep_unverifiable: bool = False
    """Train on problems too whose own solution does not verify; off, those that `grpo-ray check` found are left out."""
    accept_changes: bool = False
    """Go on with a run although its training problems are no longer those that it was begun with."""
    skip_solved: int | None = None
    """Pass over a problem, for an epoch, whose last so many groups were all solved as a whole; off (null), never."""
    prefer_mixed: bool = False
    """Begin each epoch with the problems that were neither always nor never solved so far."""
    system_prompt: str | None = None
    """Put before prompts that have no system message; off: null."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """What completions are paid for."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    functions: tuple[str, ...] = ("correctness",)
    """Reward functions, summed with `grpo.reward_weights`: names of the table, package.module:function, or a reward
    model (a sequence classifier) by folder or hub id."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Function -> its keyword arguments, such as {soft_overlong: {max_length: 2048, buffer: 256}}."""
    strict: bool = True
    """An answer must be an evaluated value of the solution's own kind; off, Math-Verify's plain verdicts."""
    boolean_share: float = 1.0
    """Share of Yes/No/True/False problems that are trained on, 0 to 1: a guess is right half of the time there."""
    time_limit: float = 3.0
    """Seconds that the verdict on one completion may take; past it the completion counts as wrong."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The colocated vLLM engine of each worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    memory_share: float = 0.3
    """Share of one GPU's memory that the engine may hold, 0 to 1. Without a GPU: see `cpu_cache_gib`."""
    cpu_cache_gib: int = 1
    """KV cache of each engine on the CPU, GiB of memory (a whole number, as vLLM takes it)."""
    max_context: int | None = None
    """Longest prompt with completion, in tokens; off (null), what the model's config allows."""
    logprob_tolerance: float | None = None
    """Largest mean gap, in nats, between the engine's log-probabilities and the learner's after a weight sync, past
    which the run stops; off (null), 0.001 in float32 and 0.05 in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The algorithm. Sizes are global: worker counts and memory never change what a step is.

    Every other field of `trl.GRPOConfig` may stand in this section too, under TRL's name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    prompts_per_step: int = 16
    """Problems of one optimizer step, over all workers."""
    num_generations: int = 8
    """Completions of each problem: the group in which rewards are compared."""
    micro_batch_size: int | None = None
    """Completions of one forward and backward pass, over all workers; off (null), the whole step at once, and without
    a GPU as few long completions as fill a pass."""
    max_steps: int = 200
    """Optimizer steps of the run."""
    save_steps: int = 50
    """Steps between checkpoints; held-out problems are measured at each, and at the last step."""
    logging_steps: int = 1
    """Steps between metric reports."""
    learning_rate: float = 1e-6
    """Peak learning rate of the optimizer."""
    max_completion_length: int = 256
    """Longest completion, in tokens."""
    exact_savings: bool = True
    """Leave out work of the learner whose result is known beforehand; the gradient is the same without it."""
    dynamic_sampling: int = 0
    """How often a step may draw as many problems again to replace groups without signal, whose rewards are all equal
    (DAPO, arXiv 2503.14476): the step is taken on the first `prompts_per_step` groups with signal, and filled up with
    others where they are too few. Problems are used up faster. Changes the gradient; off: 0."""
    generate_ahead: bool = False
    """Generate the next step's completions while the learner works on this step's, with weights one step old. Changes
    the gradient; off, each step generates with the newest weights."""
    trl: Mapping[str, Any] = field(default_factory=dict)
    """Not written as such in the YAML: what the section holds under TRL's own names."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. The same YAML, overrides included, gives the same run on any cluster."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)

    def __post_init__(self) -> None:
        check(self)

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimizer step, over all workers."""
        return self.grpo.prompts_per_step * self.grpo.num_generations

    @property
    def micro_batch_size(self) -> int:
        """Completions of one forward and backward pass, over all workers."""
        return self.grpo.micro_batch_size or self._short_pass

    @property
    def _short_pass(self) -> int:
        """The whole step; on the CPU as little of it as fills a pass: the learner puts completions of similar length
        into one, and reads the less padding the more passes there are."""
        step, cluster = self.completions_per_step, self.cluster
        if cluster.use_gpu or self.grpo.trl.get("loss_type") == "bnpo":  # which divides by the tokens of a pass
            return step
        counts = [n for n in range(cluster.min_workers, cluster.max_workers + 1) if self.grpo.prompts_per_step % n == 0]
        fills = cluster.max_workers * FILLS_A_PASS / self.grpo.max_completion_length
        each = math.lcm(1, *counts)
        return next((n for n in range(each, step, each) if n >= fills and step % n == 0), step)

    @property
    def prompts_per_worker(self) -> int:
        """Problems that each worker draws for one step."""
        return self.grpo.prompts_per_step // self.cluster.max_workers

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers that the run may have: those in its range that divide the step (law 1)."""
        return [n for n in range(self.cluster.min_workers, self.cluster.max_workers + 1) if divides(n, self)]

    def with_workers(self, count: int) -> "Config":
        """The same run with a fixed number of workers, as it is at one time."""
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, num_workers=count))

    @property
    def num_iterations(self) -> int:
        """Optimizer steps on each batch of completions (TRL's field; 1 is on-policy)."""
        return int(self.grpo.trl.get("num_iterations", 1))

    @property
    def dtype(self) -> str:
        """Precision of learner and engine."""
        return self.model.dtype or ("bfloat16" if self.cluster.use_gpu else "float32")

    def to_dict(self) -> dict[str, Any]:
        """The config in the YAML's own shape: TRL's fields back in `grpo`, lists and dicts only."""
        plain = TypeAdapter(Config).dump_python(self)
        plain["grpo"] |= plain["grpo"].pop("trl")
        plain["rewards"]["functions"] = list(plain["rewards"]["functions"])
        if not isinstance(self.cluster.num_workers, int):
            plain["cluster"]["num_workers"] = list(self.cluster.num_workers)
        if self.model.lora and not isinstance(self.model.lora.target_modules, str):
            plain["model"]["lora"]["target_modules"] = list(self.model.lora.target_modules)
        return plain


FILLS_A_PASS = 1024
"""Tokens of completions, each as long as it may be, that keep a CPU worker busy in a pass. Measured on 20 million
parameters with completions of up to 256 tokens: 4 rows in a pass take 0.6 of the time that 16 take."""


SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
"""Section of the YAML -> its dataclass."""
