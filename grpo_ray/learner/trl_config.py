"""Arguments of TRL's trainer, derived from the config.

A module apart from `learner.py`, so that the driver can check a config without importing vLLM.
"""

from typing import Any

from trl import GRPOConfig

from grpo_ray.config.loader import unknown_key
from grpo_ray.config.schema import Config, GrpoConfig
from grpo_ray.errors import ConfigError

DERIVED = {
    "per_device_train_batch_size": "grpo.micro_batch_size and cluster.num_workers",
    "gradient_accumulation_steps": "grpo.prompts_per_step, grpo.num_generations and grpo.micro_batch_size",
    "generation_batch_size": "grpo.prompts_per_step and grpo.num_generations",
    "steps_per_generation": "grpo.prompts_per_step, grpo.num_generations and grpo.micro_batch_size",
    "output_dir": "run.storage_path and run.name",
    "seed": "run.seed",
    "data_seed": "run.seed",
    "use_cpu": "cluster.use_gpu",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "fsdp": "cluster.shard_learner",
    "use_vllm": "nothing: the engine is always vLLM",
    "vllm_mode": "nothing: the engine is always colocated",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "resume_from_checkpoint": "run.resume",
    "save_strategy": "grpo.save_steps",
    "logging_strategy": "grpo.logging_steps",
    "save_total_limit": "run.keep_checkpoints",
    "eval_strategy": "grpo.save_steps and data.heldout",
    "do_eval": "grpo.save_steps and data.heldout",
    "num_train_epochs": "grpo.max_steps",
    "restore_callback_states_from_checkpoint": "nothing: callbacks restore their state themselves",
    "ignore_data_skip": "nothing: the ledger determines the next problem",
    "shuffle_dataset": "run.seed",
    "remove_unused_columns": "nothing: rewards see every column",
    "disable_tqdm": "nothing: progress is shown on the driver",
}
"""Field of TRL that cannot be set -> the fields of the config that it follows from."""


LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
"""Loss types of TRL 1.16; a test compares them with TRL's source."""


def trl_arguments(config: Config, output_dir: str) -> GRPOConfig:
    """Derive TRL's arguments for one worker, each with its share of the global sizes (worker-count invariance).

    Raises:
        ConfigError: a field of `grpo` is unknown to TRL, is derived, or has a value that TRL does not accept.
    """
    check_trl_fields(config)
    workers, grpo = config.cluster.max_workers, config.grpo
    accumulation = config.completions_per_step // config.micro_batch_size
    try:
        return GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=config.micro_batch_size // workers,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation,
            num_generations=grpo.num_generations,
            max_completion_length=grpo.max_completion_length,
            learning_rate=grpo.learning_rate,
            max_steps=grpo.max_steps,
            save_steps=grpo.save_steps,
            logging_steps=grpo.logging_steps,
            seed=config.run.seed,
            use_cpu=not config.cluster.use_gpu,
            bf16=config.dtype == "bfloat16",
            fp16=config.dtype == "float16",
            trust_remote_code=config.model.trust_remote_code,
            use_vllm=False,  # TRL would build its own engine; `Learner` sets ours in its place
            ignore_data_skip=True,  # the worker's stream begins with the first problem that is not yet used
            save_strategy="steps",
            logging_strategy="steps",
            disable_tqdm=True,
            remove_unused_columns=False,
            **_optional_arguments(config),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grpo: TRL does not accept the settings: {' '.join(str(error).split())}") from None


def check_trl_fields(config: Config) -> None:
    """Raise ConfigError if TRL's fields in the section `grpo` are unknown, derived, or contradict other fields."""
    fields = config.grpo.trl
    known = {name for name, field in GRPOConfig.__dataclass_fields__.items() if field.init}
    for name in fields:
        if name in DERIVED:
            raise ConfigError(f"grpo.{name} is derived; set {DERIVED[name]}")
        if name not in known:
            raise ConfigError(unknown_key(f"grpo.{name}", [f"grpo.{k}" for k in sorted(known - set(DERIVED))]))
    if (loss_type := fields.get("loss_type", "dapo")) not in LOSS_TYPES:  # TRL finds out in its first step
        raise ConfigError(f"grpo.loss_type={loss_type!r} must be one of {', '.join(LOSS_TYPES)}")
    engines = int(fields.get("vllm_tensor_parallel_size", 1))
    if uneven := [count for count in config.worker_counts if count % engines]:
        raise ConfigError(
            f"grpo.vllm_tensor_parallel_size={engines} workers share an engine, and cluster.num_workers={uneven[0]} is "
            "no multiple of it"
        )
    weights = fields.get("reward_weights") or ()
    if len(weights) not in (0, len(config.rewards.functions)):
        raise ConfigError(
            f"grpo.reward_weights has {len(weights)} weights for {len(config.rewards.functions)} rewards.functions"
        )
    if config.cluster.shard_learner and config.cluster.min_workers < 2:
        raise ConfigError("cluster.shard_learner=true needs at least 2 workers; set cluster.num_workers")


def _optional_arguments(config: Config) -> dict[str, Any]:
    """Return TRL's fields of the section `grpo`, with defaults and derived ones that depend on other sections."""
    arguments: dict[str, Any] = {
        # Recomputing activations saves memory on a GPU; on the CPU there is enough of it.
        "gradient_checkpointing": config.cluster.use_gpu,
        "report_to": "none",
    } | dict(config.grpo.trl)
    if config.model.lora:  # weights that are not trained need no more precision than the engine's
        arguments["model_init_kwargs"] = {"dtype": config.dtype} | (arguments.get("model_init_kwargs") or {})
    if config.cluster.shard_learner:
        # Rank 0 writes the full state: a checkpoint stays a plain folder that any number of workers can resume from.
        fsdp = {"version": 2, "state_dict_type": "FULL_STATE_DICT"} | (arguments.get("fsdp_config") or {})
        arguments |= {"fsdp": True, "fsdp_config": fsdp}
    return arguments


def trl_fields() -> dict[str, str]:
    """Return TRL's fields that can be set in the section `grpo`, with TRL's description of each."""
    ours = set(GrpoConfig.__dataclass_fields__)
    return {
        name: " ".join(str(field.metadata.get("help", "see transformers.TrainingArguments")).split())
        for name, field in GRPOConfig.__dataclass_fields__.items()
        if field.init and name not in DERIVED and name not in ours
    }
