"""Sampling options of the section `grpo`: fields of TRL's and entries of its `generation_kwargs`, with their ranges.

The engine samples with these options in training, in held-out measuring and in `grpo-ray eval`. An option is accepted
only if the weight sync can be proven with it, and if a completion depends on its seed and the weights only.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError

from grpo_ray.config.fields import field_descriptions, type_adapter
from grpo_ray.errors import ConfigError

if TYPE_CHECKING:
    from grpo_ray.config.schema import GrpoConfig

MIN_TEMPERATURE = 0.01
"""Lowest temperature other than 0: vLLM raises lower ones to this, and the learner would not."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Required form of all completions, one of the first four fields; engine and learner exclude all other tokens."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", revalidate_instances="always", allow_inf_nan=False
    )

    regex: Annotated[str, Field(min_length=1)] | None = None
    """Regular expression that matches the whole completion."""
    json: Mapping[str, Any] | None = None
    """JSON schema of the document that is the completion; {}: any document."""
    choice: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Allowed completions."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """Context-free grammar of the completion, in EBNF with the start symbol `root` (GBNF, as in llama.cpp)."""

    compact: bool = False
    """Allow no white space between the parts of a JSON document."""

    @property
    def given(self) -> dict[str, Any]:
        """The forms that are set, as plain values; exactly one in a valid config."""
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
            if value is not None and name != "compact"
        }


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that completions are sampled with, under the names of `vllm.SamplingParams`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, revalidate_instances="always", allow_inf_nan=False
    )

    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Divisor of the logits, of engine and learner: a part of the policy that is trained."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens whose probabilities sum up to this share. 1: off."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample from this number of most probable tokens. 0 or -1: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum probability of a token, as a share of the most probable token's. 0: off."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty factor on the logits of tokens that the prompt or the completion already contains. 1: off."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the completion already contains. 0: off."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each of its occurrences in the completion. 0: off."""
    logit_bias: dict[TokenId, float] = dataclasses.field(default_factory=dict)
    """Token id -> number added to its logit. {}: off."""
    allowed_token_ids: list[TokenId] = dataclasses.field(default_factory=list)
    """The only tokens that may be sampled. []: all."""
    bad_words: list[str] = dataclasses.field(default_factory=list)
    """Words that are never sampled. []: off."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before which a completion cannot end. 0: off."""
    stop: str | list[str] = dataclasses.field(default_factory=list)
    """Strings that end a completion; they remain part of it. []: off."""
    stop_token_ids: list[TokenId] = dataclasses.field(default_factory=list)
    """Tokens that end a completion, besides the model's own. []: off."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text in which `stop` is searched."""
    structured_outputs: StructuredOutputs | None = None
    """Form of all completions, from `rollout.structured_outputs`. null: off."""

    @property
    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, as plain values."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(DEFAULTS, name)}
        return changed | ({"structured_outputs": self.structured_outputs.given} if self.structured_outputs else {})

    @property
    def processing(self) -> list[str]:
        """Names of the options in use under which tokens are not sampled from the policy's own probabilities.

        The engine then samples from processed logits: it excludes tokens, or shifts logits, and renormalizes.
        """
        disabled = {"top_k": -1}
        return [name for name in PROCESSING if name in self.changed and getattr(self, name) != disabled.get(name)]

    @property
    def ends_early(self) -> bool:
        """True if a completion can end with anything other than the model's end token."""
        return bool(self.stop or self.stop_token_ids)


DEFAULTS = SamplingOptions()

PROCESSING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens",
)  # fmt: skip
"""Options with which the engine changes the logits in other ways than dividing them by the temperature."""

TRL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options that are also fields of TRL; the others can be set in its `generation_kwargs` only."""

SET_IN_ROLLOUT = "is set in rollout.structured_outputs, such as {regex: '[0-9]+'}"

REFUSED = {
    "temperature": "would not reach the learner, which must use the same one; set grpo.temperature",
    "max_tokens": "is another name of grpo.max_completion_length; set that",
    "n": "is another name of grpo.num_generations; set that",
    "seed": "has no effect, since each completion has a seed of its own; set run.seed",
    "structured_outputs": SET_IN_ROLLOUT,
    "logprobs": "is determined by the proof of the weight sync; remove it",
    "ignore_eos": "would continue a completion after its end; remove it",
}
"""Entry of `generation_kwargs` that is refused -> the reason, and the alternative."""


def sampling_options(grpo: "GrpoConfig", structured_outputs: StructuredOutputs | None = None) -> SamplingOptions:
    """Collect the sampling options of the section `grpo`; entries of `generation_kwargs` override TRL's fields.

    Args:
        structured_outputs: form of all completions.

    Raises:
        ConfigError: an option is unknown, is refused, or has a wrong value.
    """
    given = grpo.trl.get("generation_kwargs") or {}
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"grpo.generation_kwargs.{name} {REFUSED[name]}")
        if name not in vars(DEFAULTS):
            supported = ", ".join(sorted(set(vars(DEFAULTS)) - set(REFUSED)))
            raise ConfigError(f"grpo.generation_kwargs.{name} is not supported; supported are {supported}")
    paths = {name: f"grpo.{name}" for name in TRL_FIELDS} | {name: f"grpo.generation_kwargs.{name}" for name in given}
    options = {name: grpo.trl.get(name) for name in TRL_FIELDS} | dict(given)
    try:
        sampling: SamplingOptions = type_adapter(SamplingOptions).validate_python(
            SamplingOptions(
                **{name: value for name, value in options.items() if value is not None},
                structured_outputs=structured_outputs,
            )
        )
    except ValidationError as error:
        refused = dict.fromkeys(str(each["loc"][0]) for each in error.errors())
        described = field_descriptions(SamplingOptions)
        lines = [
            f"{paths[name]}={options[name]!r} must be {described[name].values}; "
            f"the default is {described[name].default_text}"
            for name in refused
        ]
        raise ConfigError("\n".join(lines)) from None
    return sampling
