"""Split of the datasets across Ray Train's workers.

A separate module, because Ray Data's actors import it: importing `driver/trainer.py` would load torch, which they never
use, in each of them.
"""

from collections.abc import Mapping
from typing import Any

import ray.train


class StepDataConfig(ray.train.DataConfig):
    """Ray Train data config under which step s has the same problems for any number of workers.

    Ray's `streaming_split(equal=True)` drops rows to make the splits equal. Here each worker's part of a step is one
    block of exactly prompts_per_step / world_size rows, and `streaming_split(equal=False)` assigns blocks to workers
    in turn, so no row is dropped (invariant: worker-count invariance). The held-out datasets are not split: each worker
    receives all of them, and the learner selects its part.
    """

    def __init__(self, prompts_per_step: int):
        """Create the config.

        Args:
            prompts_per_step: problems of one step, a multiple of the number of workers.
        """
        super().__init__(datasets_to_split=["train"], enable_shard_locality=False)
        self.prompts_per_step = prompts_per_step

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, worker_handles: Any, worker_node_ids: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Return one iterator per dataset name, for each worker."""
        iterators_of_worker: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset = dataset.copy(dataset)
            dataset.context.execution_options.preserve_order = True
            dataset.context.enable_progress_bars = False
            if name == "train":
                rows_per_block = self.prompts_per_step // world_size
                # Without `strict`, block sizes vary, and runs with different worker counts get different steps.
                blocks = dataset.repartition(target_num_rows_per_block=rows_per_block, strict=True)
                iterators = blocks.streaming_split(world_size, equal=False)
            else:
                iterators = [dataset.iterator()] * world_size
            for worker_iterators, iterator in zip(iterators_of_worker, iterators, strict=True):
                worker_iterators[name] = iterator
        return iterators_of_worker
