"""Schema of a run's YAML: one frozen dataclass per section, with type, range, default and meaning of every field.

Types and ranges are pydantic annotations; rules across fields are in `checks.py`, and sizes that follow from the fields
in `sizes.py`. The docstring below a field is its help text in `grpo-ray train --help` and in docs/configuration.md.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from grpo_ray.config.absolute_paths import with_absolute_paths
from grpo_ray.config.benchmarks import benchmark_score, find_benchmark
from grpo_ray.config.checks import check_across_fields, check_advantages
from grpo_ray.config.fields import VALUES, describe_errors, field_descriptions, type_adapter, unknown_key_message
from grpo_ray.config.heldout_keys import AUTO, heldout_keys, heldout_label, primary_key, ranking_metric
from grpo_ray.config.peft_fields import check_peft_settings
from grpo_ray.config.reward_names import SOLUTION_REWARDS, derived_score, is_reward_model
from grpo_ray.config.sampling import SamplingOptions, StructuredOutputs, sampling_options
from grpo_ray.config.sizes import Sizes
from grpo_ray.config.sources import HeldoutSource, TrainingSource, heldout_sources, training_sources
from grpo_ray.config.tool_paths import is_remote, uses_python_tool
from grpo_ray.config.trl_fields import PASSED, effective_value, find_mistake, trl_fields
from grpo_ray.config.vllm_fields import check_vllm_fields
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import known_secrets, redact_settings, remember_secrets

STRICT = ConfigDict(extra="forbid", revalidate_instances="always", allow_inf_nan=False)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]
"""Time in seconds up to 115 days; the operating system's timers overflow far above that."""

Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=1)]

TRL_KEYS = tuple(f"grpo.{name}" for name in PASSED)
"""Keys of the YAML that are passed to TRL."""


FORMER_KEYS = {"grpo.generate_ahead": "set rollout.max_staleness=1 in place of true, and 0 in place of false"}
"""Key of earlier versions -> its replacement."""

STALE_CORRECTION = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
"""Fields of TRL that correct the loss for tokens of older weights, unless the user chooses a mode."""


def unknown_key(key: str) -> str:
    """Return the error message for an unknown key of the YAML, with the known key that was probably meant."""
    if replacement := FORMER_KEYS.get(key):
        return f"unknown key {key}; {replacement}"
    return unknown_key_message(key, [*field_descriptions(Config), *TRL_KEYS])


def check_trl_fields(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the fields of TRL in the section `grpo`, each on its own.

    Raises:
        ConfigError: a field is unknown, derived, refused, or has a value that is not allowed; one line per field.
    """
    mistakes = [
        find_mistake(name, value) if name in trl_fields() else unknown_key(f"grpo.{name}")
        for name, value in settings.items()
    ]
    if any(mistakes):
        raise ConfigError("\n".join(filter(None, mistakes)))
    return settings


FolderName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        json_schema_extra={VALUES: "letters, digits, '.', '_' and '-', beginning with a letter or digit"},
    ),
]

AbsoluteFolder = Annotated[
    str,
    # A relative path would be ambiguous: each worker has its own working folder.
    Field(pattern=r"^[~/]", json_schema_extra={VALUES: "an absolute path, beginning with / or ~"}),
]

HeldoutSets = Annotated[
    Mapping[FolderName, str],
    Field(
        min_length=1,
        json_schema_extra={
            VALUES: "a non-empty mapping from names to datasets (in a name: letters, digits, '.', '_' and '-')"
        },
    ),
]


WarningName = Literal[
    "no_signal",
    "low_diversity",
    "reward_stuck",
    "reward_fallen",
    "length_growth",
    "truncation",
    "high_kl",
    "ratio_drift",
    "clipping",
    "entropy_collapse",
    "gradient_growth",
    "skipped_steps",
    "verifier_timeouts",
    "unscorable",
    "sync_gap",
    "data_wait",
    "memory",
]
"""Names of the warnings: the thresholds in the section `health`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, storage, restarts and failure limits of the run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: FolderName = "arithmetic"
    """Name of the run; the run folder is `<storage_path>/<name>`. Starting the same name again resumes the run. If not
    given, it is derived from `model.path` and `data.train`."""
    storage_path: str = "~/grpo_ray_runs"
    """Parent of all run folders: a local path, an NFS path, or an s3:// or gs:// URI. On a cluster, every node must be
    able to read and write it."""
    kind: Literal["grpo", "sft"] = "grpo"
    """Objective. "grpo": rewards of sampled completions. "sft": supervised fine-tuning on demonstrations, rows of
    `data.train` with a column `completion`; a step has `grpo.prompts_per_step` of them, and held-out problems are
    measured as with "grpo" (see experiments.md)."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the problem order and of every sampled token."""
    resume: Literal["latest", "best", "never"] = "latest"
    """Checkpoint from which an existing run continues. "never" starts from the beginning and keeps the old run folder
    under another name."""
    takeover: str | None = None
    """Id of a running driver from which the new driver takes over this run; the error that refuses a second driver
    contains it. An id names one driver only, so the field has no effect on later ones. null (off): refuse."""
    from_checkpoint: str | None = None
    """Checkpoint that a run without checkpoints of its own begins with: a checkpoint of another run, or a run folder,
    whose best checkpoint is used. Policy, optimizer state and used problems are taken over; steps and schedule begin at
    0. null (off): begin with `model.path`."""
    pause_at: PositiveInt | None = None
    """Step after which the run is saved, measured and ended, although steps are left: the schedule and everything else
    depend on `grpo.max_steps`. The same command with a later step, or without the field, continues the run as if it had
    not been paused. null: off."""
    max_failures: Annotated[int, Field(ge=-1)] = 3
    """Number of times that a failed worker group is restarted from its checkpoint; -1: no limit. The same error at the
    same step twice ends the run regardless of this limit."""
    best_metric: str = "heldout/accuracy"
    """Metric that ranks checkpoints; higher is better. One of "heldout/accuracy", "heldout/low" (lower end of its
    interval), the same of a named set ("heldout/<name>/accuracy"), "reward/mean" (the training reward, which is noisy),
    and "reward/<name>_mean" of a reward function."""
    keep_checkpoints: PositiveInt = 2
    """Number of best checkpoints to keep, in addition to the latest one. With 2 or more, a checkpoint remains to fall
    back on when storage corrupts another."""
    measure: Literal["inline", "background"] = "inline"
    """Place where checkpoints are evaluated on the held-out problems: "inline" uses the workers' engines while training
    waits; "background" uses a separate engine during training, which takes `grpo.vllm_tensor_parallel_size` GPUs
    (with dedicated engines: `engine.tensor_parallel_size`) in addition to those of the run (without GPUs:
    `cluster.cpus_per_worker` cores)."""
    storage_retry_seconds: Seconds = 600.0
    """Time in seconds for which operations on unreachable or full storage are retried before the run stops. Training
    continues meanwhile."""
    hang_factor: Annotated[float, Field(gt=1, le=10_000)] = 20.0
    """Factor of the hang limit: a step, a measurement or a checkpoint counts as hanging after a pause longer than this
    factor times its usual longest pause between two signs of progress, and longer than `run.hang_seconds`."""
    hang_seconds: Seconds = 900.0
    """Minimum time in seconds without progress of any worker before training counts as hanging. Progress is a step of
    an engine (one token), a micro-batch, the start or end of a phase, or bytes of a checkpoint, so that neither the
    length of completions nor the size of the model or of the held-out set matters. The workers' stacks are then
    written to the run folder and the worker group restarts. Off: the largest value."""
    max_bad_steps: NonNegativeInt = 3
    """Number of consecutive steps that may be skipped because loss or gradient is not finite; one more stops the
    run."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Experiment trackers to which the driver sends the run: tensorboard (event files in the run folder), wandb,
    mlflow, trackio. Each tracker shows one run, across all restarts and resumes (tracking.md). []: off."""
    group: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Group of the run in W&B, and a tag in the other trackers; `grpo-ray sweep` sets it to the name of the sweep.
    null: no group."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project of the run in W&B and Trackio, and experiment in MLflow. null (derived): WANDB_PROJECT, or
    MLFLOW_EXPERIMENT_NAME, or else "grpo_ray"."""
    trace: bool = False
    """Write a timeline of each worker to `trace/` in the run folder, as Chrome traces (open them in ui.perfetto.dev).
    false: off."""
    stop_on: tuple[WarningName, ...] = ()
    """Warnings (fields of the section `health`) that end the run: the current step is finished and saved, and the
    command returns 3. []: off."""
    notify: str | None = None
    """Web address (http:// or https://) to which warnings, failures and the end of the run are posted as JSON, such as
    the webhook of a chat; see health.md. It is treated as a secret. null: off."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Resources that the run takes from the Ray cluster."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_workers: PositiveInt | tuple[PositiveInt, PositiveInt] = 2
    """Number of workers; each is one process with an engine and a learner. The number does not change the training
    mathematics. [min, max]: elastic, the run shrinks when machines are lost and grows when machines are added."""
    use_gpu: bool = False
    """Give each worker one GPU. false: run everything on the CPU."""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that Ray reserves for each worker."""
    threads_per_worker: PositiveInt | None = None
    """Compute threads of each worker. null (derived): a node's cores divided by its number of workers."""
    shard_learner: bool = False
    """Shard weights, gradients and optimizer state across the workers (FSDP2), for a policy too large for one GPU.
    false: every worker holds all of them. Engines are not sharded by this; see `grpo.vllm_tensor_parallel_size`."""

    @property
    def max_workers(self) -> int:
        """Largest number of workers that the run may have."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def min_workers(self) -> int:
        """Smallest number of workers with which the run continues."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapter (LoRA, arXiv 2106.09685): only the adapter is trained, the policy's own weights are frozen."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rank: PositiveInt = 64
    """Rank of each adapted layer's update."""
    alpha: PositiveInt = 128
    """Scale of the update, which is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's inputs in the forward pass of the loss. 0: off."""
    target_modules: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers that get an adapter: "all-linear" for all linear layers except the output layer, or a list of names such
    as [q_proj, v_proj]."""

    @property
    def peft(self) -> Mapping[str, Any]:
        """The same adapter in the form of `model.peft`."""
        modules = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return {
            "type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": modules,
        }


@dataclass(frozen=True, kw_only=True)
class AdapterOptimizerConfig:
    """Optimizer of PEFT for LoRA."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Literal["loraplus", "lorafa"]
    """"loraplus" (LoRA+, arXiv 2402.12354): a learning rate of its own for the second matrix of each update, with the
    optimizer of `grpo.optim`. "lorafa" (LoRA-FA, arXiv 2308.03303): only the second matrix is trained, by AdamW with a
    corrected gradient."""
    ratio: Annotated[float, Field(ge=1)] = 16.0
    """LoRA+: learning rate of the second matrix, divided by that of the first, `grpo.learning_rate`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Initial policy."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str = "tiny-arithmetic"
    """Causal language model: hub id, local folder, or s3:// or gs:// folder. "tiny-arithmetic", "tiny-tools" (calls
    a tool), "tiny-guess" (plays a game) and "tiny-mixture" (arithmetic and the game) are embedded policies."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of learner and engine. null (derived): bfloat16 with GPUs, float32 without."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; enable it only for sources that you trust. false: off."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter instead of the whole policy: {rank: 64, alpha: 128, dropout: 0.0, target_modules:
    all-linear}, or {} for these defaults. null: off. Checkpoints hold only the adapter; `grpo-ray export` merges it
    into the policy."""
    peft: Annotated[Mapping[str, Any], AfterValidator(check_peft_settings)] | None = None
    """Train an adapter of any type that PEFT can merge: {type: LORA, r: 16, use_dora: true}, {type: OFT}, ... with the
    fields of the type's config in PEFT (see docs/adapters.md). `target_modules` is "all-linear" by default. null: off.
    `model.lora` is the short form of {type: LORA}."""
    adapter_optimizer: AdapterOptimizerConfig | None = None
    """Optimizer of PEFT for LoRA: {name: loraplus, ratio: 16} or {name: lorafa}. null: that of `grpo.optim`."""
    quantization: Literal["nf4", "int4"] | None = None
    """Keep the frozen weights of linear layers in four bits, under an adapter (QLoRA). "nf4": the learner's, in the
    format of bitsandbytes; the engine has the same weights in `model.dtype`. "int4": one format that learner and engine
    both read, with LoRA. null: off."""
    share_base: bool = False
    """Keep one copy of the frozen weights on each GPU, that of the engine, which the learner reads too, with
    `engine.adapter=request`. false: off."""

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """The adapter that is trained, in the form of `model.peft`; None if the whole policy is."""
        return self.peft if self.lora is None else self.lora.peft


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture: a dataset, its share of each step, and what applies to its problems."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str
    """Dataset, in the forms of `data.train`."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Weight of the source: its share of the problems is the weight divided by the sum of all weights."""
    rewards: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Entries of `rewards.functions` that apply to the source's problems; the others are None there. null: all."""
    environment: str | None = None
    """Name of the environment in `rollout.environment` in which the source's problems are solved. null (derived): the
    column `environment` of a row, or none."""
    system_prompt: str | None = None
    """System message for the source's prompts that have none. null: `data.system_prompt`."""
    columns: Mapping[str, str] | None = None
    """Column names of the source's files. null: `data.columns`."""
    limit: PositiveInt | None = None
    """Maximum number of the source's problems to use. null: `data.limit`."""


def check_sources(train: Any) -> Any:
    """Check each source of a mixture on its own, so that an error names source and field; other values pass unchanged.

    Raises:
        ValueError: a source has an unknown key, no `path`, or a value that is not allowed; one line per mistake.
    """
    if not isinstance(train, Mapping):
        return train
    mistakes: list[str] = []
    for name, source in train.items():
        field = f"data.train.{name}"
        if isinstance(source, Mapping) and "path" not in source:
            known = [*field_descriptions(SourceConfig)]
            wrong = [unknown_key_message(str(key), known) for key in source if key not in known]
            mistakes.append(
                f"{field} must have a `path`, the source's dataset" + "".join(f"; {each}" for each in wrong)
            )
        elif isinstance(source, Mapping):
            try:
                type_adapter(SourceConfig).validate_python(source)
            except ValidationError as error:
                lines = describe_errors(error, SourceConfig, source).splitlines()
                start = "unknown key "
                mistakes += [
                    f"{start}{field}.{line.removeprefix(start)}" if line.startswith(start) else f"{field}.{line}"
                    for line in lines
                ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return train


Mixture = Annotated[
    Mapping[FolderName, SourceConfig],
    Field(
        min_length=1,
        json_schema_extra={
            VALUES: "a non-empty mapping from names to sources, each with `path` (in a name: letters, digits, '.', '_' "
            "and '-')"
        },
    ),
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and held-out problems."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    train: Annotated[str | Mixture, BeforeValidator(check_sources)] = "arithmetic"
    """Training problems: a built-in dataset, such as arithmetic or deepmath (data.md lists them), a hub id, or parquet,
    jsonl or csv files (path, folder, glob or URI). Several datasets at once: a mixture, a mapping from names to
    sources, such as {math: {path: deepmath, weight: 3}, games: {path: guessing, rewards: [environment]}}."""
    heldout: str | HeldoutSets | None = AUTO
    """Problems for evaluation, in the same forms as `train`. Several sets: a mapping from names to datasets, such as
    {math: data/math.jsonl, gsm8k: gsm8k}; the first one ranks checkpoints unless `run.best_metric` names another.
    "auto": the held-out split of a built-in `train`, or a part of any other `train`, which is not trained on. null:
    always a part of `train`. With a mixture, "auto" and null give a set for each source, under its name."""
    heldout_share: Fraction | None = None
    """Fraction of the problems that is split off `train`, by a hash of their content, when a part of it is held out.
    null (derived): 0.05, but at most about 500 problems; 0.005 when `heldout` is null."""
    limit: PositiveInt | None = None
    """Maximum number of problems of `train` to use, of each source in a mixture. null (off): all."""
    heldout_limit: PositiveInt | None = 600
    """Maximum number of held-out problems to evaluate, in each set. null (off): all."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names for files of another shape, from ours to the file's: {prompt: question, solution: answer}.
    {}: off."""
    max_prompt_length: PositiveInt | None = None
    """Maximum length of a prompt in tokens, with the chat template. null (derived): the engine's context
    (`engine.max_model_len`, or the limit in the model's config) minus `grpo.max_completion_length`."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Reaction to longer prompts. "drop": leave them out of training and evaluation, and list them in `overlong.json`
    of the run folder. "error": refuse the run."""
    keep_unverifiable: bool = False
    """Train also on problems whose own solution does not verify. false: leave out those that `grpo-ray check` found."""
    accept_changes: bool = False
    """Resume a run even though its training problems have changed since it began. false: refuse."""
    skip_solved: PositiveInt | None = None
    """Skip a problem for an epoch if every completion of its last N groups was correct; this field is N. null: off."""
    prefer_mixed: bool = False
    """Begin each epoch with the problems whose completions so far were neither all correct nor all wrong. false:
    off."""
    system_prompt: str | None = None
    """System message for prompts that have none. null: off."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Reward functions and how completions are graded."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    functions: Annotated[tuple[str, ...], Field(min_length=1)] = ("correctness",)
    """Reward functions, summed with the weights `grpo.reward_weights`: names of built-in functions,
    package.module:function, or reward models (sequence classifiers) by folder or hub id."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword arguments of each function, such as {soft_overlong: {max_length: 2048, buffer: 256}}."""
    strict: bool = True
    """Require an answer to be an evaluated value of the same kind as the solution. false: use Math-Verify's verdicts
    unchanged."""
    boolean_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the Yes/No/True/False problems to train on; a guess at these is right half of the time. 1: all,
    0: none."""
    time_limit: Annotated[float, Field(gt=0, le=3600)] = 3.0
    """Time limit in seconds for grading one completion; at the limit the completion counts as wrong."""
    isolate: bool = False
    """Run your own functions (package.module:function) in processes of their own, without a GPU: one that hangs, exits
    or raises an error gives None, counted in reward/failed_share, and the run goes on."""
    isolate_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Time limit in seconds for one call with `rewards.isolate`."""
    isolate_memory_gib: Annotated[float, Field(ge=0.25)] | None = None
    """Memory limit in GiB with `rewards.isolate`: address space of each process. null: none."""
    model_gpus: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of one GPU for the process that holds all reward models, with `cluster.use_gpu`. Up to 0.45: on the GPU of
    a worker, beside its engine and learner. 1: a GPU of its own, beside those of the workers. 0: on the CPU."""

    @property
    def models(self) -> list[str]:
        """The reward models among the functions."""
        return list(filter(is_reward_model, self.functions))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Age of the weights that sample completions (see dedicated-engines.md), and completions of several turns: tools,
    environments, or a function of your own (see tools-and-environments.md)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    max_staleness: NonNegativeInt = 0
    """Largest number of optimizer steps by which the weights that sampled a token may be older than those trained on
    it, k. While the learner takes a step, the engine samples for the next k steps, each completion at most
    ceil(`grpo.max_completion_length` / k) tokens, or with tools an equal part of `rollout.max_turns`; nothing is
    dropped. Changes the gradient. 0: sample each step's completions with the newest weights, while the learner
    waits."""
    anchor: Literal["proximal", "behaviour"] = "proximal"
    """Old policy of the loss with `max_staleness` above 0, by whose ratio the loss clips. "proximal": the weights that
    the step begins with; the importance ratio corrects for the age of a token (decoupled PPO). "behaviour": the weights
    that sampled the token; the importance ratio is 1."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, as package.module:function, with type hints and a docstring. []: none."""
    environment: str | Mapping[str, str] | None = None
    """Class of the environment of each completion, as package.module:class: its public methods are tools. Several are
    given by names, {game: package.module:Game}, and the column `environment` of a problem chooses one. null (off)."""
    function: str | None = None
    """Function of your own that samples completions, as package.module:function, in place of `tools` and `environment`.
    It makes requests to the engine and returns the tokens to train on. null (off)."""
    structured_outputs: StructuredOutputs | None = None
    """Form of all completions, by which engine and learner exclude tokens: one of {regex: TEXT}, {json: SCHEMA},
    {choice: [TEXTS]} and {grammar: TEXT}. See rewards-and-grading.md. null (off)."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword arguments of each environment's constructor, and of the function, by the path in `environment` or
    `function`."""
    max_turns: PositiveInt = 8
    """Largest number of turns of the policy in one completion."""
    max_calls: PositiveInt = 16
    """Largest number of tool calls made in one turn. After a call without a result, the turn's remaining calls are not
    made."""
    max_active: PositiveInt = 256
    """Largest number of completions that a worker samples at a time; each of them may have a process. With
    `max_staleness` of 2 and more, completions that later steps continue keep theirs besides."""
    time_limit: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time limit in seconds for one call of a tool, and one reset, step or reward of an environment."""
    memory_gib: Annotated[float, Field(ge=0.25)] = 1.0
    """Memory limit in GiB: address space of each process in which tools run, and total memory in use by all processes
    of one completion, both beyond that of imported modules."""
    max_processes: PositiveInt = 32
    """Largest number of processes that the tools of one completion may have at a time."""
    disk_gib: Annotated[float, Field(gt=0)] = 1.0
    """Disk limit in GiB: size of each file, and space of all files in the working folders of one completion."""
    max_files: PositiveInt = 10_000
    """Largest number of files and folders in the working folders of one completion."""
    variables: tuple[str, ...] = ()
    """Environment variables with secrets that your modules read while they are imported. Others with a secret's name or
    value, such as HF_TOKEN, are not passed to the processes of tools."""
    isolation: Literal["required", "best", "none"] = "required"
    """Confinement of the code that the policy writes for the Python tool: no network, no files but its own folder, no
    other processes. "required" refuses a run whose machines cannot confine it, "best" runs it there unconfined, with
    a notice, and "none" never confines it. See security.md; for your own tools, `confine`."""
    confine: bool = False
    """Confine your own tools and environments like the code of the Python tool: no network, and no files except
    importable modules and their own folder."""
    sandbox_url: str | None = None
    """Address (http:// or https://) of the remote sandbox in which the tool `grpo_ray.tools.remote_python:python` runs
    code; see tools-and-environments.md. null: none."""
    sandbox_provider: str = "sandbox_fusion"
    """Kind of the remote sandbox: sandbox_fusion, or package.module:Class of a client of your own."""
    sandbox_token_variable: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
                json_schema_extra={VALUES: "the name of an environment variable, not the token itself"},
            ),
        ]
        | None
    ) = None
    """Environment variable with the token of the remote sandbox, which is sent over https, or to this machine, only. It
    must be set on every machine with workers. null: no token is sent."""
    max_result_tokens: PositiveInt = 512
    """Largest number of tokens of one result that the policy reads; the middle of a longer one is left out."""

    @property
    def runs_policy_code(self) -> bool:
        """True if processes have to be confined: completions can call the Python tool, or `confine` is set."""
        return self.confine or uses_python_tool(self.tools)

    @property
    def uses_remote_python(self) -> bool:
        """True if the policy can run code in the remote sandbox."""
        return any(map(is_remote, self.tools))

    @property
    def environments(self) -> Mapping[str | None, str]:
        """Name of each environment -> its path; the name is None if `environment` is a single path."""
        if isinstance(self.environment, str):
            return {None: self.environment}
        return {name: path for name, path in (self.environment or {}).items()}

    @property
    def has_turns(self) -> bool:
        """True if completions may use tools or an environment."""
        return bool(self.tools or self.environments)

    @property
    def has_conversations(self) -> bool:
        """True if completions may have several turns: with tools, an environment, or a function of the user's own."""
        return self.has_turns or self.function is not None


DEFAULT_LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Default of `engine.logprob_tolerance` by dtype of the engine, nats: an upper bound of rounding alone, with a margin.
Measured with the embedded policy in float32 and the right weights: 4e-7."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """vLLM engines: one in each worker, or dedicated ones on their own GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    placement: Literal["colocated", "dedicated"] = "colocated"
    """Place of the engines. "colocated": in each worker, on its GPU. "dedicated": in processes and on GPUs of their
    own, `replicas` x `tensor_parallel_size` of them beside those of the workers (see dedicated-engines.md)."""
    replicas: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Number of dedicated engines. [least, most]: elastic; the run begins with the least, and engines join and leave as
    nodes do. The completions depend on the largest number, and not on how many engines run."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that each dedicated engine spans, on one node. Colocated engines: see `grpo.vllm_tensor_parallel_size`."""
    transport: Literal["object_store", "nccl"] | None = None
    """Way of the weights to dedicated engines: "object_store" copies them through the machines' memory; "nccl" sends
    them from GPU to GPU, after a first version through the object store. null (derived): "object_store"."""
    gpu_memory_utilization: Fraction | None = None
    """Fraction of one GPU's memory reserved for the engine. Without GPUs it has no effect; see `cpu_cache_gib`. null
    (derived): 0.3 for a colocated engine, 0.9 for a dedicated one."""
    cpu_cache_gib: PositiveInt = 1
    """Size in GiB of each engine's KV cache when it runs on the CPU; an integer, because vLLM requires one."""
    max_model_len: PositiveInt | None = None
    """Maximum length in tokens of a prompt together with its completion. null (derived): the limit in the model's
    config."""
    logprob_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Maximum mean difference, in nats, between the log-probabilities of engine and learner after a weight sync; a
    larger difference stops the run. null (derived): 0.001 in float32, 0.05 in 16-bit precision."""
    adapter: Literal["merge", "request"] | None = None
    """Form in which the engine gets the adapter of `model.lora` or `model.peft`: "merge" adds it to the weights that
    each sync sends; "request" sends the frozen weights once, and then the adapter alone, which vLLM applies as a LoRA
    request (for LoRA and rsLoRA; see adapters.md). null (derived): "request" with
    `model.quantization=int4` or `model.share_base`, otherwise "merge"."""
    compile_cache: AbsoluteFolder | None = None
    """Folder on each node for the code that vLLM compiles while an engine starts (its VLLM_CACHE_ROOT). Set it to a
    folder that survives restarts if the home folder does not, as in a container; a shared folder works too. Later
    engines with the same model, sizes and versions then start without compiling. null: vLLM's default,
    ~/.cache/vllm."""
    vllm: Annotated[Mapping[str, Any], AfterValidator(check_vllm_fields)] = field(default_factory=dict)
    """Further arguments of vLLM's engine (`EngineArgs`), for training and evaluation alike, such as {kv_cache_dtype:
    fp8, max_num_batched_tokens: 8192}. {}: off."""

    @property
    def is_dedicated(self) -> bool:
        """True if the engines run in processes of their own."""
        return self.placement == "dedicated"

    @property
    def replica_range(self) -> tuple[int, int]:
        """Fewest and most dedicated engines."""
        return (self.replicas, self.replicas) if isinstance(self.replicas, int) else self.replicas


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The algorithm. Sizes are global: neither the number of workers nor memory changes the content of a step.

    Fields of `trl.GRPOConfig` can be set in this section too, under TRL's name; see the table below.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    prompts_per_step: PositiveInt = 16
    """Problems of one optimizer step, over all workers. Must be a multiple of `cluster.num_workers`."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of each problem. They are the group in which rewards are compared, so there must be at least two."""
    steps_per_generation: PositiveInt = 1
    """Optimizer steps for each generation batch, which has `steps_per_generation` x `prompts_per_step` problems: each
    step uses the groups of the next `prompts_per_step` problems, in the order in which they were drawn. Changes the
    gradient: all but the first step are off-policy. TRL's field of this name counts micro-batches instead. 1: off."""
    epochs: PositiveInt = 1
    """Number of passes over the optimizer steps of each generation batch (TRL's `num_iterations`). `max_steps`
    and `save_steps` count optimizer steps and must be multiples of `steps_per_generation` x `epochs`. 1: off."""
    micro_batch_size: PositiveInt | None = None
    """Largest number of completions in one forward and backward pass, over all workers. null (derived): with GPUs, as
    many as `tokens_per_micro_batch` allows; without GPUs, the smallest part of the step that keeps the workers busy."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Largest number of token positions that a worker reads in one forward pass: prompts, completions and the remaining
    padding. Each pass takes as many completions of similar length as fit, so that memory is bounded at any length. Set
    this or `micro_batch_size`. null (derived): with GPUs, the largest number that fits according to the memory estimate
    (gpu-memory.md), but the whole step with `loss_type=bnpo` or a router's loss; without GPUs, no limit."""
    max_steps: PositiveInt = 200
    """Optimizer steps of the run."""
    save_steps: PositiveInt = 50
    """Steps between checkpoints. Held-out problems are evaluated at each checkpoint and after the last step."""
    logging_steps: PositiveInt = 1
    """Steps between metric reports. Steps with a checkpoint and the last step are reported too. A report has the means
    of the steps since the last one."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of the optimizer."""
    max_completion_length: PositiveInt = 256
    """Maximum length of a completion in tokens."""
    advantages: Annotated[str, AfterValidator(check_advantages)] = "grpo"
    """Function that turns the rewards of a step's groups into advantages. grpo: TRL's, with its settings
    `scale_rewards` and `multi_objective_aggregation`. rloo: the reward minus the mean of the group's other rewards
    (arXiv 2402.14740). dr_grpo: the reward minus the group's mean, not scaled (arXiv 2503.20783). reinforce_pp: the
    reward minus the step's mean, divided by its standard deviation (arXiv 2501.03262). package.module:function: your
    own; see development.md."""
    exact_savings: bool = True
    """Skip learner work that cannot change the gradient. false: do all of it; the gradient is the same."""
    dynamic_sampling: NonNegativeInt = 0
    """Number of times that a step may draw `prompts_per_step` further problems to replace groups without signal, whose
    rewards are all equal (DAPO, arXiv 2503.14476). The step uses the first `prompts_per_step` groups with signal, and
    groups without signal if there are too few. Changes the gradient, and consumes an epoch's problems faster.
    0: off."""
    trl: Annotated[Mapping[str, Any], AfterValidator(check_trl_fields)] = field(default_factory=dict)
    """Fields of the section under TRL's names. Not a field of the YAML itself: the loader collects it."""


@dataclass(frozen=True, kw_only=True)
class HeldoutConfig:
    """Measuring on held-out problems, at checkpoints and with `grpo-ray eval`.

    Prompts and all other sampling options are those of training.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature. 0: greedy, the most probable token each time."""
    num_samples: PositiveInt = 1
    """Completions of each held-out problem. With more than one, `temperature` must be above 0."""
    score: str | None = None
    """Score of a held-out completion, of which `<set>/accuracy` is the mean: "correctness"; "environment", the reward
    of the completion's environment, limited to 0 to 1; "reward", the weighted sum of `rewards.functions`; "choice" or
    "code_tests", the rewards of these names; or a reward function of your own, package.module:function. null (derived):
    correctness or environment, if `rewards.functions` has it (in this order), else reward. A benchmark has a score
    of its own."""


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Thresholds of the warnings during a run; see health.md. A warning without a threshold (null) is off.

    Thresholds are compared with the mean over the latest `health.window` logging steps, or with their median where a
    metric has outliers. First values are those of the run, not of an attempt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    window: Annotated[int, Field(ge=2, le=1000)] = 10
    """Number of latest logging steps whose mean or median is compared with a threshold."""
    no_signal: Share | None = 0.9
    """Largest share of groups whose rewards are all equal, so that they have no gradient."""
    low_diversity: Share | None = 0.02
    """Smallest share of distinct completions within a group (`group/distinct_share`)."""
    reward_stuck: PositiveInt | None = 200
    """Number of optimizer steps, from the first, within which the training reward must rise measurably: its mean over
    the latest 5 windows must exceed that over the first 5 by more than the standard error of the difference. Off with
    `data.skip_solved` and `data.prefer_mixed`, which change the difficulty of the problems."""
    reward_fallen: Annotated[float, Field(gt=0)] | None = 0.5
    """Largest fall of the training reward from its highest mean over a window (the first half window counts too), in
    standard deviations of the first completions' rewards. Off in the same cases as `reward_stuck`."""
    length_growth: Factor | None = 2.0
    """Largest mean length of completions as a multiple of the first, once it exceeds half of
    `grpo.max_completion_length`."""
    truncation: Share | None = 0.2
    """Largest share of completions cut off at `grpo.max_completion_length`."""
    high_kl: Annotated[float, Field(gt=0)] | None = 0.5
    """Largest median divergence from the reference policy, nats per token; measured with `grpo.beta` above 0 only."""
    ratio_drift: Annotated[float, Field(gt=0)] | None = 0.3
    """Largest median distance from 1 of the importance ratio of learner to engine (`engine/ratio_mean`)."""
    clipping: Share | None = 0.5
    """Largest share of tokens whose ratio left the trust region, so that they have no gradient."""
    entropy_collapse: Share | None = 0.1
    """Smallest entropy of the policy as a share of the first."""
    gradient_growth: Factor | None = 10.0
    """Largest median norm of the gradient as a multiple of the first."""
    skipped_steps: NonNegativeInt | None = 0
    """Largest number of steps skipped within a window because loss or gradient was not finite."""
    verifier_timeouts: Share | None = 0.05
    """Largest share of completions whose verdict hits a time or memory limit."""
    unscorable: Share | None = 0.05
    """Largest share of completions without a score, because the reference solution cannot be parsed, or because the
    environment was lost or the remote sandbox was unreachable."""
    sync_gap: Annotated[float, Field(gt=0, le=1)] | None = 0.5
    """Largest gap between the log-probabilities of engine and learner, as a share of `engine.logprob_tolerance`, the
    gap at which the run stops with an error."""
    data_wait: Share | None = 0.3
    """Largest median share of a step's time in which the learner waits for problems."""
    memory: Share | None = 0.95
    """Largest share of a GPU's memory in use; without GPUs, of a machine's memory. Measured after the first steps and
    at each checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Complete configuration of a run. The same YAML with the same overrides gives the same run on any cluster.

    Raises:
        ConfigError: a field has a wrong type or value, or fields contradict each other; also when an instance is
            created directly or by `dataclasses.replace`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    heldout: HeldoutConfig = field(default_factory=HeldoutConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        for name, cls in SECTIONS.items():
            section = getattr(self, name)
            try:
                type_adapter(cls).validate_python(section)
            except ValidationError as error:
                raise ConfigError(describe_errors(error, Config, self, prefix=(name,))) from None
        for name, section in with_absolute_paths(self).items():
            object.__setattr__(self, name, section)  # the dataclass is frozen, and not complete yet
        check_across_fields(self)
        remember_secrets(self.to_dict())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        remember_secrets(self.to_dict())  # so that a worker, which unpickles the config, redacts the same secrets

    def __repr__(self) -> str:
        # Secrets are hidden, because Ray Train records its workers' arguments as text.
        return f"Config({redact_settings(self.to_dict(), known_secrets())})"

    @property
    def heldout_keys(self) -> list[str]:
        """Keys of the held-out sets, which are the prefixes of their metrics."""
        return heldout_keys(self.data.heldout, self.data.train)

    @property
    def is_mixture(self) -> bool:
        """True if the training problems come from several sources."""
        return not isinstance(self.data.train, str)

    @property
    def training_sources(self) -> dict[str, TrainingSource]:
        """Sources of the training problems by name, sorted; a single dataset has the name ""."""
        return training_sources(self.data)

    @property
    def heldout_sources(self) -> dict[str, HeldoutSource]:
        """Key of each held-out set -> the dataset that its problems come from, and why."""
        return heldout_sources(self.data.train, self.data.heldout)

    def rewards_of(self, source: str) -> tuple[str, ...]:
        """Return the entries of `rewards.functions` that apply to the problems of a source, in their order.

        Args:
            source: name of a source of a mixture; all apply for any other name.
        """
        found = self.training_sources.get(source)
        if found is None or found.rewards is None:
            return self.rewards.functions
        return tuple(name for name in self.rewards.functions if name in found.rewards)

    @property
    def reward_model_gpus(self) -> float:
        """GPUs that the reward models' actor reserves; 0 in a run that uses no reward models or no GPUs."""
        return self.rewards.model_gpus if self.cluster.use_gpu and self.uses_reward_models else 0

    @property
    def uses_reward_models(self) -> bool:
        """True if reward models score training or held-out completions; fine-tuning has only the latter."""
        return bool(self.rewards.models) and (self.run.kind != "sft" or self.measures_with_reward_models)

    @property
    def gpus_per_worker(self) -> float:
        """GPUs that each worker reserves: 0, 1, or 1 minus the share of the reward models.

        Every worker leaves this share free, since Ray may place the reward models beside any of them. Each worker
        reserves more than half of a GPU, so that no two workers share one.
        """
        if not self.cluster.use_gpu:
            return 0
        return 1 if self.reward_model_gpus == 1 else round(1 - self.reward_model_gpus, 4)

    @property
    def reward_model_share_of_engines(self) -> float:
        """Part of a GPU that an engine for held-out problems leaves to the reward models.

        Above 0 if the reward models score the engine's completions, or if the engine measures checkpoints in the
        background while they score training completions.
        """
        shares = self.measures_with_reward_models or self.run.measure == "background"
        return self.reward_model_gpus if shares and self.reward_model_gpus < 1 else 0

    @property
    def measures_with_reward_models(self) -> bool:
        """True if a score of held-out completions is computed by reward models."""
        sources = dict.fromkeys(map(self.source_of, self.heldout_keys))
        return any(
            self.heldout_score_of(source) == "reward" and any(map(is_reward_model, self.rewards_of(source)))
            for source in sources
        )

    @property
    def primary_heldout(self) -> str:
        """Key of the held-out set whose metrics are also reported without its name."""
        return primary_key(self.run.best_metric, self.heldout_keys)

    @property
    def ranking_metric(self) -> str:
        """Metric that checkpoints are ranked by: `run.best_metric`, with the name of its held-out set."""
        return ranking_metric(self.run.best_metric, self.heldout_keys)

    @property
    def heldout_score(self) -> str:
        """Score of the completions of the primary held-out set; see `heldout_score_of`."""
        return self.heldout_score_of(self.source_of(self.primary_heldout))

    def heldout_score_of(self, source: str) -> str:
        """Return the score of held-out completions: a name in `SCORES`, or package.module:function.

        Args:
            source: name of the source of a mixture, or of the benchmark, that the problems belong to; "" for none.
        """
        return benchmark_score(source) or self.heldout.score or derived_score(self.rewards_of(source))

    def source_of(self, key: str) -> str:
        """Return the source of a mixture, or the benchmark, that determines how a held-out set is scored; "" if none.

        Args:
            key: key of the set.
        """
        own = self.heldout_sources.get(key)
        if own is not None and (benchmark := find_benchmark(own.dataset)):
            return benchmark[0].source
        label = heldout_label(key)
        return label if self.is_mixture and label in self.training_sources else ""

    def needs_solutions_of(self, source: str) -> bool:
        """Return True if a built-in reward or score reads the solutions of a source's problems; each must have one."""
        is_trained_on = benchmark_score(source) is None
        reads = is_trained_on and not set(SOLUTION_REWARDS).isdisjoint(self.rewards_of(source))
        return reads or self.heldout_score_of(source) in SOLUTION_REWARDS

    @property
    def needs_solutions(self) -> bool:
        """True if a built-in reward or score reads the solutions of any training problems."""
        return any(map(self.needs_solutions_of, self.training_sources))

    @property
    def requires_isolation(self) -> bool:
        """True if every machine must be able to confine the processes that run code written by the policy."""
        scores = (self.heldout_score_of(self.source_of(key)) for key in self.heldout_keys)
        grades_programs = "code_tests" in (*self.rewards.functions, *scores)
        of_reward = self.rewards.settings.get("code_tests", {}).get("isolation", "required")
        of_tools = self.rollout.isolation == "required" and self.rollout.runs_policy_code
        return of_tools or (grades_programs and of_reward == "required")

    @property
    def columns_decide_tasks(self) -> bool:
        """True if an environment, which reads the columns of a problem, determines its task with the prompt."""
        return bool(self.rollout.environments) or "environment" in self.rewards.functions

    @property
    def sizes(self) -> Sizes:
        """Sizes that follow from the fields: those of a step, of its micro-batches, and of each worker's share."""
        return Sizes(self)

    def with_workers(self, count: int) -> "Config":
        """Return the config of the same run with a fixed number of workers."""
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, num_workers=count))

    @property
    def sampling(self) -> SamplingOptions:
        """Options that completions are sampled with."""
        return sampling_options(self.grpo, self.rollout.structured_outputs)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Variables that are passed to the chat template when a prompt is rendered (TRL's field)."""
        return dict(self.grpo.trl.get("chat_template_kwargs") or {})

    @property
    def trl(self) -> dict[str, Any]:
        """Fields of TRL that are set, and those with another default than TRL's."""
        given = dict(self.grpo.trl)
        if self.rollout.max_staleness and "vllm_importance_sampling_mode" not in given:
            return STALE_CORRECTION | given
        return given

    @property
    def num_iterations(self) -> int:
        """Number of passes over each generation batch: `grpo.epochs`, or TRL's field `num_iterations`."""
        return int(self.grpo.trl.get("num_iterations", self.grpo.epochs))

    @property
    def last_step(self) -> int:
        """Step after which a launch ends: `grpo.max_steps`, or an earlier `run.pause_at`."""
        return min(self.grpo.max_steps, self.run.pause_at or self.grpo.max_steps)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on each generation batch, over all epochs; 1 is on-policy."""
        return self.grpo.steps_per_generation * self.num_iterations

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that an engine spans: those of workers that share it (TRL's field), or those of a dedicated engine."""
        if self.engine.is_dedicated:
            return self.engine.tensor_parallel_size
        return int(effective_value(self.grpo.trl, "vllm_tensor_parallel_size"))

    @property
    def tensor_parallel_field(self) -> str:
        """Name of the field that sets `tensor_parallel_size`, for messages."""
        return "engine.tensor_parallel_size" if self.engine.is_dedicated else "grpo.vllm_tensor_parallel_size"

    @property
    def engine_fraction(self) -> float:
        """Fraction of a GPU's memory that an engine takes while the run trains."""
        fraction = self.engine.gpu_memory_utilization
        return (0.9 if self.engine.is_dedicated else 0.3) if fraction is None else fraction

    @property
    def adapter_sync(self) -> str:
        """Form in which the engine gets an adapter: "merge" or "request"."""
        needs_request = self.model.quantization == "int4" or self.model.share_base
        return self.engine.adapter or ("request" if needs_request else "merge")

    @property
    def dtype(self) -> str:
        """Precision of learner and engine."""
        return self.model.dtype or ("bfloat16" if self.cluster.use_gpu else "float32")

    def to_dict(self) -> dict[str, Any]:
        """Return the config in the shape of the YAML: dicts, lists and scalars, TRL's fields merged into `grpo`."""
        plain = type_adapter(Config).dump_python(self)
        plain["grpo"] |= plain["grpo"].pop("trl")
        if self.is_mixture:
            for source in plain["data"]["train"].values():
                source["rewards"] = None if source["rewards"] is None else list(source["rewards"])
        plain["rewards"]["functions"] = list(plain["rewards"]["functions"])
        plain["rollout"]["tools"] = list(plain["rollout"]["tools"])
        plain["rollout"]["variables"] = list(plain["rollout"]["variables"])
        plain["run"]["stop_on"] = list(plain["run"]["stop_on"])
        plain["run"]["trackers"] = list(plain["run"]["trackers"])
        if not isinstance(self.cluster.num_workers, int):
            plain["cluster"]["num_workers"] = list(self.cluster.num_workers)
        if not isinstance(self.engine.replicas, int):
            plain["engine"]["replicas"] = list(self.engine.replicas)
        if self.model.lora and not isinstance(self.model.lora.target_modules, str):
            plain["model"]["lora"]["target_modules"] = list(self.model.lora.target_modules)
        return plain


SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config) if isinstance(f.type, type)}
"""Section of the YAML -> its dataclass."""
