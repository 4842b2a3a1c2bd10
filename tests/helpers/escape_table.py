"""Table of the attempts to escape in docs/escape-attempts.md: `python tests/helpers/escape_table.py` writes it."""

import sys
from pathlib import Path

from bombs import BOMBS
from escape_attempts import ATTEMPTS

PAGE = Path(__file__).parents[2] / "docs" / "escape-attempts.md"
BEGINNING, END = "<!-- begin of the generated tables -->\n", "<!-- end of the generated tables -->\n"
WORKS_FOR = {"anyone": "yes", "the same user": "yes, of another process of the user", "root": "as root"}
LIMITS = {
    "processes": "`rollout.max_processes`",
    "memory": "`rollout.memory_gib`",
    "disk": "`rollout.disk_gib`, `rollout.max_files`",
    "timeout": "`rollout.time_limit`",
}


def tables() -> str:
    """Return the tables of attempts and of bombs."""
    rows = ["| attempt | stopped by | works without confinement |", "|---|---|---|"]
    for name, each in sorted(ATTEMPTS.items(), key=lambda item: item[1].layer):
        needs = f"; needs {each.needs}" if each.needs else ""
        rows.append(f"| {name} | {each.layer} | {WORKS_FOR[each.works_for]}{needs} |")
    rows += ["", "| code that uses much in sum | ended by the supervisor, under |", "|---|---|"]
    rows += [f"| {name} | {LIMITS[each.status]} |" for name, each in BOMBS.items()]
    return "\n".join(["", *rows, "", ""])


def page_with_tables(page: str) -> str:
    """Return a page with its tables replaced by those of the code."""
    before, _, rest = page.partition(BEGINNING)
    return before + BEGINNING + tables() + END + rest.partition(END)[2]


def main(path: Path) -> None:
    path.write_text(page_with_tables(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
