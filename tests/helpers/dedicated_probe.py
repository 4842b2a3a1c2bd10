"""Observations of real dedicated engines and a real learner, for `test_dedicated_engines.py`."""

import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from failing_storage import wait_for
from lone_process import lone_process_group

from grpo_ray.errors import SyncError
from grpo_ray.inference.pool.engine_process import EngineProcess
from grpo_ray.inference.pool.messages import EngineFacts
from grpo_ray.inference.pool.pool import EnginePool

COMPLETIONS = 12
SETTINGS = (
    "grpo.max_completion_length=24",
    "cluster.num_workers=1",
    "cluster.cpus_per_worker=1",
    "cluster.threads_per_worker=1",
)


class OpenProcess(EngineProcess):
    """An engine that a test can change; the second one starts once a file is there."""

    def start(self, *arguments: Any) -> EngineFacts:
        held = Path(self._config.run.storage_path, "held")
        while self._number == 1 and held.exists():
            time.sleep(0.1)
        return super().start(*arguments)

    def change_layer(self) -> None:
        """Change one bit of one weight, as a sync that has not reached it."""
        parameters = self._engine._parameters()
        name = next(name for name in parameters if "down_proj" in name)
        parameters[name].data[0, 0] += 1e-6

    def keep_cache(self) -> None:
        """Never empty the prefix cache again."""
        self._engine.empty_prefix_cache = lambda: None


class OpenPool(EnginePool):
    process_class = OpenProcess

    async def call(self, number: int, method: str) -> None:
        await getattr(self._engines[number].processes[0], method).remote()


class Learner:
    """A learner with its engines, and prompts to sample from."""

    def __init__(self, policy: str, *overrides: str) -> None:
        from grpo_ray.config.loader import load_config
        from grpo_ray.data.arithmetic import arithmetic_problems
        from grpo_ray.driver.engines import start_pool
        from grpo_ray.learner.learner import build_learner
        from grpo_ray.models.tokenizer import tokenize_prompts
        from grpo_ray.storage.run_folder import RunFolder
        from grpo_ray.telemetry.coordinator import RunCoordinator

        self.folder = Path(tempfile.mkdtemp())
        self.held = self.folder / "held"
        self.held.touch()  # before the pool may start a second engine
        self.config = load_config(
            None, [f"model.path={policy}", *SETTINGS, f"run.storage_path={self.folder}", "run.name=probe", *overrides]
        )
        RunFolder(self.config.run.storage_path, "probe").write_text("", "config.yaml")
        self.coordinator = ray.remote(num_cpus=0)(RunCoordinator).remote()
        self.pool: Any = start_pool(self.config, policy, self.coordinator, OpenPool)
        if self.pool is not None:
            ray.get(self.pool.reserve.remote())
        self.learner = build_learner(
            self.config, model_path=policy, output_dir=str(self.folder / "out"), problems=[], pool=self.pool
        )
        self.engine = self.learner.engine
        problems = [
            problem for problem, _ in zip(arithmetic_problems("heldout"), range(COMPLETIONS // 2), strict=False)
        ]
        prompts = tokenize_prompts(self.learner.processing_class, [problem.prompt for problem in problems], {})
        self.prompts = [prompt for prompt in prompts for _ in range(2)]

    def sample(self) -> list[tuple[list[int], list[float | None]]]:
        """Return ids and log-probabilities of a completion for each prompt, groups of two."""
        sampling = [self.engine.training_sampling | {"seed": seed} for seed in range(COMPLETIONS)]
        return [(each.token_ids, each.logps) for each in self.engine.run_requests(self.prompts, sampling)]

    def step(self) -> None:
        """Change all weights, as an optimizer step does."""
        import torch

        with torch.no_grad():
            for parameter in self.learner.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.01).add_(0.001)

    def numbers(self) -> list[int]:
        """Return the numbers of the engines that hold the present weights."""
        return [each["number"] for each in ray.get(self.pool.engines.remote()) if each["version"]]

    def refused(self) -> str:
        """Return the error of a proof."""
        try:
            self.engine.prove_weights()
        except SyncError as error:
            return str(error)
        return ""

    def close(self) -> None:
        if self.pool is not None:
            ray.get(self.pool.stop.remote())


@lone_process_group()
def observe_steps(policy: str, *overrides: str) -> list[Any]:
    """Return the completions of two versions of the weights."""
    probe = Learner(policy, *overrides)
    probe.engine.sync_weights()
    first = probe.sample()
    probe.step()
    probe.engine.sync_weights()
    second = probe.sample()
    probe.close()
    return [first, second]


@lone_process_group()
def observe_engines(policy: str) -> dict[str, Any]:
    """Return what the tests compare, of a pool with one and then two engines for two shards."""
    probe = Learner(policy, "engine.placement=dedicated", "engine.replicas=[1, 2]")
    observed: dict[str, Any] = {"description": probe.engine.description}
    probe.engine.sync_weights()
    observed["one engine"] = probe.numbers(), probe.sample()
    probe.held.unlink()
    wait_for(lambda: len(probe.numbers()) == 2, "the second engine", 300)
    observed["two engines"] = probe.numbers(), probe.sample()
    ray.get(probe.pool.call.remote(1, "change_layer"))
    observed["changed layer"] = probe.refused()
    probe.close()
    return observed


@lone_process_group()
def observe_kept_cache(policy: str) -> str:
    """Return the error of a sync with an engine that keeps keys and values of older weights."""
    probe = Learner(policy, "engine.placement=dedicated")
    probe.engine.sync_weights()
    ray.get(probe.pool.call.remote(0, "keep_cache"))
    probe.prompts = [prompt * 8 for prompt in probe.prompts]  # of several blocks
    probe.sample()
    probe.step()
    try:
        probe.engine.sync_weights()
    except SyncError as error:
        return str(error)
    finally:
        probe.close()
    return ""
