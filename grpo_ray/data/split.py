"""How Ray Train deals the problems out to its workers.

A room of its own because Ray's data actors import it: with `launch.py` they would each hold a torch they never use.
"""

from collections.abc import Mapping
from typing import Any

import ray.train


class StepDataConfig(ray.train.DataConfig):
    """Deals the training stream out so that step s has the same problems whatever the number of workers (law 1).

    Ray's own split is made equal by dropping rows. Here each worker's part of a step is one block, and blocks are
    dealt in turn; nothing is dropped. The held-out problems are not split: the learner takes its own part.
    """

    def __init__(self, prompts_per_step: int):
        super().__init__(datasets_to_split=["train"], enable_shard_locality=False)
        self.prompts_per_step = prompts_per_step

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, worker_handles: Any, worker_node_ids: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """One iterator for each dataset and worker."""
        parts: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset = dataset.copy(dataset)
            dataset.context.execution_options.preserve_order = True
            dataset.context.enable_progress_bars = False
            if name == "train":
                share = self.prompts_per_step // world_size
                blocks = dataset.repartition(target_num_rows_per_block=share, strict=True)
                iterators = blocks.streaming_split(world_size, equal=False)
            else:
                iterators = [dataset.iterator()] * world_size
            for part, iterator in zip(parts, iterators, strict=True):
                part[name] = iterator
        return parts
