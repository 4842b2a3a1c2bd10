"""Tests of README and docs: links lead somewhere, and packages, files and config keys exist.

The code in them is tested by `test_document_blocks.py`.
"""

import ast
import re
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import SECTIONS
from grpo_ray.config.trl_fields import PASSED

LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.(?!yaml)[a-z_]+(?:\.[a-z_]+)?)(?:[=:][^`]*)?`")


def anchors(page: Path) -> set[str]:
    """Return the ids that GitHub gives the headings of a page, and those in the page."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


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


def defined_names(file: Path) -> set[str]:
    """Return the functions and classes of a module, and its methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_way_of_one_problem_names_existing_functions() -> None:
    (way,) = [block.text for block in blocks("text") if block.source == "docs/architecture.md"]
    missing = []
    for line in way.splitlines():
        file, *names = re.sub("#.*|->", "", line).split()
        owner = ""
        for name in names:
            owner = name.partition(".")[0] or owner
            whole = owner + name if name.startswith(".") else name
            if whole not in defined_names(ROOT / "grpo_ray" / file):
                missing.append(f"{file}: {whole}")
    assert len(way.splitlines()) > 20
    assert missing == []


def test_config_keys_in_pages_exist() -> None:
    known = {f"{section}.{name}" for section, fields in load_config(None, []).to_dict().items() for name in fields}
    known |= {f"grpo.{name}" for name in PASSED}
    wrong = []
    for page in PAGES:
        # `model.lora.rank` is a field of `model.lora`.
        unknown = {key for key in KEY.findall(page.read_text()) if not {key, key.rpartition(".")[0]} & known}
        wrong += [f"{page.name}: {key}" for key in sorted(unknown)]
    assert wrong == []


def test_readme_reward_scores_short_completions() -> None:
    (text,) = [block.text for block in blocks("python") if block.source == "README.md"]
    namespace: dict[str, object] = {}
    exec(text, namespace)  # the repository's own text
    reward = namespace["short_answer"]
    assert reward(["short", [{"role": "assistant", "content": "x" * 401}]], ["1", "2"], prompts=[]) == [1.0, 0.0]  # type: ignore[operator]
