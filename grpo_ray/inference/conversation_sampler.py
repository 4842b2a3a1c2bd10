"""Sampler of multi-turn completions: the run's tools and environments, with the run's seeds and sampling arguments.

Training, held-out measuring and evaluation use the same class; they differ in the engine and the temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.config.tool_paths import NO_ENVIRONMENT
from grpo_ray.data.problem import SOURCE, reward_columns
from grpo_ray.errors import ConfigError
from grpo_ray.inference.arguments import group_seed, request_seed
from grpo_ray.inference.sampling import limit_tokens
from grpo_ray.tools.conversation import Conversation, ConversationSummary, Episode, Start, conversation_metrics
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.open_conversation import OpenConversation
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits
from grpo_ray.tools.template import ToolTemplate
from grpo_ray.tools.turn_loop import Generate, TurnLoop, ignore_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT = "environment"
"""Column of a problem that names its environment, if `rollout.environment` has several."""


NO_LIMIT = 1 << 40
"""Context length that stands for no limit."""


def ignore_ended(row: int, conversation: Conversation) -> None:
    """Do nothing."""


class ConversationSampler:
    """Sampler of completions that use tools or an environment; as a context manager it ends their processes on exit."""

    def __init__(
        self,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        max_model_len: int = NO_LIMIT,
        folder: str | None = None,
    ):
        """
        Args:
            max_model_len: longest prompt with its completion, in tokens.
            folder: for temporary files of tools; None: the system's.

        Raises:
            ConfigError: a tool or environment cannot be used, or the chat template cannot render its calls.
        """
        self.config = config
        self.max_model_len = max_model_len
        self.definition = load_definition(config.rollout)
        self._require_rewards()
        has_step = any(each.has_step for each in self.definition.environments.values())
        roles = ("tool", "user") if has_step else ("tool",)
        self.template = ToolTemplate(tokenizer, config.chat_template_kwargs, roles)
        self.pool = EpisodePool(self.definition, SandboxLimits.of(config.rollout), folder, config.rollout.variables)

    def _require_rewards(self) -> None:
        """Raise ConfigError if `environment` is the only reward and one of the environments does not compute it."""
        if tuple(self.config.rewards.functions) != ("environment",):
            return
        for facts in self.definition.environments.values():
            if not facts.has_reward:
                raise ConfigError(
                    f"rewards.functions has only `environment`, but {facts.path} has no method get_reward; add one, or "
                    "another reward function"
                )

    def __enter__(self) -> "ConversationSampler":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of all tools."""
        self.pool.close()

    def sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        generate: Generate,
        *,
        is_any_active: Callable[[bool], bool] = bool,
        on_ended: Callable[[int, Conversation], None] = ignore_ended,
        on_result: Callable[[], None] = lambda: None,
    ) -> list[Conversation]:
        """Sample a completion for each row.

        Args:
            rows: (B,) rows of `Problem.as_row`.
            sampling: arguments of `vllm.SamplingParams` for a completion, without its seed.
            generate: runs one round on the engine.
            is_any_active: collective among the workers that share the engine, see `TurnLoop`.
            on_ended: called with the row and the conversation as soon as it has ended.
            on_result: called after each result, as a sign of progress.

        Returns:
            (B,) conversations.

        Raises:
            DataError: a problem names no environment, or one that does not exist.
        """
        loop = self.turn_loop(generate, is_any_active=is_any_active, on_ended=on_ended, on_result=on_result)
        return loop.run([self.begin(row, sampling) for row in rows])

    def turn_loop(
        self,
        generate: Generate,
        *,
        is_any_active: Callable[[bool], bool],
        on_ended: Callable[[int, Conversation], None],
        on_result: Callable[[], None],
        on_turn: Callable[[int, list[int], Any], None] = ignore_turn,
    ) -> TurnLoop:
        """Return the loop of the turns of some conversations; the arguments are those of `sample`.

        Args:
            on_turn: see `TurnLoop`.
        """
        return TurnLoop(
            template=self.template,
            definition=self.definition,
            pool=self.pool,
            limits=self.config.rollout,
            max_completion_length=self.config.grpo.max_completion_length,
            max_model_len=self.max_model_len,
            generate=generate,
            is_any_active=is_any_active,
            on_ended=on_ended,
            on_result=on_result,
            on_turn=on_turn,
        )

    def begin(self, row: Mapping[str, Any], sampling: Mapping[str, Any]) -> OpenConversation:
        """Return a row's conversation before its first turn; the arguments are those of `sample`."""
        start = self.start(row, sampling)
        return OpenConversation(0, start, self.definition.tool_set(start.environment))

    def metrics(self, summaries: Sequence[ConversationSummary]) -> dict[str, float]:
        """Compute the metrics of a step from the summaries of all workers' completions."""
        return conversation_metrics(summaries)

    def open(self, start: Start) -> Episode:
        """Open the processes of one completion."""
        return self.pool.open(start.environment, start.seed, start.columns, start.call_seed)

    def start(self, row: Mapping[str, Any], sampling: Mapping[str, Any]) -> Start:
        """Return the initial state of a row's completion; the arguments are those of `sample`."""
        seed, problem, epoch, index = self.config.run.seed, row["id"], row["epoch"], row["index"]

        def sampling_of_turn(turn: int, tokens_left: int) -> dict[str, Any]:
            return limit_tokens(sampling, tokens_left) | {"seed": request_seed(seed, problem, epoch, index, turn)}

        columns = reward_columns(row)
        environment = columns.pop(ENVIRONMENT, None) if None not in self.definition.environments else None
        if environment is None and SOURCE in row and self.definition.has_named:
            environment = NO_ENVIRONMENT  # a source without an environment, in a mixture that has some with one
        return Start(
            messages=row["prompt"],
            environment=environment,
            columns=columns,
            seed=group_seed(seed, problem, epoch),
            call_seed=request_seed(seed, problem, epoch, index),
            sampling=sampling_of_turn,
        )
