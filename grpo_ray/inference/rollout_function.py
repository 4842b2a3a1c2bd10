"""Rollouts by a function of the user (`rollout.function`), with the run's engine, seeds and sampling.

    from grpo_ray import RolloutPolicy, RolloutRow, Trajectory

    def second_try(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = policy.start(rows)
        policy.turn(trajectories)
        wrong = [each for each in trajectories if each.row.solution not in each.text]
        policy.turn([each for each in wrong if policy.respond(each, "That is wrong. Try again.")])
        return trajectories

Training, held-out measuring and `grpo-ray eval` call the same function. It runs in the process of a worker, and gets
all rows that the worker draws for a step. The seed of each request is derived from the run, the problem, the epoch, the
index and the number of the row's earlier requests, so the result does not depend on the number of workers or on
restarts as long as the function itself depends on nothing else.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from grpo_ray.config.import_path import import_callable
from grpo_ray.config.schema import Config, RolloutConfig
from grpo_ray.data.problem import SOURCE, reward_columns
from grpo_ray.errors import ConfigError, RolloutError
from grpo_ray.inference.arguments import group_seed, request_seed
from grpo_ray.inference.conversation_sampler import ignore_ended
from grpo_ray.inference.sampling import Completion, RunRound, ignore_finished, limit_tokens
from grpo_ray.inference.trajectories import ROW_COLUMNS, Message, RolloutRow, Trajectory, TrajectoryRules
from grpo_ray.tools.conversation import Conversation, ConversationSummary, conversation_metrics
from grpo_ray.tools.template import ReplyTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.endpoint import Program

Prompt = Sequence[int] | Sequence[Message]
"""Token ids, or chat messages."""

RolloutFunction = Callable[[list[RolloutRow], "RolloutPolicy"], list[Trajectory]]
"""Function that returns a trajectory for each row, in the order of the rows."""

KEY = "rollout.function"

METRICS = (
    "rollout/turns_mean",
    "rollout/turns_max",
    "rollout/result_token_share",
    "rollout/cut_by_length_share",
    "rollout/lost_share",
    "rollout/unrewarded_share",
)
"""Conversation metrics that can be computed from trajectories. Metrics of tool calls cannot: the function makes the
calls itself."""


def load_rollout_function(rollout: RolloutConfig) -> RolloutFunction:
    """Import the function that `rollout.function` names, and bind its settings.

    Raises:
        ConfigError: it cannot be imported, or cannot be called with rows and policy.
    """
    path = rollout.function
    assert path is not None
    function, settings = import_callable(path, KEY), rollout.settings.get(path, {})
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if inspect.isfunction(function) else f"of the type {type(function).__name__}"
        raise ConfigError(f"{KEY}: {path} is {kind}; name a function, which may run its own event loop (asyncio.run)")
    where = f"{KEY}: {path} ({inspect.unwrap(function).__code__.co_filename})"
    signature = inspect.signature(function)
    if list(signature.parameters)[:2] == ["prompts", "trainer"]:
        raise ConfigError(
            f"{where} has the signature of TRL's rollout_func, (prompts, trainer), whose requests have no seeds of "
            "their own; change it to (rows, policy), as in grpo_ray's documentation (Tools and environments)"
        )
    try:
        signature.bind([], None, **settings)
    except TypeError as error:
        given = f"rows, policy and rollout.settings {sorted(settings)}" if settings else "rows and policy"
        raise ConfigError(f"{where} cannot be called with {given}: {error}") from None
    return partial(function, **settings)


class RolloutPolicy:
    """Policy that a rollout function samples from.

    May be used only in the thread that calls the function, and only until the function returns.
    """

    tokenizer: "PreTrainedTokenizerBase"
    """The policy's tokenizer."""
    max_completion_length: int
    """Maximum number of tokens of a trajectory after its prompt, `grpo.max_completion_length`."""
    max_model_len: int
    """Maximum number of tokens of a prompt with its completion."""

    def __init__(
        self,
        rows: Sequence[RolloutRow],
        *,
        config: Config,
        path: str,
        template: ReplyTemplate,
        rules: TrajectoryRules,
        sampling: Mapping[str, Any],
        run_round: RunRound,
        is_any_active: Callable[[bool], bool],
        note_progress: Callable[[], None],
    ) -> None:
        """
        Args:
            rows: rows of the function's call.
            path: path of the function, for messages.
            template: the policy's chat template.
            rules: conditions of prompts and trajectories.
            sampling: arguments of `vllm.SamplingParams` for a completion, without its seed.
            run_round: runs requests on the engine.
            is_any_active: called before each round; collective among the workers that share the engine.
            note_progress: called after each sign of progress.
        """
        self.tokenizer = template.tokenizer
        self.max_completion_length, self.max_model_len = rules.max_completion_length, rules.max_model_len
        self._config, self._path, self._template, self._rules = config, path, template, rules
        self._sampling, self._run_round, self._is_any_active = dict(sampling), run_round, is_any_active
        self._note_progress = note_progress
        self._places = {row.key: place for place, row in enumerate(rows)}
        self._calls: Counter[tuple[str, int, int]] = Counter()
        """Requests of each row so far."""
        self._roles: set[str] = set()
        """Roles of messages that the template can append."""

    def start(self, rows: Sequence[RolloutRow]) -> list[Trajectory]:
        """Return a new trajectory for each row, with the tokens of the row's prompt only."""
        prompts = self.render([row.prompt for row in rows])
        return [Trajectory(row, ids) for row, ids in zip(rows, prompts, strict=True)]

    def turn(self, trajectories: Sequence[Trajectory], max_tokens: int | Sequence[int] | None = None) -> None:
        """Let the policy take a turn in each trajectory: append its tokens, and a message with their text.

        Args:
            max_tokens: maximum number of tokens of a turn, one value for all turns or one for each; None: as many as
                there is space for.

        Raises:
            RolloutError: a trajectory has no space for a turn.
        """
        limits = self.max_model_len if max_tokens is None else max_tokens
        most = limits if isinstance(limits, Sequence) else [limits] * len(trajectories)
        for each in trajectories:
            if self.space(each) < 1:
                raise self._error(each.row, "there is no space for a turn; test `policy.space(trajectory)` before")
        completions = self.generate(
            [each.row for each in trajectories],
            [each.context for each in trajectories],
            max_tokens=[min(self.space(each), limit) for each, limit in zip(trajectories, most, strict=True)],
        )
        for each, completion in zip(trajectories, completions, strict=True):
            each.messages.append(self._template.parse(each.context, completion.token_ids).message)
            each.add_turn(completion)

    def respond(self, trajectory: Trajectory, content: str, role: str = "user") -> bool:
        """Append a message to a trajectory after the policy's turn, as the chat template renders it.

        Control tokens of the template in the content are broken up into plain text, and the middle of content longer
        than `rollout.max_result_tokens` is left out.

        Args:
            role: "user" or "tool".

        Returns:
            True if the message was appended. False if the turn was cut off, or the message leaves no space for another
            turn: the trajectory is then marked as truncated, and nothing is appended.

        Raises:
            RolloutError: the policy has taken no turn since the start or the last message.
            ConfigError: the chat template cannot render such a message after a turn.
        """
        self._note_progress()
        if trajectory.truncated:
            return False
        if not (trajectory.mask and trajectory.mask[-1]):  # `result_ids` are the tokens after a turn, not a message
            raise self._error(
                trajectory.row, "a message must follow a turn of the policy; call `policy.turn` before it"
            )
        if role not in self._roles:
            self._template.require_appending([role])
            self._roles.add(role)
        message = {"role": role, "content": self._template.neutralize(content, self._config.rollout.max_result_tokens)}
        ids = self._template.result_ids([message])
        if len(ids) >= self.space(trajectory):
            trajectory.truncated = True
            return False
        trajectory.add_tokens(ids)
        trajectory.messages.append(message)
        return True

    def space(self, trajectory: Trajectory) -> int:
        """Return the number of tokens that still fit into a trajectory."""
        left = self.max_completion_length - len(trajectory.token_ids)
        return min(left, self.max_model_len - len(trajectory.context))

    def generate(
        self,
        rows: Sequence[RolloutRow],
        prompts: Sequence[Prompt] | None = None,
        *,
        max_tokens: int | Sequence[int] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Run one request per row on the engine, all in one round.

        A row may be given several times. Nothing is appended to a trajectory, so requests whose tokens are not trained
        on can be made too.

        Args:
            rows: (N,) rows that the requests are for, which determine their seeds.
            prompts: (N,) token ids, or messages that the chat template renders; None: the rows' own prompts.
            max_tokens: maximum number of tokens of each completion; None: `grpo.max_completion_length`.
            stop: stop strings, in place of the run's own.

        Returns:
            (N,) completions: `token_ids`, `logps`, `unprocessed_logps` and `truncated`.

        Raises:
            RolloutError: a row is not one of this call, or a prompt cannot be completed.
        """
        if not rows:
            return []
        token_ids = self._prompt_ids(rows, prompts)
        limits = max_tokens if isinstance(max_tokens, Sequence) else [max_tokens] * len(rows)
        if len(limits) != len(rows):
            raise self._error(rows[0], f"generate got {len(limits)} max_tokens for {len(rows)} rows")
        for row, ids in zip(rows, token_ids, strict=True):
            if row.key not in self._places:
                raise self._error(row, "generate got a row that the function was not called with")
            if found := self._rules.prompt_mistake(ids):
                raise self._error(row, f"generate got a prompt that cannot be completed: {found}")
        requests = [self._request(row, limit, stop) for row, limit in zip(rows, limits, strict=True)]
        self._is_any_active(True)  # workers whose function has returned take part in the round
        completions = self._run_round(token_ids, requests, ignore_finished)
        self._note_progress()
        return completions

    def render(self, prompts: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the token ids of chats, up to the beginning of the policy's turn."""
        from grpo_ray.models.tokenizer import tokenize_prompts  # public names must not import transformers

        chats = [[dict(message) for message in prompt] for prompt in prompts]
        return tokenize_prompts(self.tokenizer, chats, self._config.chat_template_kwargs)

    def run_programs(self, rows: Sequence[RolloutRow], program: "Program") -> list[Trajectory]:
        """Run one program per row, which samples its turns through an OpenAI-compatible endpoint of the engine.

        Each program is called in a thread of its own, with address and key of the endpoint, and may start processes. At
        most `rollout.max_active` run at the same time. The endpoint is closed when all have ended.

        Args:
            rows: rows of this call, each at most once.
            program: called with the `EndpointAccess` of a row; an exception in it is raised here.

        Returns:
            The trajectory of each row, with all turns sampled with its key.

        Raises:
            RolloutError: a row is not one of this call, or is given twice.
        """
        from grpo_ray.inference.endpoint import Endpoint  # imports the server, which most functions do not use

        counts = Counter(row.key for row in rows)
        for row in rows:
            if row.key not in self._places or counts[row.key] > 1:
                found = "twice" if row.key in self._places else "that the function was not called with"
                raise self._error(row, f"run_programs got a row {found}")
        if not rows:
            return []
        return Endpoint(
            self,
            self.start(rows),
            rules=self._rules,
            sampling=self._sampling,
            at_once=self._config.rollout.max_active,
        ).run(program)

    def note_progress(self) -> None:
        """Report progress. Without requests or progress for `run.hang_seconds`, the run counts as hanging."""
        self._note_progress()

    def _prompt_ids(self, rows: Sequence[RolloutRow], prompts: Sequence[Prompt] | None) -> list[list[int]]:
        """Return the prompts as token ids; chats among them are rendered together."""
        given: Sequence[Any] = [row.prompt for row in rows] if prompts is None else prompts
        if len(given) != len(rows):
            raise self._error(rows[0], f"generate got {len(given)} prompts for {len(rows)} rows")
        is_chat = [bool(prompt) and isinstance(prompt[0], Mapping) for prompt in given]
        rendered = iter(self.render([prompt for prompt, chat in zip(given, is_chat, strict=True) if chat]))
        return [next(rendered) if chat else prompt for prompt, chat in zip(given, is_chat, strict=True)]

    def _request(self, row: RolloutRow, max_tokens: int | None, stop: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of `vllm.SamplingParams` for the row's next request."""
        if max_tokens is not None and max_tokens < 1:
            raise self._error(row, f"generate got max_tokens={max_tokens}; it must be at least 1")
        seed = request_seed(self._config.run.seed, *row.key, self._calls[row.key])
        self._calls[row.key] += 1
        arguments = self._sampling if max_tokens is None else limit_tokens(self._sampling, max_tokens)
        # vLLM needs the text to find a stop string in it.
        return arguments | {"seed": seed} | ({"stop": list(stop), "detokenize": True} if stop else {})

    def _error(self, row: RolloutRow, text: str) -> RolloutError:
        return rollout_error(self._path, self._places.get(row.key), row, text)


def rollout_error(path: str, place: int | None, row: RolloutRow, text: str) -> RolloutError:
    """Return the error of a rollout function, which names the function, the row and the problem."""
    return RolloutError(f"{KEY}: {path}, row {'-' if place is None else place} ({row}): {text}")


class FunctionSampler:
    """Sampler of completions by the function of `rollout.function`."""

    def __init__(
        self, config: Config, tokenizer: "PreTrainedTokenizerBase", *, max_model_len: int, vocabulary_size: int
    ) -> None:
        """
        Args:
            max_model_len: longest prompt with its completion, in tokens.
            vocabulary_size: number of the policy's token ids.

        Raises:
            ConfigError: as `load_rollout_function`.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.path = str(config.rollout.function)
        self.function = load_rollout_function(config.rollout)
        self.rules = TrajectoryRules(
            config.grpo.max_completion_length, max_model_len, vocabulary_size, tuple(config.sampling.processing)
        )

    @cached_property
    def template(self) -> ReplyTemplate:
        """The policy's chat template."""
        return ReplyTemplate(self.tokenizer, self.config.chat_template_kwargs, optional_roles=("user", "tool"))

    def close(self) -> None:
        """Do nothing: a function has no processes."""

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
        """Let the function sample a completion for each row; the arguments are those of `ConversationSampler.sample`.

        Workers that share an engine may make different numbers of requests: one whose function has returned takes part
        in the rounds of the others, without prompts of its own.

        Raises:
            RolloutError: the function made a request, or returned a result, that cannot be used.
        """
        conversations = []
        if rows:
            assigned = [self.assign(row) for row in rows]
            policy = RolloutPolicy(
                assigned,
                config=self.config,
                path=self.path,
                template=self.template,
                rules=self.rules,
                # Held-out measuring requests no log-probabilities, but the function may read them.
                sampling={"logprobs": 0, **sampling},
                run_round=generate,
                is_any_active=is_any_active,
                note_progress=on_result,
            )
            trajectories = self.check(self.function(list(assigned), policy), assigned)
            sources = (row.get(SOURCE, "") for row in rows)
            conversations = [self.conversation(*each) for each in zip(trajectories, sources, strict=True)]
        for row, conversation in enumerate(conversations):
            on_ended(row, conversation)
        while is_any_active(False):
            generate([], [], ignore_finished)
        return conversations

    def assign(self, row: Mapping[str, Any]) -> RolloutRow:
        """Build the function's row from a row of `Problem.as_row`."""
        seed, problem, epoch, index = self.config.run.seed, row["id"], row["epoch"], row["index"]
        columns = reward_columns(row)
        return RolloutRow(
            prompt=row["prompt"],
            solution=row["solution"],
            columns={name: value for name, value in columns.items() if name not in ROW_COLUMNS},
            id=problem,
            epoch=epoch,
            index=index,
            seed=request_seed(seed, problem, epoch, index),
            group_seed=group_seed(seed, problem, epoch),
        )

    def check(self, returned: Any, rows: Sequence[RolloutRow]) -> list[Trajectory]:
        """Validate the function's result, and return it.

        Raises:
            RolloutError: it is not a list with a trajectory for each row, in order, or a trajectory breaks a rule.
        """
        where = f"{KEY}: {self.path}"
        if not isinstance(returned, list):
            raise RolloutError(f"{where} must return a list of Trajectory, not {type(returned).__name__}")
        if len(returned) != len(rows):
            raise RolloutError(f"{where} must return a trajectory for each of {len(rows)} rows; got {len(returned)}")
        for place, (row, trajectory) in enumerate(zip(rows, returned, strict=True)):
            if found := self._mistake(trajectory, row, returned[0]):
                raise rollout_error(self.path, place, row, found)
        return returned

    def _mistake(self, trajectory: Any, row: RolloutRow, first: Trajectory) -> str | None:
        if not isinstance(trajectory, Trajectory):
            return f"the result must be a Trajectory, not {type(trajectory).__name__}"
        if trajectory.row != row:
            return f"the trajectory is of another row ({trajectory.row}); keep the order of the rows"
        if found := self.rules.mistake(trajectory):
            return found
        if trajectory.columns.keys() != first.columns.keys():
            return f"columns has {sorted(trajectory.columns)}, and the first trajectory {sorted(first.columns)}"
        return None

    def conversation(self, trajectory: Trajectory, source: str = "") -> Conversation:
        """Convert a trajectory to the conversation that learner, rewards and records use.

        Args:
            source: source of a mixture that its problem belongs to.
        """
        own = [token for token, is_own in zip(trajectory.token_ids, trajectory.mask, strict=True) if is_own]
        messages = trajectory.messages or [self.template.parse(trajectory.prompt_ids, own).message]
        starts = zip([0, *trajectory.mask], trajectory.mask, strict=False)
        rewards = self.config.rewards_of(source)
        return Conversation(
            prompt_ids=trajectory.prompt_ids,
            token_ids=trajectory.token_ids,
            logps=list(trajectory.logps),
            unprocessed_logps=list(trajectory.unprocessed_logps) if self.rules.processing else None,
            own=trajectory.mask,
            messages=messages,
            reward=None if trajectory.failed else trajectory.reward,
            ended="tool" if trajectory.failed else "length" if trajectory.truncated else "stop",
            turns=sum(before < is_own for before, is_own in starts),
            calls=[],
            unrewarded=not trajectory.failed and trajectory.reward is None and "environment" in rewards,
            columns=trajectory.columns,
            truncated=trajectory.truncated,
        )

    def metrics(self, summaries: Sequence[ConversationSummary]) -> dict[str, float]:
        """Compute the metrics of a step from the summaries of all workers' completions."""
        metrics = conversation_metrics(summaries)
        return {name: metrics[name] for name in METRICS}
