"""Process group of one process, for probes that run a learner without Ray Train."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lone_process_group(backend: str = "gloo") -> Iterator[None]:
    """Be the only worker of a process group inside the block."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free one; no other worker connects
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # `run_workers` sets it for the group of its workers
    }
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()
