"""One copy of the frozen policy for learner and engine on the same device (`model.share_base`).

With `engine.adapter=request` the engine holds the same frozen weights as the learner, bit for bit, for the whole run.
After the first sync has proven that, the learner's parameters become views of the engine's memory, at the places that
were recorded while the engine loaded them (`weight_layout.py`), and the learner's own copy is freed. Neither writes to
them: the engine adds the adapter in its forward pass, and the learner trains the adapter alone. The proof of each later
sync compares their checksums with those of the first one, so that a write would be found.
"""

from collections.abc import Callable, Mapping

import torch
from peft import PeftModel

from grpo_ray.errors import SyncError
from grpo_ray.inference.weight_layout import Region
from grpo_ray.models.adapters import frozen_parameters


def share_base(
    model: PeftModel,
    regions: Mapping[str, Region],
    parameters: Mapping[str, torch.Tensor],
    engine_name: Callable[[str], str],
) -> frozenset[str]:
    """Let the learner's frozen weights be views of the engine's, whose content they have.

    Args:
        model: the learner's, with plain LoRA.
        regions: place of each weight in the engine, for those that are there in one piece.
        parameters: the engine's, by its own names.
        engine_name: returns the name under which a weight of the learner is sent.

    Returns:
        Names of the shared weights, as they are sent. Others keep their own copies: weights that the engine stores in
        pieces, in another layout or in another precision.

    Raises:
        SyncError: no weight can be shared.
    """
    shared = set()
    for name, parameter, _ in frozen_parameters(model):
        sent = engine_name(name)
        if sent in regions and (view := _view_of(regions[sent], parameters, parameter)) is not None:
            parameter.data = view
            shared.add(sent)
    if not shared:
        raise SyncError(
            "model.share_base: the engine stores none of the learner's weights in its precision and layout; set "
            "model.share_base=false"
        )
    return frozenset(shared)


def _view_of(region: Region, parameters: Mapping[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a weight in the engine's memory; None if they are arranged or rounded differently."""
    stored = region.stored(parameters)
    is_whole = region.numel() == weight.numel() and stored.shape == weight.shape and stored.is_contiguous()
    return stored if is_whole and (stored.dtype, stored.device) == (weight.dtype, weight.device) else None
