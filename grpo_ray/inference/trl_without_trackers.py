"""TRL's trainer and engine, imported without the experiment trackers that are installed.

TRL imports wandb, MLflow and trackio with its trainer wherever they are installed: more than a CPU second and 36 MiB in
each worker. A run's trackers have processes of their own (`observers/trackers`), and its workers report to none through
TRL.
"""

# Imported before the trackers are hidden, so that these libraries detect which trackers are installed.
import accelerate  # noqa: F401
import transformers.trainer  # noqa: F401
import vllm  # noqa: F401

from grpo_ray.inference.without_trackers import TRACKERS, hidden

with hidden(TRACKERS):
    from trl.generation.vllm_generation import VLLMGeneration, empty_cache
    from trl.trainer import grpo_trainer
    from trl.trainer.grpo_trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "VLLMGeneration", "empty_cache", "grpo_trainer"]
