"""Command line of the scripts that generate files of this checkout, such as docs/configuration.md."""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package of this checkout, whichever one is installed


def output_parser(content: str, path: Path) -> argparse.ArgumentParser:
    """Return a parser of the arguments of a generator, with the option `--output`.

    Args:
        content: description of the content of the file, for the help.
        path: file of the checkout that is written by default.
    """
    name = os.path.relpath(path.resolve(), ROOT)
    parser = argparse.ArgumentParser(description=f"Write {name}: {content}.")
    parser.add_argument("--output", metavar="FILE", type=Path, default=path, help=f"file to write; default: {name}")
    return parser


def write_file(path: Path, text: str) -> int:
    """Write a generated file and its folder, and return the exit status 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return 0
