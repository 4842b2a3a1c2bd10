"""Output of a run's processes in files of its run folder."""

import os
import sys

from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.redaction import redact_stream


def redirect_output(folder: RunFolder, name: str) -> None:
    """Redirect the output of this process to a file of the run folder's `logs`, away from the driver's display.

    Secrets are hidden in the output of Python code, tracebacks included, but not in that of native code.
    """
    for stream in (sys.stdout, sys.stderr):
        redact_stream(stream)
    if folder.local is None:
        return  # Ray keeps the output in its own log folder on each node
    logs = folder.local / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
