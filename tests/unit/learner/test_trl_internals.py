"""Private parts of libraries: the list of the trainer's attributes is complete, and patches are undone."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import trl.trainer.utils

from grpo_ray.inference.vllm_internals import MaskReader
from grpo_ray.learner import learner, trl_internals
from grpo_ray.learner.masked_output_layer import MaskedOutputLayer
from grpo_ray.learner.trl_internals import (
    PRIVATE_ATTRIBUTES,
    append_metrics,
    scoring_allowed_tokens,
    scoring_labels_only,
)

TRAINING = Path(learner.__file__).parent


def test_private_attributes_lists_all_that_the_learner_uses() -> None:
    tree = ast.parse(Path(learner.__file__).read_text(encoding="utf-8"))
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Learner"]
    private = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if re.fullmatch(r"_[a-z]\w+", node.attr)
    }
    own = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    own |= {"_loss_pass", "_tokens_read"}
    assert private - own == set(PRIVATE_ATTRIBUTES)


@pytest.mark.parametrize("path", sorted(TRAINING.glob("*.py")), ids=lambda path: path.name)
def test_private_names_of_objects_only_in_trl_internals(path: Path) -> None:
    if path.name == Path(trl_internals.__file__).name:
        return
    foreign = {
        f"{ast.unparse(node)} (line {node.lineno})"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        if ast.unparse(node.value) not in ("self", "super()", "os", "cls")
    }
    assert foreign == set()


def test_append_metrics_keeps_earlier_values() -> None:
    metrics: trl_internals.Metrics = trl_internals.Metrics(list)
    append_metrics(metrics, {"loss": 1.0})
    append_metrics(metrics, {"loss": 2.0, "gap": 3.0})
    assert metrics == {"loss": [1.0, 2.0], "gap": [3.0]}


def test_scoring_labels_only_leaves_no_trace_after_error() -> None:
    utils = trl.trainer.utils
    before = utils._use_triton
    with pytest.raises(KeyError), scoring_labels_only(True):
        assert utils._use_triton(torch.device("cpu"))
        raise KeyError
    assert utils._use_triton is before
    with scoring_labels_only(False):
        assert utils._use_triton is before


def test_scoring_allowed_tokens_leaves_no_trace_and_reads_all_masks() -> None:
    utils = trl.trainer.utils
    before = utils._ChunkedLogProbFunction
    with scoring_allowed_tokens(None):
        assert utils._ChunkedLogProbFunction is before
    reader = MaskReader(backend=None, begin=lambda: None, completions=[[1, 2], [3]])
    with pytest.raises(KeyError), scoring_allowed_tokens(reader):
        assert utils._ChunkedLogProbFunction is not before
        raise KeyError
    assert utils._ChunkedLogProbFunction is before
    unread = "3 tokens with masks have not been scored"
    with pytest.raises(AssertionError, match=unread), scoring_allowed_tokens(reader):
        pass
    assert utils._ChunkedLogProbFunction is before


def test_output_layer_of_trl_is_called_as_ours_is() -> None:
    """`MaskedOutputLayer.apply` takes the arguments of the function that it stands for, in their order."""
    theirs = list(inspect.signature(trl.trainer.utils._ChunkedLogProbFunction.forward).parameters)[1:]
    ours = list(inspect.signature(MaskedOutputLayer.apply).parameters)[1:]
    assert len(ours) == len(theirs)
    assert theirs == ["final_logit_softcapping" if name == "softcap" else name for name in ours]
