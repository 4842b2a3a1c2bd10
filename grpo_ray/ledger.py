"""What a run has used of its problems, kept in the same checkpoint as the weights that they trained.

The order of problems follows from the seed alone (`data/stream.py`), so how many steps were taken says which
problems are used. The exact record by problem id will live here too.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "ledger.json"


@dataclass(frozen=True)
class Ledger:
    """How far into the stream of problems a run is."""

    problems_used: int = 0
    """Problems of the stream whose step was taken, over all workers and epochs."""

    def save(self, folder: Path) -> None:
        """Write the ledger into a checkpoint's folder."""
        (folder / FILE_NAME).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Ledger":
        """Read the ledger of a checkpoint; FileNotFoundError if it has none."""
        return cls(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
