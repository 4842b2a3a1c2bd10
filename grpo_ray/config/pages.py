"""Entry point of the scripts that generate files of this checkout, such as docs/configuration.md."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def write_generated(render: Callable[[], str], path: Path, arguments: Sequence[str] | None = None) -> int:
    """Write a generated file, and return the exit status 0.

    Args:
        render: returns the file's text.
        path: file of the checkout.
        arguments: of the command line, None for those of this process; the only one is another path to write to.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    target = Path(arguments[0]) if arguments else path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(), encoding="utf-8")
    return 0
