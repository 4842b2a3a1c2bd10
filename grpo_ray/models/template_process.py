"""Program that renders untrusted chat templates in a process of its own, with limits that the kernel enforces.

transformers renders them in Jinja's sandbox, which gives them no access to code and files, but does not limit time and
memory, which `{{ 'a' * 10**10 }}` or nested loops can exhaust. `LimitedTemplate` starts this program and reads its
answers. Requests and answers are JSON.
"""

import json
import resource
import socket
import time
from typing import Any

from grpo_ray.processes.request_server import serve_requests

CPU_SECONDS = 10
"""Maximum processor time of a request, seconds."""
MEMORY_BYTES = 1 << 30
"""Maximum memory of the process for templates, beyond that of its libraries and of files that it maps."""
TEXT_CHARS = 4_000_000
"""Maximum length of a rendered conversation, characters."""


def render(request: dict[str, Any]) -> list[str]:
    """Render the conversations of a request. Raises any error of the template; MemoryError if a text is too long."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(**request)
    if any(len(text) > TEXT_CHARS for text in texts):
        raise MemoryError
    return list(texts)


def data_bytes() -> int:
    """Return the size of this process's private writable memory, which `RLIMIT_DATA` bounds; 0 without /proc."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            sizes = [line.split()[1] for line in status if line.startswith("VmData:")]
    except OSError:
        return 0
    return 1024 * int(sizes[0]) if sizes else 0


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries reserve memory for each processor, so a fixed limit would be too low on machines with many of them.
    limit = data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with socket.socket(fileno=descriptor) as sock:
        serve_requests(sock, _answer)


def _answer(request: bytes) -> bytes:
    """Render a request; after `CPU_SECONDS` a signal ends the process, even during one long operation."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS, most))
    try:
        answer: dict[str, Any] = {"texts": render(json.loads(request))}
    except MemoryError:
        answer = {"error": f"takes more than {MEMORY_BYTES >> 20} MiB of memory, or renders too long a text"}
    except Exception as error:  # the template is an untrusted program, and can raise anything
        answer = {"error": f"fails: {type(error).__name__}: {error}"[:300]}
    return json.dumps(answer).encode()
