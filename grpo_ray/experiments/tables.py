"""Tables that the commands on finished runs print: uses of problems, comparison of a fork, replay of a step."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from grpo_ray.driver.tables import wide_console
from grpo_ray.results.used_problems import UsedProblems
from grpo_ray.text.display import one_line, pluralize

EXAMPLES = 20
"""Rows that are printed; the JSON has all of them."""
EXCERPT = 60
"""Characters of a prompt that are printed."""


def print_used_problems(found: UsedProblems) -> None:
    """Print which problems of a file were used, and how many are not, or not known."""
    console = wide_console()
    for note in found.notes:
        console.print(escape(one_line(note)), highlight=False)
    if found.begun_with:
        console.print(escape(f"the run began with {one_line(found.begun_with)}, whose ledger it continues"))
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
        text += f"; of {unknown} it is not known: a whole epoch was used, and its rollouts are missing or incomplete"
    console.print(text, highlight=False)


def _rows(table: Table, rows: Sequence[Sequence[object]]) -> Table:
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
