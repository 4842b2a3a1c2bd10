"""Check of `rollout.structured_outputs` before a run, by the library that compiles forms for the engine."""

import json

from grpo_ray.config.sampling import StructuredOutputs
from grpo_ray.errors import ConfigError


def require_valid_form(form: StructuredOutputs) -> None:
    """Raise ConfigError, with the library's reason, if a form cannot be compiled. No tokenizer is needed."""
    from xgrammar import Grammar

    try:
        if form.regex is not None:
            Grammar.from_regex(form.regex)
        elif form.json is not None:
            Grammar.from_json_schema(json.dumps(dict(form.json)))
        elif form.grammar is not None:
            Grammar.from_ebnf(form.grammar)
    except RuntimeError as error:
        (name,) = form.given
        # The message begins with a time and a line of the library's source.
        reason = str(error).strip().partition(": ")[2] or str(error).strip()
        raise ConfigError(f"rollout.structured_outputs.{name} cannot be used: {reason}") from None
