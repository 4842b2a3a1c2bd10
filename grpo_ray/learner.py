"""The GRPO learner: TRL's trainer, narrowly extended.

Four methods of `GRPOTrainer` are overridden, each watched by a test in `tests/test_learner.py` that fails when a TRL
release changes beneath it: `__init__` (our engine instead of TRL's), `get_train_dataloader` (the worker's own shard
instead of a `datasets` object), `_generate_and_score_completions` (seeds in, proof of sync out) and
`create_model_card` (not written).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_ray.config import SECTIONS, Config, unknown_key
from grpo_ray.engine import Engine, request_seed
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.problem import Problem
from grpo_ray.rewards import load_rewards

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
    "shuffle_dataset": "run.seed",
    "remove_unused_columns": "nothing: rewards see every column",
    "disable_tqdm": "nothing: progress is shown on the driver",
}
"""TRL's fields that follow from ours, and from which; to set one is refused."""


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
    workers, grpo = config.cluster.num_workers, config.grpo
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


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, set up to generate: padded on the left, always with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class Learner(GRPOTrainer):
    """One worker's learner. It draws the step's problems from the worker's shard and updates the policy on them."""

    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        output_dir: str,
        problems: Iterable[tuple[Problem, int]],
        callbacks: list[TrainerCallback],
        say: Callable[[str], None] = lambda phase: None,
    ):
        """
        model_path: local folder or hub id of the policy.
        output_dir: a folder of this worker and this attempt alone; checkpoints are written there before upload.
        problems: the worker's own problems with their epochs, in order, from the first one not yet used.
        say: told what is being done, for the progress line.
        """
        self.config = config
        self.problems = problems
        args = trl_arguments(config, output_dir)
        tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
        say("loading the policy")
        super().__init__(
            model=model_path,
            reward_funcs=load_rewards(config.rewards),
            args=args,
            # TRL wants a `datasets` object to measure; the problems come from `get_train_dataloader`.
            train_dataset=Dataset.from_dict({"prompt": ["-"]}),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        say("starting the engine")
        self.use_vllm = True
        self.vllm_generation = Engine(
            self.model, self.accelerator, tokenizer, config=config.engine, dtype=config.dtype, args=args
        )
        self._last_loaded_step = -1

    @property
    def engine(self) -> Engine:
        """The worker's engine (TRL's name for it is `vllm_generation`)."""
        return self.vllm_generation

    def get_train_dataloader(self) -> Iterable[list[dict[str, Any]]]:
        """This worker's batches of completions to be: whole groups, repeated as often as TRL asks for each."""
        repeats = self.args.steps_per_generation * self.num_iterations
        return GroupBatches(self.problems, self.config.prompts_per_worker, self.num_generations, repeats)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample with a seed for each completion, and prove on what was sampled that the engine is in sync."""
        self.engine.seeds = [
            request_seed(self.config.run.seed, row["id"], row["epoch"], row["index"]) for row in inputs
        ]
        output = super()._generate_and_score_completions(inputs)
        learner_logps = output.get("old_per_token_logps")
        if learner_logps is None:  # TRL computes them only for its importance correction; law 4 has no off-switch
            learner_logps = self._logps(output)
        gap = self.engine.prove_sync(
            learner_logps, output["sampling_per_token_logps"], output["completion_mask"], self.state.global_step
        )
        self._metrics["train"]["engine/logprob_gap_mean"].append(gap.mean)
        self._metrics["train"]["engine/logprob_gap_max"].append(gap.max)
        return output

    @torch.no_grad()
    def _logps(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The learner's log-probabilities of a batch's completions: (B, T), nats."""
        logps, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
        )
        return logps

    def heldout_accuracy(self, problems: list[Problem]) -> float:
        """Share of held-out problems that the policy solves greedily, 0 to 1; every worker must call it.

        Each worker takes every n-th problem. A problem whose solution cannot be understood counts for nothing.
        """
        if self.state.global_step != self._last_loaded_step:
            self.engine.sync_weights()
            self._last_loaded_step = self.state.global_step
        mine = problems[self.accelerator.process_index :: self.accelerator.num_processes]
        prompts = tokenize_prompts(self.processing_class, [problem.prompt for problem in mine])
        texts = self.processing_class.batch_decode(self.engine.greedy(prompts), skip_special_tokens=True)
        verdicts = load_rewards(("correctness",))[0](
            completions=texts, solution=[problem.solution for problem in mine]
        )
        known = [verdict for verdict in verdicts if verdict is not None]
        totals = torch.tensor([float(sum(known)), float(len(known))], device=self.accelerator.device)
        solved, scored = self.accelerator.reduce(totals, reduction="sum").tolist()
        return solved / scored if scored else float("nan")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: a checkpoint of a run is not a published model."""


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[list[dict[str, str]]]) -> list[list[int]]:
    """Chat messages to token ids, as the policy reads them: (B,) lists."""
    if not prompts:
        return []
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]


class GroupBatches:
    """The batches of one worker: `prompts` problems at a time, each `num_generations` times in a row.

    TRL generates once for a batch and takes several forward passes (and, with num_iterations > 1, several steps)
    from it; its loop asks for the batch again each time.
    """

    def __init__(self, problems: Iterable[tuple[Problem, int]], prompts: int, num_generations: int, repeats: int):
        self.problems = problems
        self.prompts = prompts
        self.num_generations = num_generations
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        problems = iter(self.problems)
        while drawn := list(itertools.islice(problems, self.prompts)):
            if len(drawn) < self.prompts:
                raise DataError(f"the stream of problems ended with {len(drawn)} of a step's {self.prompts} problems")
            batch = [
                problem.row() | {"epoch": epoch, "index": index}
                for problem, epoch in drawn
                for index in range(self.num_generations)
            ]
            yield from itertools.repeat(batch, self.repeats)
