"""Tests of how faults of several nodes are worded."""

from grpo_ray.resilience import nodes


def test_named_one_node_is_singular() -> None:
    assert nodes._named(["10.0.0.1"]) == "node 10.0.0.1"


def test_named_many_nodes_lists_five() -> None:
    assert nodes._named([f"10.0.0.{n}" for n in range(8)]) == (
        "nodes 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more"
    )
