"""Readers of the documents: code blocks and commands of README, docs, notebooks and the heads of the job files."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
)
NOTEBOOKS = tuple(sorted((ROOT / "notebooks").glob("*.ipynb")))
JOBS = (
    *sorted((ROOT / "jobs").glob("*.py")),
    *sorted((ROOT / "grpo_ray/examples/configs").glob("*.yaml")),
    *sorted((ROOT / "jobs/stages").glob("*.yaml")),
    *sorted((ROOT / "jobs/sweeps").glob("*.yaml")),
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
_SEPARATORS = ";&|>"
"""Characters of a shell between two commands, and before the file for an output."""
_OURS = ("grpo-ray", "make", "python")
"""Programs whose commands are also read from running text and from the heads of job files."""


@dataclass(frozen=True)
class Block:
    """Code block of a document."""

    source: str
    """Path of the document, from the root of the repository."""
    language: str
    """"code" for a code cell of a notebook, "span" for Python in running text."""
    text: str

    @property
    def file(self) -> str:
        """Name of the file that the block's first line gives in a comment, such as `my_run.yaml`; "" if none."""
        found = re.match(r"# (\w+\.\w+)\n", self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.source}: {self.file or self.text.strip().splitlines()[0]}"


@dataclass(frozen=True)
class Command:
    """Command line of a document, without environment variables before it."""

    source: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}: {shlex.join(self.words)}"


def markdown() -> Iterator[tuple[str, str]]:
    """Yield path and text of every page, and of every notebook's Markdown cells."""
    for page in PAGES:
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        yield str(path.relative_to(ROOT)), "\n\n".join(_cells(path, "markdown"))


def blocks(language: str) -> list[Block]:
    """Return the code blocks in a language.

    Args:
        language: that of the block's first line; "code" for the notebooks' code cells, "span" for code in running text
            that imports from grpo_ray.
    """
    if language == "span":
        return [Block(source, language, span) for source, span in code_spans() if span.startswith("from grpo_ray")]
    if language == "code":
        return [
            Block(str(path.relative_to(ROOT)), language, text) for path in NOTEBOOKS for text in _cells(path, language)
        ]
    return [
        Block(source, language, code)
        for source, text in markdown()
        for name, code in _BLOCK.findall(text)
        if name == language
    ]


def code_spans() -> Iterator[tuple[str, str]]:
    """Yield path and text of the code in running text, each on one line, except for that of earlier versions."""
    for source, text in markdown():
        if source != "CHANGELOG.md":
            yield from ((source, " ".join(span.split())) for span in _CODE_SPAN.findall(_BLOCK.sub("", text)))


def commands() -> list[Command]:
    """Return the commands of shell blocks, of running text and of the heads of the job files.

    A shell block may have commands of other programs; from the other places, only those of `_OURS` are read.
    """
    found = [Command(each.source, words) for each in blocks("bash") for words in _split(each.text)]
    for source, span in code_spans():
        found += [Command(source, words) for words in _split(span) if is_ours(words)]
    for path in JOBS:
        text = re.sub(r"^#", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
        # The rest of a line from the program on: "On this machine:   python jobs/train.py ...".
        for line in re.findall(r"\bpython jobs/.*|^ +grpo-ray .*", text, re.MULTILINE):
            found += [Command(str(path.relative_to(ROOT)), words) for words in _split(line)]
    return found


def is_ours(words: tuple[str, ...]) -> bool:
    """Return True for a command with arguments of grpo-ray, make or python."""
    return len(words) > 1 and Path(words[0]).name in _OURS


def _split(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a shell text, without assignments before it and "..." in it."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=_SEPARATORS)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # an apostrophe in running text is no command
            continue
        while words:
            end = next((at for at, word in enumerate(words) if set(word) <= set(_SEPARATORS)), len(words))
            # After ">" comes a file, and no command.
            command, words = words[:end], words[end + 1 + (words[end : end + 1] == [">"]) :]
            while command and _ASSIGNMENT.fullmatch(command[0]):
                command = command[1:]
            if kept := tuple(word for word in command if word != "..."):
                yield kept


def _cells(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]
