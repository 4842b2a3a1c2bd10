"""Sizes that follow from a config: completions of a step, micro-batches, problems of a worker, numbers of workers."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config

MIN_TOKENS_PER_PASS = 1024
"""Completion tokens, at full length, that keep a CPU worker busy in one pass. Measured with 20 million parameters and
completions of up to 256 tokens: a pass over 4 rows takes 0.6 of the time of a pass over 16."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that follow from the fields of a config."""

    config: "Config"

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimizer step, over all workers; with `run.kind=sft` its demonstrations."""
        group = self.config.grpo.num_generations if self.config.run.kind == "grpo" else 1
        return self.config.grpo.prompts_per_step * group

    @property
    def prompts_per_generation(self) -> int:
        """Problems of one generation batch, over all workers."""
        return self.config.grpo.prompts_per_step * self.config.grpo.steps_per_generation

    @property
    def completions_per_generation(self) -> int:
        """Completions of one generation batch, over all workers."""
        return self.prompts_per_generation * self.config.grpo.num_generations

    @property
    def completions_per_engine(self) -> int:
        """Largest number of completions of a generation batch that one engine gets.

        The groups of a batch are divided among the largest number of dedicated engines. A colocated engine has those of
        the workers that share it, with the largest number of workers.
        """
        config = self.config
        if config.engine.is_dedicated:
            return math.ceil(self.prompts_per_generation / config.engine.replica_range[1]) * config.grpo.num_generations
        return self.completions_per_generation // config.cluster.max_workers * config.tensor_parallel_size

    @property
    def micro_batch_size(self) -> int:
        """Completions of one forward and backward pass, over all workers.

        With `grpo.tokens_per_micro_batch` it is the number that fits even if all have the maximum length. The learner
        then puts more of them into one pass where they are shorter.
        """
        grpo, cluster = self.config.grpo, self.config.cluster
        tokens = grpo.tokens_per_micro_batch
        if tokens is None:
            return grpo.micro_batch_size or self._default_micro_batch_size
        workers, longest = max(self.worker_counts, default=cluster.max_workers), self.longest_sequence
        rows = 1 if longest is None else max(1, tokens // longest)
        share = max(1, self.completions_per_step // workers)
        return workers * max(size for size in range(1, min(rows, share) + 1) if share % size == 0)

    @property
    def longest_sequence(self) -> int | None:
        """Largest number of tokens of a prompt with its completion; None if only the model's config limits it."""
        config = self.config
        limits = [config.engine.max_model_len]
        # Environments and rollout functions may make prompts longer than those of the problems.
        has_own_prompts = bool(config.rollout.environments) or config.rollout.function is not None
        if config.data.max_prompt_length is not None and not has_own_prompts:
            limits.append(config.data.max_prompt_length + config.grpo.max_completion_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def least_token_limit(self) -> int:
        """Smallest `grpo.tokens_per_micro_batch`: tokens of the longest completion with its prompt, as far as known."""
        config = self.config
        longest = (config.data.max_prompt_length or 1) + config.grpo.max_completion_length
        return min(longest, config.engine.max_model_len or longest)

    @property
    def needs_one_pass(self) -> bool:
        """True if a micro-batch must be the whole step, because its size would change the loss.

        The loss type "bnpo" divides by the tokens of a micro-batch, and a router's auxiliary loss is a product of means
        over a micro-batch.
        """
        trl = self.config.grpo.trl
        return trl.get("loss_type") == "bnpo" or bool(trl.get("router_aux_loss_coef"))

    @property
    def chooses_token_limit(self) -> bool:
        """True if `grpo.tokens_per_micro_batch` is to be derived from the estimate of a GPU's memory."""
        grpo = self.config.grpo
        limits = (grpo.tokens_per_micro_batch, grpo.micro_batch_size)
        return self.config.cluster.use_gpu and limits == (None, None) and not self.needs_one_pass

    @property
    def _default_micro_batch_size(self) -> int:
        """Completions of a pass if the config sets no limit: the whole step, or on the CPU a part of it.

        The learner puts completions of similar length into one pass, so more passes mean less padding. On the CPU the
        size is therefore the smallest that every possible number of workers divides and that gives each worker
        MIN_TOKENS_PER_PASS tokens.
        """
        step, grpo, cluster = self.completions_per_step, self.config.grpo, self.config.cluster
        # The loss type "bnpo" divides by the tokens of a pass, so there the number of passes changes the gradient.
        if cluster.use_gpu or grpo.trl.get("loss_type") == "bnpo":
            return step
        counts = [n for n in range(cluster.min_workers, cluster.max_workers + 1) if grpo.prompts_per_step % n == 0]
        minimum = cluster.max_workers * MIN_TOKENS_PER_PASS / grpo.max_completion_length
        unit = math.lcm(1, *counts)
        return next((size for size in range(unit, step, unit) if size >= minimum and step % size == 0), step)

    @property
    def prompts_per_worker(self) -> int:
        """Problems that each worker draws for one step, with the largest number of workers."""
        return self.config.grpo.prompts_per_step // self.config.cluster.max_workers

    @property
    def most_problems(self) -> int:
        """Upper bound of the problems that a launch draws: all steps and two more batches, each with all rounds."""
        grpo = self.config.grpo
        rounds = 1 + grpo.dynamic_sampling
        return (grpo.max_steps * grpo.prompts_per_step + 2 * self.prompts_per_generation) * rounds

    @property
    def worker_counts(self) -> list[int]:
        """Numbers of workers that the run may have: those within `cluster.num_workers` that divide the step.

        Worker-count invariance requires this: the step is global, and each worker takes an equal part of it.
        """
        cluster = self.config.cluster
        return [n for n in range(cluster.min_workers, cluster.max_workers + 1) if self.can_share_step(n)]

    def can_share_step(self, workers: int) -> bool:
        """Return whether this number of workers divides the step's problems and its micro-batches."""
        grpo = self.config.grpo
        # With a token limit, each worker divides its own completions into micro-batches.
        divides_micro_batches = grpo.tokens_per_micro_batch is not None or self.micro_batch_size % workers == 0
        return grpo.prompts_per_step % workers == 0 and divides_micro_batches
