"""Chat templates with tools: prompts that describe them, turns that call them, and the tokens of their results.

Tokens are never rendered again. The tokens of a turn stay as the engine generated them, and the tokens of a result are
those that the template adds to a conversation that ends with a turn, as in TRL's loop.
"""

import contextlib
import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from grpo_ray.errors import ConfigError
from grpo_ray.models.plain_prompts import uses_plain_prompts
from grpo_ray.tools.definitions import NO_TOOLS, ToolSet
from grpo_ray.tools.turn_reader import TurnReader, UnreadTurnError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

CONTROL = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
"""Form of added tokens that are marks in templates, such as `<tool_call>` or `[INST]`, even if not special tokens."""
BREAK = "\u200b"
"""Zero-width space that breaks up the text of a control token."""

GRAMMARS = ("response_template", "response_schema")
"""Attributes of a tokenizer with which transformers reads calls from a turn."""
MAX_CHARS_PER_TOKEN = 64
"""Maximum characters of a result per token of its limit; the middle of a longer one is cut before tokenizing."""


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool in a turn of the policy."""

    name: str
    arguments: Mapping[str, Any] | None
    """None if they are not the fields of an object."""


@dataclass(frozen=True)
class AssistantTurn:
    """Turn of the policy."""

    message: Message
    calls: Sequence[ToolCall]
    is_unread: bool = False
    """True if its text exceeds a limit of `turn_reader`, and was not read for calls."""


_reader = TurnReader()
"""Client of the process that reads turns, shared by all templates of this trainer process."""


def close_reader() -> None:
    """End the process that reads turns, which uses 65 MB of memory. The next turn starts another one."""
    _reader.close()


class _ReadingTokenizer:
    """Tokenizer for TRL's `parse_response` that delegates the reading of turns to `turn_reader`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        self.response_template = getattr(tokenizer, "response_template", None)
        self.eos_token = tokenizer.eos_token
        self.decode = tokenizer.decode
        self.is_unread = False

    def parse_response(self, ids: list[int], prefix: list[int] | None = None, tools: Any = None) -> Message:
        """Read a turn. Raises ValueError if that is impossible."""
        if self.response_template is None or prefix is None:  # `turn_reader` needs both
            return self.tokenizer.parse_response(ids)
        texts = [str(self.decode(each)) for each in (ids, prefix)]
        try:
            return _reader.read(texts[0], self.response_template, texts[1], tools)
        except UnreadTurnError:
            self.is_unread = True
            raise


def _read_message(
    tokenizer: "PreTrainedTokenizerBase", prefix: Sequence[int], ids: Sequence[int], tools: ToolSet
) -> tuple[Message, bool]:
    """Read the message of a turn; a turn that cannot be read is text, and so is every turn without a grammar.

    Args:
        prefix: token ids before the turn.
        ids: token ids of the turn.

    Returns:
        The message; and True if the turn exceeds a limit of `turn_reader`.
    """
    from trl.chat_template_utils import parse_response

    reading = _ReadingTokenizer(tokenizer)
    try:
        if _has_grammar(tokenizer):
            read = _encodable(parse_response(cast(Any, reading), list(ids), list(prefix), tools.schemas))
        else:
            read = {"content": tokenizer.decode(list(ids), skip_special_tokens=True)}
    except RecursionError:  # a call with hundreds of nested brackets
        read = {"content": tokenizer.decode(list(ids), skip_special_tokens=True)}
    return {"content": "", **read, "role": "assistant"}, reading.is_unread


def _has_grammar(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return any(getattr(tokenizer, grammar, None) for grammar in GRAMMARS)


def _is_prefix_preserving(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return True if the chat template renders a conversation as a prefix of the same one with results of a tool."""
    from jinja2 import TemplateError
    from trl.chat_template_utils import is_chat_template_prefix_preserving

    try:
        return bool(is_chat_template_prefix_preserving(tokenizer))
    except TemplateError:  # the template refuses messages of the role tool, as those of Gemma do
        return False


def _training_template(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Return TRL's training version of the chat template as the variable `chat_template`; {} if TRL has none."""
    from trl.chat_template_utils import get_training_chat_template

    with contextlib.suppress(ValueError):
        if template := get_training_chat_template(tokenizer):
            return {"chat_template": template}
    return {}


def _require_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    if uses_plain_prompts(tokenizer):
        raise ConfigError(
            f"rollout: {tokenizer.name_or_path} has no chat template, which completions of several turns need; use a "
            "policy with one, or set its tokenizer's chat template"
        )


class ReplyTemplate:
    """The chat template of a policy, by which messages are appended to the policy's turns."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        variables: Mapping[str, Any],
        roles: Sequence[str] = (),
        optional_roles: Sequence[str] = (),
    ):
        """
        Args:
            variables: further variables of the template, `Config.chat_template_kwargs`.
            roles: roles of messages that will follow a turn.
            optional_roles: roles of messages that may follow a turn, if the template can render them.

        Raises:
            ConfigError: there is no template, or it cannot render messages of `roles` after a turn.
        """
        _require_template(tokenizer)
        self.tokenizer = tokenizer
        self._variables = dict(variables)
        if not _is_prefix_preserving(tokenizer) or not self._appends(roles):
            self._variables |= _training_template(tokenizer)
            self.require_appending(roles)
        elif not self._appends(optional_roles):
            own, appended = self._variables, self._count_appended(optional_roles)
            self._variables = own | _training_template(tokenizer)
            if not self._appends(roles) or self._count_appended(optional_roles) <= appended:
                self._variables = own
        self._control = control_tokens(self.tokenizer)

    def _count_appended(self, roles: Sequence[str]) -> int:
        return sum(self._appends([role]) for role in roles)

    def _appends(self, roles: Sequence[str]) -> bool:
        """Return True if messages of these roles can be appended to a turn."""
        try:
            self.require_appending(roles)
        except ConfigError:
            return False
        return True

    def require_appending(self, roles: Sequence[str]) -> None:
        """Raise ConfigError if messages of these roles cannot be appended to a turn."""
        from jinja2 import TemplateError

        for role in roles:
            try:
                self.result_ids([{"role": role, "name": "tool", "content": "-"}])
            except TemplateError as error:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path} does not render a message of the role {role} "
                    f"after a turn: {error}"
                ) from None

    def _apply(self, messages: Sequence[Message], **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **options, **self._variables
        )
        return ids

    def parse(self, prefix: Sequence[int], ids: Sequence[int], tools: ToolSet = NO_TOOLS) -> AssistantTurn:
        """Read a turn of the policy. If the tokenizer has no grammar, the whole turn is text.

        Args:
            prefix: token ids before the turn.
            ids: token ids of the turn.
        """
        message, is_unread = _read_message(self.tokenizer, prefix, ids, tools)
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = function.get("arguments")
            calls.append(ToolCall(str(function.get("name")), arguments if isinstance(arguments, dict) else None))
        return AssistantTurn(message, calls, is_unread)

    def result_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids that follow a turn: messages of tools or of the user, and the start of the next turn.

        They are the tokens that the template adds to a short conversation after the end of its turn; the policy has
        generated that end itself.
        """
        call = {"type": "function", "function": {"name": messages[0].get("name", ""), "arguments": {}}}
        turn: Message = {"role": "assistant", "content": ""}
        if messages[0]["role"] == "tool":
            turn["tool_calls"] = [call]
        before = [{"role": "user", "content": "-"}, turn]
        prefix = self._apply(before)
        whole = self._apply([*before, *messages], add_generation_prompt=True)
        ends = [place for place, token in enumerate(prefix) if token == self.tokenizer.eos_token_id]
        if ends:  # some templates add text after the end of a turn, such as a line break
            prefix = prefix[: ends[-1] + 1]
        if whole[: len(prefix)] != prefix:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} renders a turn in another way once a result "
                "follows it, so that results cannot be appended to the policy's turns"
            )
        return whole[len(prefix) :]

    def neutralize(self, text: str, max_tokens: int) -> str:
        """Return a result with its control tokens broken up, and without its middle if it is too long.

        Args:
            text: result of a tool; it may contain the texts of control tokens, by accident or on purpose.
            max_tokens: most tokens that stay, not counting the mark in place of the omitted middle.
        """
        text = self._break_up(_encodable(text))
        most = MAX_CHARS_PER_TOKEN * max_tokens
        # A very long text is cut before tokenizing, to save time.
        parts = [text] if len(text) <= most else [text[: most // 2], text[-(most // 2) :]]
        ids = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        if len(parts) == 1 and len(ids[0]) <= max_tokens:
            return text
        head = (max_tokens + 1) // 2
        tail = max_tokens - head
        start, end = (self.tokenizer.decode(each) for each in (ids[0][:head], ids[-1][max(0, len(ids[-1]) - tail) :]))
        return self._break_up(f"{start} [... cut: a result may have {max_tokens} tokens ...] {end}")

    def _break_up(self, text: str) -> str:
        return break_up(text, self._control)


def break_up(text: str, control: re.Pattern[str] | None) -> str:
    """Break up the texts of control tokens (`control_tokens`), so that they are tokenized like any other text."""
    if control is None:
        return text
    return control.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)


class ToolTemplate(ReplyTemplate):
    """The chat template of a policy that may call tools."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        variables: Mapping[str, Any],
        roles: Sequence[str] = ("tool", "user"),
    ):
        """
        Args:
            variables: further variables of the template, `Config.chat_template_kwargs`.
            roles: roles of messages that follow a turn: "tool", and "user" if an environment answers turns.

        Raises:
            ConfigError: there is no template, it cannot render calls and results, or calls cannot be read from the
                policy's text.
        """
        _require_template(tokenizer)
        from trl import chat_template_utils as trl_templates

        name = tokenizer.name_or_path
        if not trl_templates.supports_tool_calling(tokenizer):
            raise ConfigError(
                f"rollout.tools, rollout.environment: the chat template of {name} does not render calls of tools and "
                "their results; use a policy that was trained with tools, or set its tokenizer's chat template"
            )
        has_grammar = _has_grammar(tokenizer)
        try:
            tokenizer = copy.deepcopy(tokenizer)  # the given one is saved with the policy
            if not has_grammar:
                trl_templates.add_response_schema(tokenizer)
        except ValueError as error:
            raise ConfigError(
                f"rollout.tools, rollout.environment: TRL does not know the chat template of {name}, so calls cannot "
                f"be read from its text ({str(error).splitlines()[0]}); save `response_template` with its tokenizer"
            ) from None
        super().__init__(tokenizer, variables, roles)
        _reader.start()  # while the engine generates the first turn

    def render(self, prompts: Sequence[Sequence[Message]], tools: Sequence[ToolSet]) -> list[list[int]]:
        """Return the token ids of (B,) prompts, each with the descriptions of its own tools."""
        return [
            self._apply(prompt, add_generation_prompt=True, tools=each.schemas or None)
            for prompt, each in zip(prompts, tools, strict=True)
        ]


def _encodable(value: Any) -> Any:
    """Replace lone surrogates in all texts of a JSON value: JSON can express them, but UTF-8 and tokenizers cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list) else value


def control_tokens(tokenizer: "PreTrainedTokenizerBase", without: Collection[str] = ()) -> re.Pattern[str] | None:
    """Return a pattern of all tokens that a template may use as marks, except some; None if there are none."""
    texts = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if len(token.content) > 1 and (token.special or CONTROL.fullmatch(token.content))
    }
    texts |= {text for text in tokenizer.all_special_tokens if len(text) > 1}
    ordered = sorted(texts.difference(without), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def assistant_messages(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the message of each completion, (B,): its text, or its parts where the tokenizer has a grammar for them.

    Each is read as a turn of `ReplyTemplate`, under the limits of `turn_reader`: grammars may come from a stranger's
    policy, and the texts from any policy.

    Args:
        prompts: (B,) token ids of the rendered prompts.
        completions: (B,) token ids.

    Raises:
        ToolError: the process that reads turns cannot run.
    """
    if _has_grammar(tokenizer):
        pairs = zip(prompts, completions, strict=True)
        return [_read_message(tokenizer, prompt, own, NO_TOOLS)[0] for prompt, own in pairs]
    from grpo_ray.models.tokenizer import decode_texts

    return [{"role": "assistant", "content": text} for text in decode_texts(tokenizer, completions)]
