"""Writer of the notebooks' code as plain files, so that `make lint` checks its types: nobody runs a notebook each day.

`python scripts/notebook_code.py FOLDER` writes FOLDER/<name of the notebook>.py for each notebook.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def code_of(notebook: Path) -> str:
    """Return the code of a notebook's cells; lines that are commands of IPython are comments."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    return "".join(f"# {line}\n" if line.startswith(("%", "!")) else f"{line}\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files."""
    [folder] = map(Path, sys.argv[1:] if arguments is None else arguments)
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        (folder / f"{notebook.stem}.py").write_text(code_of(notebook), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
