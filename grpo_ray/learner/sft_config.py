"""Arguments of TRL's trainer of supervised fine-tuning, derived from the config.

Separate from `sft.py`, so that the driver can check a config without importing vLLM.
"""

import dataclasses

from transformers import TrainingArguments
from trl import SFTConfig

from grpo_ray.config.schema import Config
from grpo_ray.device import compute_device
from grpo_ray.errors import ConfigError
from grpo_ray.learner.trl_config import optional_arguments

SHARED = frozenset(each.name for each in dataclasses.fields(TrainingArguments)) | {"model_init_kwargs"}
"""TRL's fields of the section `grpo` that are not GRPO's own. The others have no effect on supervised fine-tuning, so
that stages can share the section."""


def sft_arguments(config: Config, output_dir: str, *, on_driver: bool = False) -> SFTConfig:
    """Derive TRL's arguments for one worker, with its share of a step's demonstrations (worker-count invariance).

    Args:
        on_driver: only check the arguments, on a machine that may have no GPU, where TRL refuses 16-bit precision.

    Raises:
        ConfigError: TRL does not accept a combination of fields that passed the checks of the config.
    """
    sizes, grpo, workers = config.sizes, config.grpo, config.cluster.max_workers
    optional = {name: value for name, value in optional_arguments(config).items() if name in SHARED}
    on_cpu = on_driver or compute_device(config.cluster.use_gpu) == "cpu"
    if on_cpu:
        optional.pop("tf32", None)  # refused without a GPU that has this format
    try:
        return SFTConfig(
            output_dir=output_dir,
            per_device_train_batch_size=sizes.micro_batch_size // workers,
            gradient_accumulation_steps=sizes.completions_per_step // sizes.micro_batch_size,
            learning_rate=grpo.learning_rate,
            max_steps=grpo.max_steps,
            save_steps=grpo.save_steps,
            logging_steps=grpo.logging_steps,
            seed=config.run.seed,
            use_cpu=on_cpu,
            bf16=config.dtype == "bfloat16" and not on_driver,
            fp16=config.dtype == "float16" and not on_driver,
            trust_remote_code=config.model.trust_remote_code,
            # The mean over the tokens of the whole step: micro-batches and workers do not change it.
            average_tokens_across_devices=True,
            router_aux_loss_coef=0.0,  # a product of means over one pass, which would depend on both
            max_length=None,  # demonstrations are cut off by `grpo.max_completion_length`
            dataset_kwargs={"skip_prepare_dataset": True},  # the demonstrations come from the worker's own stream
            ignore_data_skip=True,  # which begins with the first one that is not yet used
            save_strategy="steps",
            logging_strategy="steps",
            disable_tqdm=True,
            remove_unused_columns=False,
            **optional,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grpo: TRL does not accept the settings: {' '.join(str(error).split())}") from None


def for_engine(config: Config) -> Config:
    """Return the config of the same run by which its engine is sized: that of GRPO, which samples groups."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, kind="grpo"),
        grpo=dataclasses.replace(config.grpo, micro_batch_size=None, tokens_per_micro_batch=None),
    )
