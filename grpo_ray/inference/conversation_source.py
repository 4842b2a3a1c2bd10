"""Choice of the sampler of multi-turn completions: tools and environments, or a rollout function of the user."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from grpo_ray.config.schema import Config
from grpo_ray.inference.conversation_sampler import ConversationSampler, ignore_ended
from grpo_ray.inference.rollout_function import FunctionSampler
from grpo_ray.inference.sampling import RunRound
from grpo_ray.tools.conversation import Conversation, ConversationSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationSource(Protocol):
    """Sampler of completions that are conversations."""

    def sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        generate: RunRound,
        *,
        is_any_active: Callable[[bool], bool] = bool,
        on_ended: Callable[[int, Conversation], None] = ignore_ended,
        on_result: Callable[[], None] = lambda: None,
    ) -> list[Conversation]:
        """Sample a completion for each row; see `ConversationSampler.sample`."""

    def metrics(self, summaries: Sequence[ConversationSummary]) -> dict[str, float]:
        """Compute the metrics of a step from the summaries of all workers' completions."""

    def close(self) -> None:
        """End the processes of all tools."""


def conversation_source(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_model_len: int,
    vocabulary_size: int,
    folder: str | None = None,
) -> ConversationSource | None:
    """Return the sampler that the section `rollout` configures; None if every completion is a single turn.

    Args:
        max_model_len: longest prompt with its completion, in tokens.
        vocabulary_size: number of the policy's token ids.
        folder: for temporary files of tools; None: the system's.

    Raises:
        ConfigError: a tool, an environment or the function cannot be used.
    """
    if config.rollout.function is not None:
        return FunctionSampler(config, tokenizer, max_model_len=max_model_len, vocabulary_size=vocabulary_size)
    if config.rollout.has_turns:
        return ConversationSampler(config, tokenizer, max_model_len, folder)
    return None
