"""Command line of the scripts that generate files of this checkout, such as docs/configuration.md."""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def output_parser(content: str, path: Path) -> argparse.ArgumentParser:
    """Return a parser of the arguments of a generator, with the option `--output`.

    Args:
        content: description of the content of the file, for the help.
        path: file of the checkout that is written by default.
    """
    name = path.relative_to(ROOT)
    parser = argparse.ArgumentParser(description=f"Write {name}: {content}.")
    parser.add_argument("--output", metavar="FILE", type=Path, default=path, help=f"file to write; default: {name}")
    return parser


def write_file(path: Path, text: str) -> int:
    """Write a generated file and its folder, and return the exit status 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0
