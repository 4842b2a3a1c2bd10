"""Reward models of a run: one Ray actor holds all of them, and scores the completions of every worker.

    with running_reward_models(config):  # on the driver
        ...
        reward = ModelReward("/models/judge", actor_name(config.rewards))  # in any process of the same Ray job
        rewards = await reward(prompts=prompts, completions=completions)  # (B,) numbers

A reward model is a sequence classifier with one output, as in TRL, which renders prompt and completion with the model's
own chat template. The numbers are those of TRL up to rounding, since other texts may share a pass, unless a completion
spells control tokens of the model, such as the end of a turn: they are read as text.

The actor starts again if its process or node is lost, loads the models anew, and answers the calls that were lost with
it, so the workers go on training. It is not part of their process group, and has no state of the run: a resumed run
gets the same numbers.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpo_ray.config.reward_names import reward_name
from grpo_ray.config.schema import Config, RewardsConfig
from grpo_ray.device import compute_device, device_environment
from grpo_ray.errors import RewardError
from grpo_ray.models.memory import REWARD_MODEL_TOKENS
from grpo_ray.resilience.error_triage import describe_worker_error
from grpo_ray.tools.template import break_up, control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

CALL_RETRIES = 3
"""Times that a call is repeated after the actor has died, before it counts as failed. Models are loaded in calls, so a
process that dies while it loads is counted too."""

OWN_MARKS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Control tokens inside a turn, which policies write as text. Templates read them, to omit thoughts for example."""


@dataclass(frozen=True)
class RewardModel:
    """One reward model."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        return control_tokens(self.tokenizer, without=OWN_MARKS)

    def as_text(self, completion: Any) -> Any:
        """Break up this model's control tokens in all texts of a completion, a text or messages.

        A policy can spell them with ordinary tokens. Otherwise its completion would end its own turn, and go on as the
        user who praises it.
        """
        if isinstance(completion, str):
            return break_up(completion, self._control)
        if isinstance(completion, Mapping):
            return {key: self.as_text(value) for key, value in completion.items()}
        return [self.as_text(each) for each in completion] if isinstance(completion, list | tuple) else completion

    @classmethod
    def load(cls, path: str, *, device: str, arguments: Mapping[str, Any], trust_remote_code: bool) -> "RewardModel":
        """Load a model from a folder or the hub.

        Args:
            arguments: further arguments of `from_pretrained`.

        Raises:
            RewardError: it has no weights for its output, so it is not a sequence classifier.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, trust_remote_code=trust_remote_code, output_loading_info=True, **arguments
        )
        if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
            raise RewardError(f"it has no weights {', '.join(missing)}: it is no sequence classifier with one output")
        text_config = model.config.get_text_config()
        # A classifier reads the output at the last token that is not padding.
        text_config.pad_token_id = tokenizer.pad_token_id
        text_config.use_cache = False  # the cached keys and values would never be read
        return cls(model.eval().to(device), tokenizer)

    def score(self, texts: Sequence[str]) -> list[float]:
        """Return the model's output for each text, (B,)."""
        import torch

        tokens = self.tokenizer(text=list(texts), add_special_tokens=False)["input_ids"]
        scores = [0.0] * len(texts)
        for places in plan_passes([len(each) for each in tokens], REWARD_MODEL_TOKENS):
            inputs = self.tokenizer.pad(
                {"input_ids": [tokens[place] for place in places]}, padding_side="right", return_tensors="pt"
            )
            with torch.inference_mode():
                logits = self.model(**inputs.to(self.model.device)).logits
            for place, value in zip(places, logits[:, 0].float().tolist(), strict=True):
                scores[place] = value
        return scores


def plan_passes(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Divide texts into forward passes: those of similar length together, the longest first.

    Args:
        lengths: (B,) tokens of each text.
        most_tokens: most tokens of a pass, padding included; a longer text has one of its own.

    Returns:
        The places of each pass's texts.
    """
    passes: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first text of a pass is its longest.
        if passes and (len(passes[-1]) + 1) * lengths[passes[-1][0]] <= most_tokens:
            passes[-1].append(place)
        else:
            passes.append([place])
    return passes


class RewardModels:
    """The actor: all reward models of a run."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        device: str,
        arguments: Mapping[str, Any],
        threads: int,
        trust_remote_code: bool,
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        """
        Args:
            paths: folders or hub ids.
            arguments: further arguments of `from_pretrained`.
            threads: compute threads on the CPU.
            chat_template_kwargs: variables of the models' chat templates.
        """
        self._paths = paths
        self._device, self._arguments, self._threads = device, arguments, threads
        self._trust_remote_code = trust_remote_code
        self._chat_template_kwargs = chat_template_kwargs
        # Loaded by calls: an error in the constructor would end the actor for good, and it could not try again.
        self._models: dict[str, RewardModel] = {}

    def load(self) -> None:
        """Load the models. Raises RewardError, with the model and the reason in one line."""
        for path in self._paths:
            self._model(path)

    def _model(self, path: str) -> RewardModel:
        if path not in self._models:
            import torch

            torch.set_num_threads(self._threads)
            try:
                self._models[path] = RewardModel.load(
                    path,
                    device=self._device,
                    arguments=self._arguments,
                    trust_remote_code=self._trust_remote_code,
                )
            except Exception as error:  # of any kind: files, code of the model, the hub, memory
                text = str(error).strip()
                reason = text.splitlines()[0] if text else type(error).__name__
                raise RewardError(f"rewards.functions: the reward model {path} cannot be loaded: {reason}") from error
        return self._models[path]

    def score(self, path: str, prompts: Sequence[Messages | str], completions: Sequence[Messages | str]) -> list[float]:
        """Return the rewards of a model, (B,).

        Args:
            path: the model's entry of `rewards.functions`.
            prompts: (B,) chat messages, or plain texts.
            completions: (B,) of the same kind.

        Raises:
            RewardError: the model cannot be loaded again after a failure.
        """
        from trl.data_utils import apply_chat_template

        model = self._model(path)
        return model.score([
            prompt + completion
            if isinstance(prompt, str) and isinstance(completion, str)
            else apply_chat_template(
                {"messages": [*prompt, *completion]}, model.tokenizer, **self._chat_template_kwargs
            )["text"]
            for prompt, completion in zip(prompts, map(model.as_text, completions), strict=True)
        ])  # fmt: skip


class ModelReward:
    """Reward of one model in TRL's signature, computed by the run's actor."""

    def __init__(self, path: str, actor: str) -> None:
        """
        Args:
            path: entry of `rewards.functions`.
            actor: name of the actor.
        """
        self.__name__ = reward_name(path)
        self._path = path
        self._actor = actor

    async def __call__(
        self, *, prompts: Sequence[Messages | str], completions: Sequence[Messages | str], **columns: Any
    ) -> list[float]:
        """Return the rewards, (B,).

        Raises:
            RewardError: the model failed, or its actor is not running.
        """
        import ray

        try:
            actor = ray.get_actor(self._actor)
        except ValueError:
            raise RewardError(
                f"the reward model {self._path} is not running; it runs while grpo_ray trains or evaluates"
            ) from None
        try:
            return await actor.score.remote(self._path, prompts, completions)
        except ray.exceptions.RayError as error:
            raise _reward_error(error, f"the reward model {self._path} failed") from error


def actor_name(rewards: RewardsConfig) -> str:
    """Return the name of the actor of these rewards, the same in all processes of a Ray job."""
    facts = json.dumps([sorted(rewards.models), rewards.model_gpus])
    return f"reward-models-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


_running: dict[str, tuple[Any, int]] = {}
"""Name of an actor -> its handle, which keeps it alive, and the number of blocks of this process that use it."""
_lock = threading.Lock()


@contextmanager
def running_reward_models(config: Config) -> Iterator[None]:
    """Keep the actor of a run's reward models running inside the block; do nothing in a run without them.

    Ray must be connected. Blocks of one process share the actor, and so does a task inside such a block.

    Raises:
        RewardError: the models cannot be loaded.
    """
    if not config.rewards.models:
        yield
        return
    import ray

    name = actor_name(config.rewards)
    with _lock:
        handle, uses = _running.get(name) or (_start(config, name), 0)
        _running[name] = handle, uses + 1
    try:
        try:
            ray.get(handle.load.remote())
        except ray.exceptions.RayError as error:
            models = " and ".join(config.rewards.models)
            raise _reward_error(error, f"rewards.functions: {models} cannot be loaded") from None
        yield
    finally:
        with _lock:
            handle, uses = _running.pop(name)
            if uses > 1:
                _running[name] = handle, uses - 1
        del handle


def _start(config: Config, name: str) -> Any:
    """Start the actor, or find the one that another process of the job has started; return its handle."""
    import ray

    cluster, share = config.cluster, config.reward_model_gpus
    environment = device_environment(cluster.use_gpu)
    actor = ray.remote(RewardModels).options(
        name=name,
        get_if_exists=True,
        num_cpus=0,
        num_gpus=share,
        max_restarts=-1,
        max_task_retries=CALL_RETRIES,
        runtime_env={"env_vars": environment} if environment else None,
    )
    return actor.remote(
        config.rewards.models,
        device=compute_device(cluster.use_gpu) if share else "cpu",
        arguments={"dtype": config.dtype} | dict(config.grpo.trl.get("model_init_kwargs") or {}),
        threads=cluster.threads_per_worker or cluster.cpus_per_worker,
        trust_remote_code=config.model.trust_remote_code,
        chat_template_kwargs=config.chat_template_kwargs,
    )


def _reward_error(error: BaseException, what: str) -> RewardError:
    """Return the RewardError that the actor raised, or else one line with the reason why it did not answer."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RewardError) else RewardError(f"{what}: {describe_worker_error(error)}")
