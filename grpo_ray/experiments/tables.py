"""Tables that the commands on finished runs print: uses of problems, comparison of a fork, replay of a step."""

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from grpo_ray.config.heldout_keys import split_name
from grpo_ray.driver.tables import wide_console
from grpo_ray.experiments.used_problems import UsedProblems
from grpo_ray.text.display import one_line, pluralize

if TYPE_CHECKING:  # these import Ray, which `contains` does not need
    from grpo_ray.experiments.replay import Replay
    from grpo_ray.experiments.run_comparison import RunComparison

EXAMPLES = 20
"""Rows that are printed; the JSON has all of them."""
EXCERPT = 60
"""Characters of a prompt that are printed."""
DIFFERENCE_CHARS = 1000
"""Characters of a line with a difference, whose values are short already."""


def print_used_problems(found: UsedProblems) -> None:
    """Print which problems of a file were used, and how many are not, or not known."""
    console = wide_console()
    for note in found.notes:
        console.print(escape(one_line(note)), highlight=False)
    if found.begun_with:
        begun_with = one_line(found.begun_with)
        console.print(
            escape(f"the run began with {begun_with}; ask it, too, if only one of the two runs is on a mixture"),
            highlight=False,
        )
    listed = [each for each in found.problems if each.answer != "not used"]
    if listed:
        table = Table("id", "file and row", "answer", "epochs", "source", "prompt")
        for each in listed[:EXAMPLES]:
            epochs = ", ".join(map(str, each.epochs))
            row = (each.id, each.where, each.answer, epochs, each.source, one_line(each.prompt)[:EXCERPT])
            table.add_row(*(escape(cell) for cell in row))
        console.print(table, highlight=False)
    if len(listed) > EXAMPLES:
        console.print(f"... and {len(listed) - EXAMPLES} more; --json FILE has all of them", highlight=False)
    used, unknown = found.count("used"), found.count("unknown")
    text = f"{used} of {pluralize(len(found.problems), 'problem')} were used for training up to step {found.step}"
    if unknown:
        text += f"; of {unknown} it is not known"
    console.print(text, highlight=False)


def print_comparison(comparison: "RunComparison") -> None:
    """Print a fork beside its original: rewards per step, held-out measures with paired tests, first difference."""
    console = wide_console()
    for note in comparison.notes:
        console.print(escape(one_line(note)), highlight=False)
    steps = Table("step", "problems", "reward of the run", "reward of the fork", "difference")
    shown = comparison.rewards[:: max(1, -(-len(comparison.rewards) // EXAMPLES))]
    for each in shown:
        difference = "-"
        if comparison.same_rewards and each.original is not None and each.fork is not None:
            difference = f"{each.fork - each.original:+.3f}"
        steps.add_row(str(each.step), str(each.problems), _number(each.original), _number(each.fork), difference)
    if shown:
        console.print(steps, highlight=False)
    if len(shown) < len(comparison.rewards):
        console.print(f"{len(shown)} of {len(comparison.rewards)} steps; --json FILE has all of them", highlight=False)
    heldout = Table("held-out set", "step", "run", "fork", "difference", "p-value", "better", "worse")
    for measured in comparison.heldout:
        result = measured.result
        heldout.add_row(
            escape(split_name(measured.key)),
            str(measured.step),
            f"{result.before:.3f}",
            f"{result.after:.3f}",
            escape(result.difference.format("+.3f")),
            f"{result.p_value:.2g}",
            str(result.better),
            str(result.worse),
        )
    if comparison.heldout:
        console.print(heldout, highlight=False)
    if (mean := comparison.reward_difference) is not None:
        console.print(f"mean difference of the reward on the same problems: {mean:+.4f}", highlight=False)
    if comparison.first_difference is None:
        console.print(
            f"steps {comparison.at + 1} to {comparison.last} are equal, bit for bit, in all that both runs record"
            if comparison.last > comparison.at
            else "there is no step that both have taken",
            highlight=False,
        )
    else:
        text = one_line(f"first difference: {comparison.first_difference}", DIFFERENCE_CHARS)
        console.print(escape(text), highlight=False)


def print_replay(outcome: "Replay") -> None:
    """Print which quantities of a replayed step equal the recorded ones."""
    console = wide_console()
    table = Table("quantity", "recorded and replayed")
    for quantity, result in outcome.comparison.outcomes.items():
        table.add_row(quantity, result)
    console.print(table, highlight=False)
    for note in outcome.notes:
        console.print(escape(one_line(note)), highlight=False)
    for name, (recorded, current) in outcome.changed_versions.items():
        console.print(escape(one_line(f"{name}: recorded with {recorded}, replayed with {current}")), highlight=False)
    where = f"step {outcome.comparison.step}, computed again from " + (
        f"the checkpoint of step {outcome.start}" if outcome.start else "the start of the run"
    )
    first = outcome.comparison.first
    if first is None:
        console.print(f"{where}, is equal, bit for bit, in all that is recorded", highlight=False)
    else:
        console.print(
            escape(
                one_line(
                    f"{where}, differs first in its {first.quantity}: {first.where}: recorded {first.recorded}, "
                    f"replayed {first.other}",
                    DIFFERENCE_CHARS,
                )
            ),
            highlight=False,
        )
    if outcome.folder:
        console.print(f"the run folder of the replay is {escape(outcome.folder)}", highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
