"""Generator of the metrics reference, docs/metrics.md, from the tables in grpo_ray/training/metric_names.py."""

import sys
from collections.abc import Sequence

from generated_file import ROOT, output_parser, write_file

from grpo_ray.training.metric_names import METRICS, OWN_METRICS

PAGE = ROOT / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

<!-- Generated from grpo_ray/training/metric_names.py by `python scripts/metrics_page.py`. -->

Every report adds a row to `metrics.jsonl` of the run folder: every `grpo.logging_steps` steps, with each checkpoint,
and after the last step. A metric that does not apply to a step, or is not a finite number, is missing from its row.
Each reward function adds `reward/<name>_mean` and `reward/<name>_std`; a metric `x` that it records with `log_metric`
is `reward/x`. Each tool that was called adds `rollout/<name>/calls_mean` per completion,
`rollout/<name>/failed_share` of its calls and `rollout/<name>/seconds_mean` of a call; the answers of an
environment's `step` have the name `step`. Each named held-out set adds the metrics of `heldout/` under
`heldout/<name>/`; those without a name are the primary set's. Each source of a mixture (`data.train`) adds
`source/<name>/problems_share`, its share of the completions, `source/<name>/epoch`, the epoch of its latest problem
from 0, `source/<name>/reward_mean` and `source/<name>/<reward>_mean` of each reward that applies to it,
`source/<name>/equal_share` of its groups, and `source/<name>/length_mean` in tokens; a step without its problems has
none of them. With `rollout.max_staleness`, `rollout/staleness_<i>` is the share of the completions' tokens that were
sampled with weights i optimizer steps older.
"""


def render() -> str:
    """Render the reference page."""
    described = OWN_METRICS | {name: text for name, (_, text) in METRICS.items()}
    rows = [f"| `{name}` | {text} |" for name, text in described.items()]
    return "\n".join([INTRODUCTION, "| metric | meaning |", "|---|---|", *rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    options = output_parser("names and meanings of all metrics", PAGE).parse_args(arguments)
    return write_file(options.output, render())


if __name__ == "__main__":
    sys.exit(main())
