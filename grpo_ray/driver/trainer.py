"""Construction of Ray Train's trainer for a prepared run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.data
import ray.train
from ray.train.torch import TorchConfig

from grpo_ray.config.schema import Config
from grpo_ray.data.mixture import mixture_stream
from grpo_ray.data.split import StepDataConfig
from grpo_ray.data.stream import heldout_dataset, training_stream
from grpo_ray.device import compute_device, device_environment
from grpo_ray.driver.cluster.connection import spare_workers, threads_per_worker
from grpo_ray.driver.launch import DatasetIndexes, InitialPolicy, ResumePoint
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.evaluation.baseline import Baseline, baseline_setup
from grpo_ray.evaluation.evaluate import CheckpointEvaluator, worker_environment
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.controller_callback import CoordinatorCallback
from grpo_ray.resilience.elastic import PreemptibleTrainer, scaling_config
from grpo_ray.resilience.nodes import versions
from grpo_ray.storage import checkpoints
from grpo_ray.training.attempt import WorkerSpec
from grpo_ray.training.worker import train_worker

COLLECTIVE_SECONDS = 7200
"""Timeout of a collective, seconds. Ray Train's default of 30 minutes is too short: the other workers may wait longer
while rank 0 writes a checkpoint, or while a worker loads a policy or grades. The watchdog finds hangs earlier
(`run.hang_seconds`)."""


@dataclass(frozen=True)
class TrainerPlan:
    """Arguments of a run's trainer: one property for each, under the name of the trainer's parameter.

    `build` makes the trainer of `grpo-ray train`. For a trainer of your own, pass the properties that it needs.
    """

    context: RunContext
    indexes: DatasetIndexes
    policy: InitialPolicy
    resume: ResumePoint
    coordinator: Any
    """Handle of the run's `RunCoordinator` actor."""
    pool: Any = None
    """Handle of the run's `EnginePool` actor; None with colocated engines."""
    faults: Sequence[Fault] = ()
    """Faults injected on purpose (`chaos.py`)."""

    @property
    def baseline(self) -> Baseline:
        """Evaluations of the initial policy in the run folder."""
        setup = baseline_setup(self.policy.identity)
        return Baseline(self.context.folder, self.heldout_conditions, setup)

    @property
    def heldout_conditions(self) -> dict[str, dict[str, Any]]:
        """Conditions of the held-out measurements, by the key of each set."""
        return measurement_conditions(self.indexes.heldout_fingerprints, self.context.config)

    @property
    def train_loop_config(self) -> dict[str, WorkerSpec]:
        """Argument of `worker.train_worker`."""
        stored, baseline = checkpoints.list_checkpoints(self.context.folder), self.baseline
        # The workers of a resumed run load a trained policy, so they cannot measure the initial one.
        measures_baseline = self.resume.step == 0 and bool(baseline.missing())
        spec = WorkerSpec(
            config=self.context.config,
            model_path=self.policy.path,
            training_fingerprints={name: index.fingerprint for name, index in self.indexes.training.items()},
            training_ids=ray.put({name: index.ids for name, index in self.indexes.training.items()}),
            last_serial=stored[-1].serial if stored else 0,
            coordinator=self.coordinator,
            pool=self.pool,
            initial_checkpoint=self.resume.checkpoint if self.resume.is_of_other_run else None,
            versions=versions(),
            faults=self.faults,
            heldout_conditions=self.heldout_conditions,
            baseline_setup=baseline.setup if measures_baseline else None,
        )
        return {"spec": spec}

    @property
    def datasets(self) -> dict[str, Callable[[], ray.data.Dataset]]:
        """Name -> factory of a Ray Dataset of problems. The training stream is executed once per plan.

        The name of a held-out set is its key.
        """
        config, splits = self.context.config, self.indexes.training_splits
        arguments: dict[str, Any] = {
            "seed": config.run.seed,
            "coordinator": self.coordinator,
            "with_preferred": config.data.prefer_mixed,
            "most_problems": config.sizes.most_problems,
        }
        return {
            "train": partial(mixture_stream, splits, **arguments)
            if config.is_mixture
            else partial(training_stream, splits[""], **arguments),
            **{key: partial(heldout_dataset, split) for key, split in self.indexes.heldout_splits.items()},
        }

    @property
    def dataset_config(self) -> ray.train.DataConfig:
        """Distribution of each step's problems over the workers."""
        return StepDataConfig(self.context.config.grpo.prompts_per_step)

    @property
    def callbacks(self) -> list[ray.train.UserCallback]:
        """Callbacks that record the workers' metrics, and end a run on errors that a new attempt would repeat."""
        return [CoordinatorCallback(self.coordinator)]

    @property
    def torch_config(self) -> TorchConfig:
        """Process group of the workers: NCCL for tensors on GPUs, Gloo for those on the CPU."""
        return torch_config(self.context.config)

    @property
    def worker_runtime_env(self) -> dict[str, Any]:
        """Environment variables of the workers."""
        config = self.context.config
        return {"env_vars": worker_environment(config, threads_per_worker(config))}

    @property
    def run_config(self) -> ray.train.RunConfig:
        """Storage, failure handling and checkpoints of the run."""
        run, folder = self.context.config.run, self.context.folder
        return ray.train.RunConfig(
            name=run.name,
            storage_path=folder.path().rpartition("/")[0],
            storage_filesystem=folder.filesystem,
            # A preemption that was announced does not count as a failure.
            failure_config=ray.train.FailureConfig(max_failures=run.max_failures, max_preemption_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=run.keep_checkpoints,
                checkpoint_score_attribute=checkpoints.SCORE,
                checkpoint_score_order="max",
            ),
            callbacks=self.callbacks,
            worker_runtime_env=self.worker_runtime_env,
        )

    @property
    def validation_config(self) -> ray.train.ValidationConfig | None:
        """Measurement of checkpoints in the background; None if the workers measure them."""
        if self.context.config.run.measure != "background":
            return None
        environment = device_environment(self.context.config.cluster.use_gpu)
        return ray.train.ValidationConfig(
            fn=CheckpointEvaluator(
                self.context.config,
                self.context.folder,
                self.indexes.heldout_splits,
                self.heldout_conditions,
                self.coordinator,
            ),
            # The engines that it starts reserve their own resources.
            ray_remote_kwargs={"num_cpus": 0} | ({"runtime_env": {"env_vars": environment}} if environment else {}),
        )

    def build(self, install_signal_handlers: Callable[[], None]) -> PreemptibleTrainer:
        """Build the trainer.

        Args:
            install_signal_handlers: called once Ray Train has installed its own handlers.
        """
        config = self.context.config
        return PreemptibleTrainer(
            train_worker,
            worker_counts=config.sizes.worker_counts,
            # For dedicated engines, the background engine and the reward models.
            spare_workers=spare_workers(config),
            install_signal_handlers=install_signal_handlers,
            train_loop_config=self.train_loop_config,
            scaling_config=scaling_config(config),
            torch_config=self.torch_config,
            run_config=self.run_config,
            datasets=self.datasets,
            dataset_config=self.dataset_config,
            validation_config=self.validation_config,
        )


def torch_config(config: Config) -> TorchConfig:
    """Return Ray Train's settings of the process group.

    With GPUs, Python objects are still gathered on the CPU: torch prefers Gloo for them if the group has it. With NCCL
    alone each object would be copied to the GPU, and wait for the work queued there.
    """
    on_gpu = compute_device(config.cluster.use_gpu) == "cuda"
    return TorchConfig(backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo", timeout_s=COLLECTIVE_SECONDS)
