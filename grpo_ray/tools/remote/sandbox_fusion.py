"""Client of SandboxFusion's HTTP API: `POST /run_code`."""

import json
import signal
from typing import Any

from grpo_ray.tools.remote.exchange import post_json, prepare
from grpo_ray.tools.remote.provider import Execution, Job, SandboxError, Service
from grpo_ray.tools.sandbox.protocol import CallError

REASON_CHARS = 200
"""Characters of the service's own error message that are kept."""


class SandboxFusion:
    """Client of one SandboxFusion service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        prepare(service)

    def run(self, job: Job, seconds: float) -> Execution:
        """Run a program once; see `SandboxProvider.run`."""
        payload = {
            "language": "python",
            "code": job.program,
            "stdin": job.stdin,
            "run_timeout": job.seconds,
            "memory_limit_MB": job.memory_bytes >> 20,
        }
        response = post_json(self.service, "/run_code", payload, seconds)
        if response.status == 413:
            raise CallError("error", "the code is too long for the sandbox")
        if response.is_cut:
            raise CallError("error", "the output is too long")
        try:
            return _execution(json.loads(response.body))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the answer is untrusted
            raise SandboxError("its response is not in SandboxFusion's format") from None


def _execution(answer: Any) -> Execution:
    """Convert an answer to a result.

    Raises SandboxError if the service failed, and one of the errors that `run` catches if the answer is malformed.
    """
    status, result = answer["status"], answer.get("run_result")
    if status == "SandboxError" or (result and result["status"] == "Error"):
        # The service's own failure: it could not start the interpreter, or lost it.
        text = ascii(" ".join(str(answer.get("message")).split())[:REASON_CHARS])
        raise SandboxError(f"it failed: {text}", is_temporary=True)
    if status not in ("Success", "Failed"):
        raise ValueError(status)
    output = result.get("stdout") or ""
    if not isinstance(output, str):
        raise TypeError(output)
    if result["status"] == "TimeLimitExceeded":
        return Execution(output=output, return_code=0, is_timed_out=True)
    code = result["return_code"]
    is_code = isinstance(code, int) and not isinstance(code, bool) and (0 <= code < 256 or -code in _SIGNALS)
    if result["status"] != "Finished" or not is_code:
        raise ValueError(result["status"], code)
    return Execution(output=output, return_code=code)


_SIGNALS = frozenset(map(int, signal.Signals))
