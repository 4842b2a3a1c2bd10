"""Write MBPP's tasks as problems for the config mbpp-code: mbpp-train.jsonl and mbpp-test.jsonl.

    python recipes/mbpp-code/prepare.py [--folder FOLDER]

Needs the hub, or its cache: `google-research-datasets/mbpp`, 374 and 500 tasks.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATASET = "google-research-datasets/mbpp"


def problem(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task with its prompt, which shows the first test: MBPP's texts do not name the function."""
    prompt = f"{row['text']} Your code must pass:\n{row['test_list'][0]}\nAnswer with one block of Python."
    return {**row, "prompt": prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the files; default: the present one")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    import datasets  # takes seconds

    for split in ("train", "test"):
        path = folder / f"mbpp-{split}.jsonl"
        rows = datasets.load_dataset(DATASET, "full", split=split)
        path.write_text("".join(json.dumps(problem(row)) + "\n" for row in rows), encoding="utf-8")
        print(f"wrote {path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
