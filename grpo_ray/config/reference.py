"""Generator of the configuration reference, docs/configuration.md, from the schema.

Run `python -m grpo_ray.config.reference` after every change of the schema; a unit test compares page and schema.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_ray.config.fields import INTERNAL, FieldDescription, field_descriptions
from grpo_ray.config.schema import SECTIONS, LoraConfig
from grpo_ray.config.validation import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Generated from grpo_ray/config/schema.py by `python -m grpo_ray.config.reference`. Edit the schema instead. -->

A run is described by one YAML file of sections with fields; `jobs/configs/` has examples. Every field can be overridden
on the command line:

```
grpo-ray train CONFIG.yaml section.field=value ...
```

A field that is not set has its default; so do all fields of a section that is missing or empty. `null` is a value like
any other where a field allows it. Numbers may be in scientific notation (`1e-6`).

Before any worker starts, a config is refused if it has an unknown key, a value of the wrong type or outside its range,
or fields that contradict each other. The message names the field, the value found, and the values allowed.
"""

TRL_FIELDS = """\
Some of TRL's fields follow from the fields above and cannot be set, such as `per_device_train_batch_size`; the error
names the field to set instead. `grpo-ray train --help` lists all that can be set.
"""


def render() -> str:
    """Render the reference page: every section with its fields, then the checks across fields."""
    parts = [INTRODUCTION]
    for section, cls in SECTIONS.items():
        parts += [f"## {section}\n", _docstring(cls), _table(section, field_descriptions(cls))]
        if section == "grpo":
            parts.append(TRL_FIELDS)
        if section == "model":
            parts += ["### model.lora\n", _docstring(LoraConfig), _table("model.lora", field_descriptions(LoraConfig))]
    checks = [f"- {_docstring(check)}" for check in CHECKS]
    parts += ["## Checks across fields\n", "After every field has been checked on its own:\n", *checks]
    return "\n".join(parts).rstrip("\n") + "\n"


def _docstring(documented: object) -> str:
    return (inspect.getdoc(documented) or "") + ("\n" if isinstance(documented, type) else "")


def _table(section: str, fields: Mapping[str, FieldDescription]) -> str:
    """Render a Markdown table of the fields that stand directly in a section."""
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {field.values} | `{field.default_text}` | {field.meaning} |".replace("\n", " ")
        for name, field in fields.items()
        if "." not in name and f"{section}.{name}" not in INTERNAL
    ]
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, to docs/configuration.md of the checkout or to the path given as the only argument."""
    arguments = sys.argv[1:] if arguments is None else arguments
    page = Path(arguments[0]) if arguments else PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
