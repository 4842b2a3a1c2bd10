"""Process group of one process, for probes that run a learner without Ray Train."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lone_process_group(backend: str = "gloo") -> Iterator[None]:
    """Be the only worker of a process group inside the block."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()
