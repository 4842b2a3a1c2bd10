"""Tests of the command line of the generators, `scripts/generated_file.py`."""

import ast
from pathlib import Path

import configuration_page
import notebook_code
import pytest
import vllm_field_table
from generated_file import ROOT, output_parser


def test_output_is_the_file_of_the_checkout_by_default() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert output_parser("all metrics", page).parse_args([]).output == page


def test_help_is_printed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        configuration_page.main(["--help"])
    assert end.value.code == 0 and list(tmp_path.iterdir()) == []
    assert "Write docs/configuration.md: every section, field and check of a config." in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--outptu=page.md", "page.md"])
def test_unknown_argument_is_refused(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        configuration_page.main([argument])
    assert end.value.code == 2 and list(tmp_path.iterdir()) == []


def test_notebook_code_parses(tmp_path: Path) -> None:
    assert notebook_code.main([str(tmp_path / "code")]) == 0
    files = sorted((tmp_path / "code").glob("*.py"))
    assert [file.stem for file in files] == [path.stem for path in sorted(notebook_code.NOTEBOOKS.glob("*.ipynb"))]
    assert all(ast.parse(file.read_text()).body for file in files)


def test_vllm_field_table_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        vllm_field_table.main(["--output", str(tmp_path / "fields.json")])
    assert end.value.code == 2 and list(tmp_path.iterdir()) == []
