"""Tests of how nodes are named in error messages."""

from grpo_ray.resilience import nodes


def test_format_nodes_one_is_singular() -> None:
    assert nodes._format_nodes(["10.0.0.1"]) == "node 10.0.0.1"


def test_format_nodes_many_lists_five() -> None:
    assert nodes._format_nodes([f"10.0.0.{n}" for n in range(8)]) == (
        "nodes 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more"
    )
