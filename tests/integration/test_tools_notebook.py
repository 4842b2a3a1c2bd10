"""Tests of the notebook on tools and environments: executed in a fresh kernel (slow), and the committed copy."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "tools_and_environments.ipynb"
MAX_BYTES = 60_000


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Execute the notebook in a fresh kernel of this Python; an error in any cell is raised."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RAY_RUNS", str(tmp_path_factory.mktemp("notebook")))
        patch.setenv("RAY_ADDRESS", "local")  # start a cluster of its own, also while another one is running
        resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    return notebook


@pytest.fixture(params=[pytest.param("executed", marks=pytest.mark.slow), "committed"])
def notebook(request: pytest.FixtureRequest) -> Any:
    """The notebook as it runs now, and as it is committed."""
    if request.param == "executed":
        return request.getfixturevalue("executed")
    return nbformat.read(NOTEBOOK, as_version=4)


def output_of(notebook: Any, tag: str) -> str:
    """Return what the cell with a tag prints."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
    return "".join(output.get("text", "") for output in cell.outputs)


def test_notebook_calls_the_tool_in_its_process(notebook: Any) -> None:
    assert re.fullmatch(r"ok +1776\nerror +TypeError: .*'b'\n", output_of(notebook, "process"))


def test_notebook_policy_learns_to_use_the_tool(notebook: Any) -> None:
    before, after = map(float, re.findall(r"\d\.\d+", output_of(notebook, "accuracy")))
    assert before < 0.4 and after > 0.8
    first, last = output_of(notebook, "messages").split("step ")[1:]
    assert last.count("[tool]") >= first.count("[tool]") and last.count("[tool]") >= 3


def test_notebook_game_is_won(notebook: Any) -> None:
    lines = output_of(notebook, "game").splitlines()
    assert lines[-2].endswith("correct") and 0 < float(lines[-1].split()[1]) <= 1


def test_notebook_outputs_hold_no_noise(notebook: Any) -> None:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error" and output.get("name") != "stderr", output
            assert not re.search(r"\x1b\[|\r", output.get("text", ""))


def test_notebook_committed_is_small_was_executed_in_order_and_names_no_absolute_path() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES and not re.search(r"(/home|/tmp|/root|/work)/", text)
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
