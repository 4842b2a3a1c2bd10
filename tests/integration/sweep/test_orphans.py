"""Tests of the resources that a killed driver leaves behind."""

from typing import Any

import pytest
import ray
from failing_storage import wait_for
from ray.util.placement_group import placement_group, remove_placement_group
from sweeps import GroupHolder

from grpo_ray.resilience.ray_internals import orphaned_placement_groups


def test_placement_group_of_a_killed_actor_is_an_orphan(cluster: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(GroupHolder)
    killed, alive = actor.remote(), actor.remote()
    orphan, kept = ray.get([killed.hold.remote(), alive.hold.remote()])
    own = placement_group([{"CPU": 1.0}])  # of this process, which lives
    assert orphaned_placement_groups() == []
    ray.kill(killed)
    wait_for(lambda: [group.id for group in orphaned_placement_groups()] == [orphan.id], "the orphan", 60)
    remove_placement_group(orphan)
    wait_for(lambda: orphaned_placement_groups() == [], "its removal", 60)
    with pytest.raises(ray.exceptions.TaskPlacementGroupRemoved):
        ray.get(orphan.ready(), timeout=60)
    ray.get([kept.ready(), own.ready()])
    for group in (kept, own):
        remove_placement_group(group)
    ray.kill(alive)
