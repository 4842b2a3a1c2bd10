"""Check of our source against one set of releases."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from library_contract.releases import LIBRARIES, Release, requirement_conflicts
from library_contract.source_tree import SourceTree
from library_contract.table import check_table
from library_contract.uses import Check, check_uses

ROOT = Path(__file__).resolve().parents[3]
"""Root of the repository."""


@dataclass(frozen=True)
class Result:
    """Checks of one release."""

    release: Release
    checks: tuple[Check, ...]
    conflicts: tuple[str, ...] = ()
    """Requirements of the release that the other releases of the set do not meet."""

    @property
    def problems(self) -> list[str]:
        """Names that our source uses and the release does not have, with file and line of ours; and conflicts."""
        found = {str(each): None for each in self.checks if each.problem}  # each once, in order
        return [*found, *self.conflicts]


def our_files(root: Path) -> list[Path]:
    """Return the files of ours that use the libraries."""
    return sorted([*(root / "grpo_ray").rglob("*.py"), *(root / "jobs").rglob("*.py")])


def check_releases(root: Path, releases: Sequence[Release]) -> list[Result]:
    """Check our source against a set of releases, one of each library."""
    tree = SourceTree([root], {each.library: each.folder for each in releases})
    files = our_files(root)
    checks = [*check_uses(tree, root, files, LIBRARIES).checks, *check_table(tree, root, files)]
    conflicts = requirement_conflicts(releases)
    return [
        Result(
            release,
            tuple(each for each in checks if each.library == release.library),
            tuple(each for each in conflicts if each.startswith(f"{release} requires")),
        )
        for release in releases
    ]


def format_results(results: Sequence[Result]) -> str:
    """Return a table of releases, and below it each problem."""
    rows = [("library", "release", "checked", "problems")]
    rows += [
        (each.release.library, each.release.version, str(len(each.checks)), str(len(each.problems))) for each in results
    ]
    lines = [f"{library:<14}{version:<10}{checked:>8}{problems:>10}" for library, version, checked, problems in rows]
    for each in results:
        if each.problems:
            lines += ["", str(each.release), *(f"  {problem}" for problem in each.problems)]
    return "\n".join(lines)
