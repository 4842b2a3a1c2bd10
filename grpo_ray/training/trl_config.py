"""What TRL is told: the arguments of its trainer, derived from the config, and the tokenizer.

Apart from `learner.py` so that the driver can check a config without loading vLLM.
"""

from typing import Any

from trl import GRPOConfig

from grpo_ray.config.loader import unknown_key
from grpo_ray.config.schema import SECTIONS, Config
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
    "vllm_gpu_memory_utilization": "engine.memory_share",
    "resume_from_checkpoint": "run.resume",
    "save_strategy": "grpo.save_steps",
    "logging_strategy": "grpo.logging_steps",
    "save_total_limit": "run.keep_checkpoints",
    "eval_strategy": "grpo.save_steps and data.heldout",
    "do_eval": "grpo.save_steps and data.heldout",
    "num_train_epochs": "grpo.max_steps",
    "restore_callback_states_from_checkpoint": "nothing: what counts is restored",
    "ignore_data_skip": "nothing: the ledger says where to go on",
    "shuffle_dataset": "run.seed",
    "remove_unused_columns": "nothing: rewards see every column",
    "disable_tqdm": "nothing: progress is shown on the driver",
}
"""TRL's fields that follow from ours, and from which; to set one is refused."""


LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
"""What TRL 1.16 has; a test holds it against TRL's source."""


def trl_arguments(config: Config, output_dir: str) -> GRPOConfig:
    """TRL's arguments for one worker. Sizes are the global ones, shared out (law 1).

    Raises ConfigError for a field that TRL does not have, that is derived, or whose value TRL refuses.
    """
    known = {name for name, field in GRPOConfig.__dataclass_fields__.items() if field.init}
    for name in config.grpo.trl:
        if name in DERIVED:
            raise ConfigError(f"grpo.{name} is derived; set {DERIVED[name]}")
        if name not in known:
            raise ConfigError(unknown_key(f"grpo.{name}", [f"grpo.{k}" for k in sorted(known - set(DERIVED))]))
    workers, grpo = config.cluster.max_workers, config.grpo
    if (loss_type := grpo.trl.get("loss_type", "dapo")) not in LOSS_TYPES:  # TRL finds out in its first step
        raise ConfigError(f"grpo.loss_type={loss_type!r} must be one of {', '.join(LOSS_TYPES)}")
    engines = int(grpo.trl.get("vllm_tensor_parallel_size", 1))
    if uneven := [count for count in config.worker_counts if count % engines]:
        raise ConfigError(
            f"grpo.vllm_tensor_parallel_size={engines} workers share an engine, and cluster.num_workers={uneven[0]} is "
            "no multiple of it"
        )
    accumulation = config.completions_per_step // config.micro_batch_size
    defaults: dict[str, Any] = {
        # Recomputing activations buys memory on a GPU; on the CPU there is memory enough.
        "gradient_checkpointing": config.cluster.use_gpu,
        "report_to": "none",
    }
    if "reward_weights" in grpo.trl and len(grpo.trl["reward_weights"] or ()) not in (0, len(config.rewards.functions)):
        raise ConfigError(
            f"grpo.reward_weights has {len(grpo.trl['reward_weights'])} weights for "
            f"{len(config.rewards.functions)} rewards.functions"
        )
    settings = defaults | dict(grpo.trl)
    if config.model.lora:  # weights that are not trained need no more precision than the engine's
        settings["model_init_kwargs"] = {"dtype": config.dtype} | (settings.get("model_init_kwargs") or {})
    if config.cluster.shard_learner:
        if config.cluster.min_workers < 2:
            raise ConfigError("cluster.shard_learner=true needs at least 2 workers; set cluster.num_workers")
        # A checkpoint stays a plain folder that any number of workers can go on from: rank 0 writes all of it.
        fsdp = {"version": 2, "state_dict_type": "FULL_STATE_DICT"} | (settings.get("fsdp_config") or {})
        settings |= {"fsdp": True, "fsdp_config": fsdp}
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
            use_vllm=False,  # TRL would build its own engine; `Learner` puts ours in its place
            ignore_data_skip=True,  # the worker's stream begins with the first problem that is not yet used
            save_strategy="steps",
            logging_strategy="steps",
            disable_tqdm=True,
            remove_unused_columns=False,
            **settings,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grpo: TRL refuses the settings: {' '.join(str(error).split())}") from None


def trl_fields() -> dict[str, str]:
    """TRL's fields that may stand in the section `grpo`, with TRL's own words for each."""
    ours = {f"{name}" for name in SECTIONS["grpo"].__dataclass_fields__}
    return {
        name: " ".join(str(field.metadata.get("help", "see transformers.TrainingArguments")).split())
        for name, field in GRPOConfig.__dataclass_fields__.items()
        if field.init and name not in DERIVED and name not in ours
    }
