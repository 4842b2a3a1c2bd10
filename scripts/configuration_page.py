"""Generator of the configuration reference, docs/configuration.md, from the schema.

Run `python scripts/configuration_page.py` after every change of the schema; a unit test compares page and schema.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence

from generated_file import ROOT, output_parser, write_file

from grpo_ray.config import vllm_fields
from grpo_ray.config.checks import CHECKS
from grpo_ray.config.fields import INTERNAL, FieldDescription, field_descriptions
from grpo_ray.config.sampling import StructuredOutputs
from grpo_ray.config.schema import SECTIONS, AdapterOptimizerConfig, LoraConfig, SourceConfig
from grpo_ray.config.trl_conditions import CONDITIONS
from grpo_ray.config.trl_fields import OURS, PASSED, REFUSED, allowed_values, default_text, meaning

PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Generated from grpo_ray/config/schema.py by `python scripts/configuration_page.py`. Edit the schema instead. -->

A run is described by one YAML file of sections with fields, such as those of the [recipes](../recipes/README.md). Every
field can be overridden on the command line:

```
grpo-ray train CONFIG.yaml section.field=value ...
```

An entry of a field that is a mapping is set in the same way: `grpo.generation_kwargs.min_tokens=8`. The others stay.
With the key `stages` a file describes several runs that follow one another ([stages](experiments.md#stages)).

A field that is not set has its default; so do all fields of a section that is missing or empty. `null` is a value like
any other where a field allows it. Numbers may be in scientific notation (`1e-6`).

Local paths may be relative to the folder in which the command is run, or begin with `~`. They become absolute before
anything else reads them, and are recorded so in the run folder's `config.yaml`.

Before any worker starts, a config is refused if it has an unknown key, a key twice, a value of the wrong type or
outside its range, or fields that contradict each other. The message names the field, the value found, and the values
allowed.
"""

ENGINE_OPTIONS = """\
### engine.vllm: arguments of vLLM's engine

Arguments of vLLM's `EngineArgs` for every engine, of training and of evaluation, checked by name and type when the
config is loaded. [Engine](engine.md) describes those of most use.
"""

DERIVED_ARGUMENTS = """\
### engine.vllm: arguments that follow from other keys

They cannot be set; the error names the keys to set instead.
"""

REFUSED_ARGUMENTS = """\
### engine.vllm: arguments that are refused

They would have no effect here, or break what a run promises.
"""

TRL_FIELDS = """\
### grpo: fields of TRL

These fields of `trl.GRPOConfig`, which includes `transformers.TrainingArguments`, can be set in the section `grpo`
under TRL's names. Types and ranges are checked when the config is loaded.
"""

DERIVED_FIELDS = """\
### grpo: fields of TRL that follow from other keys

They cannot be set; the error names the keys to set instead. Keys of the section `grpo` with the same name are above.
"""

REFUSED_FIELDS = """\
### grpo: fields of TRL that are refused

They would have no effect here, or break what a run promises.
"""

TRL_CONDITIONS = """\
### grpo: fields of TRL that need another setting

Without it the field would be ignored, so any value but its default is refused.
"""


def render() -> str:
    """Render the reference page: every section with its fields, then the checks across fields."""
    parts = [INTRODUCTION]
    for section, cls in SECTIONS.items():
        parts += [f"## {section}\n", _docstring(cls), _table(section, field_descriptions(cls))]
        if section == "engine":
            parts += _vllm_tables()
        if section == "grpo":
            parts += _trl_tables()
        if section == "data":
            nested = field_descriptions(SourceConfig)
            parts += [
                "### data.train: sources of a mixture\n",
                _docstring(SourceConfig),
                _table("data.train.<name>", nested),
            ]
        if section == "model":
            for name, cls in (("model.lora", LoraConfig), ("model.adapter_optimizer", AdapterOptimizerConfig)):
                parts += [f"### {name}\n", _docstring(cls), _table(name, field_descriptions(cls))]
        if section == "rollout":
            parts += [
                "### rollout.structured_outputs\n",
                _docstring(StructuredOutputs),
                _table("rollout.structured_outputs", field_descriptions(StructuredOutputs)),
            ]
    checks = [f"- {_docstring(check)}" for check in CHECKS]
    parts += ["## Checks across fields\n", "After every field has been checked on its own:\n", *checks]
    return "\n".join(parts).rstrip("\n") + "\n"


def _vllm_tables() -> list[str]:
    """Render the description of `engine.vllm`, and the tables of arguments that are derived or refused."""
    derived = [f"| `{name}` | {keys} |" for name, keys in vllm_fields.OURS.items()]
    reasons: dict[str, list[str]] = {}
    for name, reason in vllm_fields.REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    for (name, value), reason in vllm_fields.REFUSED_VALUES.items():
        reasons.setdefault(reason, []).append(f"{name}: {value}")
    refused = [f"| {_code_list(names)} | {reason[0].upper()}{reason[1:]}. |" for reason, names in reasons.items()]
    return [
        ENGINE_OPTIONS,
        DERIVED_ARGUMENTS,
        _rows("| argument | follows from |", derived),
        REFUSED_ARGUMENTS,
        _rows("| arguments | reason |", refused),
    ]


def _trl_tables() -> list[str]:
    """Render the tables of TRL's fields: those that can be set, need another setting, are derived, are refused."""
    passed = [f"| `{name}` | {allowed_values(name)} | `{default_text(name)}` | {meaning(name)} |" for name in PASSED]
    conditions = [f"| {_code_list(each.fields)} | `{each.remedy}` |" for each in CONDITIONS]
    derived = [f"| `{name}` | {keys} |" for name, keys in OURS.items() if keys != f"grpo.{name}"]
    refused = [f"| `{name}` | {reason[0].upper()}{reason[1:]}. |" for name, reason in REFUSED.items()]
    return [
        TRL_FIELDS,
        _rows("| field | value | default | meaning |", passed),
        TRL_CONDITIONS,
        _rows("| fields | have an effect with, for example |", conditions),
        DERIVED_FIELDS,
        _rows("| field | follows from |", derived),
        REFUSED_FIELDS,
        _rows("| field | reason |", refused),
    ]


def _rows(head: str, rows: Sequence[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def _code_list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _docstring(documented: object) -> str:
    return (inspect.getdoc(documented) or "") + ("\n" if isinstance(documented, type) else "")


def _table(section: str, fields: Mapping[str, FieldDescription]) -> str:
    """Render a Markdown table of the fields that stand directly in a section."""
    rows = [
        f"| `{name}` | {field.values} | `{field.default_text}` | {field.meaning} |".replace("\n", " ")
        for name, field in fields.items()
        if "." not in name and f"{section}.{name}" not in INTERNAL
    ]
    return _rows("| field | value | default | meaning |", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    options = output_parser("every section, field and check of a config", PAGE).parse_args(arguments)
    return write_file(options.output, render())


if __name__ == "__main__":
    sys.exit(main())
