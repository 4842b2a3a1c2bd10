"""Generation one step ahead (`grpo.generate_ahead`): the next step's completions come while the learner works.

In step s the engine is given the learner's weights and generates the completions of step s + 1 in a thread, while the
learner goes forward and backward over those of step s. Before the optimizer's step they are there: the learner says
their log-probabilities in one pass without gradient, the sync is proven with them (law 4), and only then do the
weights move. So step s + 1 is taken on completions of weights one step older than its own. What the learner said of
them then is TRL's `old_per_token_logps`: its clipping bounds how far the policy has moved since, and its importance
ratio is that of learner to engine under the same weights. Another gradient than without, but the one that TRL takes on
any batch that its policy has moved away from.

A step that ends with a checkpoint, and the last one, generate nothing ahead; the step after a checkpoint generates its
own completions first. So no completions are pending at a checkpoint, and a run that goes on from one equals a run that
nothing happened to (law 2). A checkpoint at another step, where a run is stopped or leaves a machine, throws away what
was generated ahead; its problems are not yet used, and come again.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError
from grpo_ray.training.exact_savings import ExactSavings, is_noisy
from grpo_ray.training.learner import Learner, without_dropout
from grpo_ray.training.micro_batches import Batch, SavingsPlan


def learner_class(config: Config) -> type[Learner]:
    """The learner that a config asks for."""
    return OneStepOffPolicyLearner if config.grpo.generate_ahead else Learner


class PrefetchedBatches:
    """A dataloader's batches, of which the next one can be seen before it is asked for."""

    def __init__(self, batches: Iterable[Any]):
        self._source = iter(batches)
        self._seen: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._seen.pop() if self._seen else next(self._source)

    def peek(self) -> Any:
        """The batch that comes next. With several workers drawing it can be a barrier: all of them look together."""
        if not self._seen:
            self._seen.append(next(self._source))
        return self._seen[0]


def run_in_thread(work: Callable[[], Any], stream: "torch.cuda.Stream | None" = None) -> Future:
    """Do some work in a thread that keeps no process alive; its result, or what it raised, is in the future.

    stream: of the GPU, to do it on, after all that the caller has given the GPU to do by now; None without a GPU. A
    thread's own default is the stream that all threads share.
    """
    future: Future = Future()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def run() -> None:
        try:
            with torch.cuda.stream(stream):  # does nothing where there is none
                result = work()
            if stream is not None:
                stream.synchronize()  # the weights may be written again
        except BaseException as error:  # whatever it is, it is raised again in the thread that waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="generating ahead", daemon=True).start()
    return future


def require_deterministic_model(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ConfigError where learner and engine would draw from one generator at the same time."""
    if device.type == "cpu" and is_noisy(model):
        raise ConfigError(
            "grpo.generate_ahead=true: on the CPU the learner's dropout and the engine would draw from the same "
            "generator at the same time, so no run could be repeated; set the model's dropout (model.lora.dropout) to "
            "0, or grpo.generate_ahead=false"
        )


@dataclass(frozen=True)
class Generating:
    """Completions of the next step, under way."""

    prompt_ids: list[list[int]]
    completions: Future
    """Gives token ids and the engine's log-probabilities of each: (B,) lists of T_b."""
    random_state: torch.Tensor
    """Of torch's generator on the CPU, when they were begun."""


@dataclass(frozen=True)
class Generated:
    """Completions of the next step, proven under the weights that they were generated with."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    engine_logps: list[list[float | None]]
    """(B,) lists of T_b, nats; None where the engine gave none."""
    learner_logps: torch.Tensor
    """(B, T), nats, under the weights that the engine had."""


class OneStepOffPolicy(ExactSavings):
    """Put between a trainer with savings and TRL's among a class's bases: it generates one step ahead.

    Extends `_prepare_inputs`, `_generate_single_turn`, `_generate_and_score_completions` and `training_step`. A class
    of it keeps its dataloader in `_upcoming`; one with an engine overrides `prepare_engine` and `prove_ahead`.
    """

    _upcoming: PrefetchedBatches
    _generating: Generating | None = None
    _generated: Generated | None = None

    @cached_property
    def savings(self: Any) -> SavingsPlan:
        """Thrift's, but for the one pass: the policy has moved since the completions were generated."""
        return replace(super().savings, one_pass=False)  # type: ignore[misc]

    def prepare_engine(self, rows: list[dict[str, Any]]) -> None:
        """Told of the problems that the engine generates for next, a row for each completion."""

    def prove_ahead(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Told of log-probabilities of the same tokens under the same weights, (B, T) in nats, before these move."""

    def _prepare_inputs(self: Any, generation_batch: Any) -> Batch:
        """TRL's. Where it gives out a batch's first part, the engine sets about the next batch."""
        is_first = self._step % self.args.steps_per_generation == 0
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if is_first and not self._empties():
            self._begin()
        return inputs

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's. After a batch's last part the next batch is waited for: the weights have not moved yet."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._generating is not None and self._step % self.args.steps_per_generation == 0:
            self._finish()
        return loss

    def _empties(self: Any) -> bool:
        """Whether the step under way ends with a checkpoint or is the last: nothing is generated ahead then."""
        step = self.state.global_step + 1
        return step % self.state.save_steps == 0 or step >= self.state.max_steps

    def _begin(self: Any) -> None:
        """Give the engine the weights that the step under way began with, and have it generate for the next one."""
        rows = self._upcoming.peek()
        self.prepare_engine(rows)
        prompt_ids, images, fields = self._tokenize_prompts([row["prompt"] for row in rows])
        if self._last_loaded_step != self.state.global_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        generate = super()._generate_single_turn  # type: ignore[misc]
        self._generating = Generating(
            prompt_ids,
            run_in_thread(lambda: generate(prompt_ids, images, fields, self.num_generations), self._stream),
            torch.get_rng_state(),
        )

    def _finish(self: Any) -> None:
        """Wait for the completions, and prove that they come of the weights that the learner still has."""
        generating, self._generating = self._generating, None
        with self.phases("generate"):  # what of it the learner's own work did not hide
            completion_ids, engine_logps = generating.completions.result()
        if self.accelerator.device.type == "cpu":
            # vLLM's sampler on the CPU draws noise from this generator that it does not use. The learner draws nothing
            # meanwhile (`OneStepOffPolicyLearner` refuses dropout), but gradient checkpointing may have turned it back.
            torch.set_rng_state(generating.random_state)
        batch, said = self._padded(generating.prompt_ids, completion_ids, engine_logps)
        with torch.no_grad(), without_dropout(self.model):
            learner_logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        self.prove_ahead(learner_logps, said, batch["completion_mask"])
        self._generated = Generated(generating.prompt_ids, completion_ids, engine_logps, learner_logps)

    def _generate_single_turn(self: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """TRL's, or what was generated ahead: token ids and the engine's log-probabilities of each completion."""
        if self._generated is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        if prompt_ids != self._generated.prompt_ids:
            raise RuntimeError("the step's prompts are not those that completions were generated for ahead")
        return self._generated.completion_ids, self._generated.engine_logps

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's. Of completions generated ahead it takes what the learner said of them before its weights moved."""
        generated, corrects = self._generated, self.vllm_importance_sampling_correction
        if generated is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.vllm_importance_sampling_correction = False  # TRL would ask the weights of now
        try:
            output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            self.vllm_importance_sampling_correction, self._generated = corrects, None
        # TRL may pad to a multiple of some length.
        more = output["completion_ids"].size(1) - generated.learner_logps.size(1)
        output["old_per_token_logps"] = torch.nn.functional.pad(generated.learner_logps, (0, more))
        self._see(output, output["old_per_token_logps"])
        learner_logps, engine_logps, *ratio = self._read.pop()
        if ratio:
            self._log_sampling(learner_logps - engine_logps, ratio[0])
        return output

    @cached_property
    def _stream(self: Any) -> "torch.cuda.Stream | None":
        """The GPU's stream that the engine generates on while the learner keeps its own; None without a GPU."""
        device = self.accelerator.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def _padded(
        self: Any,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        engine_logps: list[list[float | None]],
    ) -> tuple[Batch, torch.Tensor]:
        """Prompts (B, P) padded on the left and completions (B, T) on the right with masks, and the engine's
        log-probabilities (B, T), NaN where it gave none."""

        def tensor(rows: list[Any], padding: float, side: str) -> torch.Tensor:
            return pad_sequence([torch.tensor(row) for row in rows], True, padding, side).to(self.accelerator.device)

        def ones(rows: list[Any]) -> list[list[int]]:
            return [[1] * len(row) for row in rows]

        padding = self.processing_class.pad_token_id
        logps = [[torch.nan if each is None else each for each in row] for row in engine_logps]
        return {
            "prompt_ids": tensor(prompt_ids, padding, "left"),
            "prompt_mask": tensor(ones(prompt_ids), 0, "left"),
            "completion_ids": tensor(completion_ids, padding, "right"),
            "completion_mask": tensor(ones(completion_ids), 0, "right"),
        }, tensor(logps, 0.0, "right")


class OneStepOffPolicyLearner(Learner, OneStepOffPolicy):
    """One worker's learner, which generates one step ahead."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        require_deterministic_model(self.model, self.accelerator.device)

    def get_train_dataloader(self) -> PrefetchedBatches:
        """This worker's batches, with a look at what comes next."""
        self._upcoming = PrefetchedBatches(super().get_train_dataloader())
        return self._upcoming

    def prove_ahead(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Prove that the engine has the learner's weights, or raise SyncError (law 4).

        `prove` holds the same numbers against each other again when the step is taken on them, for its metrics.
        """
        self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)
