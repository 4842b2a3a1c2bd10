"""Tests of README and docs: links lead somewhere, and commands, keys and code blocks are valid."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grpo_ray.cli import build_parser
from grpo_ray.config.loader import from_mapping, load_config
from grpo_ray.config.schema import SECTIONS, Config
from grpo_ray.config.trl_fields import PASSED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.(?!yaml)[a-z_]+(?:\.[a-z_]+)?)(?:[=:][^`]*)?`")


def anchors(page: Path) -> set[str]:
    """Return the ids that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield page name and text of every code block in a language."""
    for page in PAGES:
        for name, text in BLOCK.findall(page.read_text()):
            if name == language:
                yield page.name, text


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield page name and words of every shell command."""
    for page, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield page, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_existing_files_and_headings(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_readme_is_short_and_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 200
    linked = {target.partition("#")[0] for page in PAGES for target in LINK.findall(page.read_text())}
    for page in (ROOT / "docs").glob("*.md"):
        assert {page.name, f"docs/{page.name}"} & linked, f"no page links to docs/{page.name}"


def test_readme_names_every_package() -> None:
    tree = (ROOT / "README.md").read_text().partition("\ngrpo_ray/\n")[2].partition("```")[0]
    packages = {path.parent.name for path in (ROOT / "grpo_ray").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == packages


def test_architecture_names_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for path in (ROOT / "grpo_ray").glob("*/__init__.py"):
        assert f"| `{path.parent.name}/` |" in text


def test_code_paths_in_pages_exist() -> None:
    folders = ("", "grpo_ray", "tests/fault_injection")
    missing = []
    for page in PAGES:
        for path in re.findall(r"`([\w/]+/[\w.]+\.py|[\w]+\.py|jobs/[\w./-]+\.yaml)`", page.read_text()):
            if not any((ROOT / folder / path).exists() for folder in (*folders, "tests/benchmarks")):
                missing.append(f"{page.name}: {path}")
    # The example files of the README are the reader's own.
    assert [path for path in missing if not path.endswith(("my_rewards.py", "my_run.yaml"))] == []


def test_config_keys_in_pages_exist() -> None:
    known = {f"{section}.{name}" for section, fields in load_config(None, []).to_dict().items() for name in fields}
    known |= {f"grpo.{name}" for name in PASSED}
    wrong = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names keys of earlier versions
            continue
        # `model.lora.rank` is a field of `model.lora`.
        unknown = {key for key in KEY.findall(page.read_text()) if not {key, key.rpartition(".")[0]} & known}
        wrong += [f"{page.name}: {key}" for key in sorted(unknown)]
    assert wrong == []


@pytest.mark.parametrize(("page", "text"), list(blocks("yaml")))
def test_yaml_block_is_a_valid_config(page: str, text: str) -> None:
    assert isinstance(from_mapping(yaml.safe_load(text)), Config)


@pytest.mark.parametrize(("page", "text"), list(blocks("python")))
def test_python_block_parses(page: str, text: str) -> None:
    ast.parse(text)


def test_readme_reward_scores_short_completions() -> None:
    (text,) = [text for page, text in blocks("python") if page == "README.md"]
    namespace: dict[str, object] = {}
    exec(text, namespace)  # the repository's own text
    reward = namespace["short_answer"]
    assert reward(["short", [{"role": "assistant", "content": "x" * 401}]], ["1", "2"], prompts=[]) == [1.0, 0.0]  # type: ignore[operator]


def test_commands_of_grpo_ray_parse() -> None:
    found = 0
    for page, words in commands():
        starts = [number for number, word in enumerate(words) if Path(word).name == "grpo-ray"]
        if not starts:
            continue
        arguments = words[starts[0] + 1 :]
        found += 1
        try:
            chosen = build_parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page}: grpo-ray {shlex.join(arguments)} is refused")
        config = getattr(chosen, "config", None)
        assert config is None or config == "my_run.yaml" or (ROOT / config).exists()
    assert found >= 5


def test_commands_of_make_have_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[1] for _, words in commands() if words[0] == "make"} <= targets


def test_job_commands_name_existing_files() -> None:
    for page, words in commands():
        for word in words:
            if word.startswith("jobs/"):
                assert (ROOT / word).exists(), f"{page}: {word}"
