"""Tests of the tutorial notebook: executed in a fresh kernel (slow), and the committed copy with its outputs."""

import ast
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "grpo_with_ray_train.ipynb"
CELL_TIMEOUT = 900
"""Seconds after which a cell counts as hanging."""
MAX_BYTES = 400_000
"""Largest size of the committed copy, including outputs and pictures."""
PICTURE_TAGS = ("curves", "groups", "timeline")
"""Tags of the cells that draw a figure."""
ABSOLUTE_PATH = re.compile(r"(?<![\w:/.~<-])/[A-Za-z_][\w.-]*/[\w.-]+|[A-Z]:\\\\")
ESCAPES = re.compile(r"\x1b\[|\r")
"""Control characters of progress bars and colours, which appear in the output where there is no terminal."""


def committed() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Execute the notebook in a fresh kernel of this Python; an error in any cell is raised."""
    notebook = committed()
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RAY_RUNS", str(tmp_path_factory.mktemp("notebook")))
        patch.setenv("RAY_ADDRESS", "local")  # start a cluster of its own, also while another one is running
        patch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend embeds the pictures
        # The kernel "python3" is the Python that runs this test.
        resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT, kernel_name="python3", resources=resources).execute()
    return notebook


@pytest.fixture(params=[pytest.param("executed", marks=pytest.mark.slow), "committed"])
def notebook(request: pytest.FixtureRequest) -> Any:
    """The notebook as it runs now, and as it is committed."""
    return request.getfixturevalue("executed") if request.param == "executed" else committed()


def code_cells(notebook: Any) -> Iterator[Any]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def tagged(notebook: Any, tag: str) -> Any:
    """Return the cell with a tag. Tags, because the order and number of cells may change."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
    return cell


def text_of(cell: Any) -> str:
    """Return everything that a cell prints or displays as text."""
    text = ""
    for output in cell.outputs:  # printed text arrives in pieces of arbitrary length
        text += output.get("text", "")
        for kind in ("text/plain", "text/markdown"):
            if kind in output.get("data", {}):
                text += output.data[kind] + "\n"
    return text


def match_output(notebook: Any, tag: str, pattern: str) -> tuple[str, ...]:
    """Return the groups of a pattern that the text of a cell must match."""
    text = text_of(tagged(notebook, tag))
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in the output of the cell {tag!r}:\n{text}"
    return match.groups()


def test_notebook_reward_is_one_for_right_answers_only(notebook: Any) -> None:
    lines = [line.split("  ", 2) for line in text_of(tagged(notebook, "reward")).splitlines()]
    assert {kind.strip(): float(value) for value, kind, *_ in lines} == {
        "right": 1.0,
        "right, written otherwise": 1.0,
        "wrong": 0.0,
        "two answers, to be safe": 0.0,
        "no boxed answer": 0.0,
    }


def test_notebook_group_advantages_sum_to_zero(notebook: Any) -> None:
    rows = re.findall(r"(\d) +(-?\d\.\d+) *$", text_of(tagged(notebook, "group")), re.MULTILINE)
    advantages = [float(advantage) for _, advantage in rows]
    assert len(advantages) == 8
    assert min(advantages) < 0 < max(advantages)
    assert abs(sum(advantages)) < 0.05  # each is rounded to 0.01


def test_notebook_heldout_accuracy_rises(notebook: Any) -> None:
    (measured_percent,) = match_output(notebook, "before", r"right: (\d+\.\d)%")
    before, after = match_output(notebook, "before and after", r"accuracy: (0\.\d+) -> ([01]\.\d+)")
    assert abs(float(before) - float(measured_percent) / 100) < 0.001
    assert float(after) > float(before) + 0.3  # the 95 % intervals of 600 problems are below 0.04 to each side


def test_notebook_best_checkpoint_is_kept(notebook: Any) -> None:
    kept, best = match_output(notebook, "best checkpoint", r"kept: +(.+)\nthe best one: +(checkpoint-\d+)")
    assert best in kept.split(", ")


def test_notebook_run_fails_twice_then_for_good(notebook: Any) -> None:
    text = text_of(tagged(notebook, "broken"))
    assert len(re.findall(r"^worker \d failed: ", text, re.MULTILINE)) == 2
    assert "TrainingError: worker" in text


def test_notebook_run_resumes_from_best_and_ends(notebook: Any) -> None:
    (best,) = match_output(notebook, "left on disk", r"the best one: (\S+)")
    (start,) = match_output(notebook, "resumed", r"resuming from (\S+)")
    assert start == best
    pattern = r"(\d+) steps, .*accuracy ([01]\.\d+)\nfailures: (\d+)"
    steps, accuracy, failures = match_output(notebook, "resumed", pattern)
    before, steps_before = match_output(notebook, "before and after", r"accuracy: (0\.\d+).*\n(\d+) steps in")
    assert int(steps) > int(steps_before)
    assert float(accuracy) > float(before) + 0.3
    assert int(failures) == 2


@pytest.mark.parametrize("tag", PICTURE_TAGS)
def test_notebook_picture_is_drawn(notebook: Any, tag: str) -> None:
    pictures = [output["data"]["image/png"] for output in tagged(notebook, tag).outputs if "image/png" in output.data]
    (picture,) = map(base64.b64decode, pictures)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5_000, "an empty frame"


def test_notebook_outputs_hold_no_noise(notebook: Any) -> None:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", f"a warning in the cell\n{cell.source}\n{output.text}"
        assert not ESCAPES.search(text_of(cell)), f"control characters below the cell\n{cell.source}"


def test_notebook_committed_was_executed_in_order() -> None:
    counts = [cell.execution_count for cell in code_cells(committed())]
    assert counts == list(range(1, len(counts) + 1))


def test_notebook_committed_names_no_absolute_path() -> None:
    for cell in committed().cells:
        text = cell.source + (text_of(cell) if cell.cell_type == "code" else "")
        assert not (match := ABSOLUTE_PATH.search(text)), f"{match[0]} in the cell\n{cell.source}"


def test_notebook_committed_is_small() -> None:
    assert NOTEBOOK.stat().st_size < MAX_BYTES


def test_notebook_defines_no_function_or_class() -> None:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for cell in code_cells(committed()):
        own = [node.name for node in ast.walk(ast.parse(cell.source)) if isinstance(node, definitions)]
        assert not own, f"{own} belong in the package"
