"""Arguments of TRL's trainer, derived from the config.

Separate from `learner.py`, so that the driver can check a config without importing vLLM.
"""

from typing import Any

from trl import GRPOConfig

from grpo_ray.config.schema import Config
from grpo_ray.device import compute_device
from grpo_ray.errors import ConfigError
from grpo_ray.learner.sharding_settings import precision_policy, sharding_arguments


def trl_arguments(config: Config, output_dir: str, *, on_driver: bool = False) -> GRPOConfig:
    """Derive TRL's arguments for one worker, each with its share of the global sizes (worker-count invariance).

    Args:
        on_driver: only check the arguments, on a machine that may have no GPU, where TRL refuses 16-bit precision.

    Raises:
        ConfigError: TRL does not accept a combination of fields that passed the checks of the config.
    """
    workers, grpo = config.cluster.max_workers, config.grpo
    accumulation = config.sizes.completions_per_step // config.sizes.micro_batch_size
    optional = optional_arguments(config)
    on_cpu = on_driver or compute_device(config.cluster.use_gpu) == "cpu"
    if on_cpu:
        optional.pop("tf32", None)  # refused without a GPU that has this format
    try:
        args = GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=config.sizes.micro_batch_size // workers,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation * grpo.steps_per_generation,
            num_iterations=config.num_iterations,
            num_generations=grpo.num_generations,
            max_completion_length=grpo.max_completion_length,
            learning_rate=grpo.learning_rate,
            max_steps=grpo.max_steps,
            save_steps=grpo.save_steps,
            logging_steps=grpo.logging_steps,
            seed=config.run.seed,
            use_cpu=on_cpu,
            bf16=config.dtype == "bfloat16" and not on_driver,
            fp16=config.dtype == "float16" and not on_driver,
            trust_remote_code=config.model.trust_remote_code,
            use_vllm=False,  # TRL would build its own engine; `Learner` sets ours in its place
            ignore_data_skip=True,  # the worker's stream begins with the first problem that is not yet used
            save_strategy="steps",
            logging_strategy="steps",
            disable_tqdm=True,
            remove_unused_columns=False,
            **optional,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grpo: TRL does not accept the settings: {' '.join(str(error).split())}") from None
    if config.cluster.shard_learner and config.dtype != "float32":
        args.fsdp_plugin_args["mixed_precision_policy"] = precision_policy(config.dtype)  # TRL has no field for it
    return args


def optional_arguments(config: Config) -> dict[str, Any]:
    """Return the TRL fields of the section `grpo`, with defaults and fields that depend on other sections."""
    arguments: dict[str, Any] = {
        # In a run, workers set it by their memory plan. This default is for a learner outside a run, on an unknown GPU.
        "gradient_checkpointing": config.cluster.use_gpu,
        "report_to": "none",
    } | {name: value for name, value in config.trl.items() if name != "num_iterations"}
    if config.model.adapter:  # weights that are not trained need no more precision than the engine's
        arguments["model_init_kwargs"] = {"dtype": config.dtype} | (arguments.get("model_init_kwargs") or {})
    if config.cluster.shard_learner:
        arguments |= sharding_arguments(arguments.get("fsdp_config") or {})
    return arguments
