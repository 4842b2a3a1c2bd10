"""Imports of libraries without the experiment trackers that are installed.

TRL imports wandb, MLflow and trackio wherever they are installed: more than a CPU second and 36 MiB in each worker. A
run's trackers have processes of their own (`observers/trackers`), and its workers report to none through TRL.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Imported before the trackers are hidden, so that these libraries detect which trackers are installed.
import accelerate  # noqa: F401
import transformers.trainer  # noqa: F401

TRACKERS = ("wandb", "mlflow", "trackio")


@contextmanager
def hidden(modules: tuple[str, ...]) -> Iterator[None]:
    """Make imports of these modules fail in this context, as if they were not installed; imported ones stay."""
    names = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
