"""How alike the inputs of a model's attention layers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq.integrations.projections import find_attention


@dataclass(frozen=True)
class Similarity:
    """How alike layer inputs are, over the tokens of a text.

    Attributes:
        cosine: float32 ``[layers, layers]``, the mean cosine of the inputs of two layers.
        difference: float32 ``[layers - 1]``, the norm of what the input of a layer differs from
            that of the layer before, as a part of its own norm. Below 1 a difference takes fewer
            bits than the input for the same error, a bit fewer for each half.
    """

    cosine: Tensor
    difference: Tensor

    @property
    def first_layers(self) -> int:
        """Layers before those that are all better stored as differences, at least one.

        ``XQuantCache(mode="cl", first_layers=...)`` stores these as they are.
        """
        larger = (self.difference >= 1).nonzero()
        return 1 if not len(larger) else int(larger[-1]) + 2

    def groups(self, least: float = 0.9) -> list[list[int]]:
        """Layers one behind another of which each has at least this cosine to the one before.

        Example:
            >>> cosine = torch.tensor([[1, 0.95, 0.5], [0.95, 1, 0.5], [0.5, 0.5, 1]])
            >>> Similarity(cosine, torch.tensor([0.3, 1.0])).groups()
            [[0, 1], [2]]
        """
        groups = [[0]]
        for layer, cosine in enumerate(self.cosine.diagonal(1).tolist(), start=1):
            if cosine < least:
                groups.append([])
            groups[-1].append(layer)
        return groups

    def plot(self, axes: Any = None) -> Any:
        """Draw the cosines as a picture; needs matplotlib.

        Args:
            axes: matplotlib axes to draw on; those of a new figure when not given.

        Returns:
            The axes; ``axes.figure.savefig("similarity.png")`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            axes = plt.figure(layout="constrained").subplots()
        image = axes.imshow(self.cosine.numpy(), vmin=0, vmax=1, origin="lower")
        axes.figure.colorbar(image, ax=axes, label="cosine")
        axes.set(xlabel="layer", ylabel="layer", title="Inputs of attention layers")
        return axes


@torch.no_grad()
def cross_layer_similarity(model: Any, text: str | Tensor, tokenizer: Any = None) -> Similarity:
    """Compare the inputs of all attention layers of a model with one another.

    Args:
        model: a causal language model of Transformers.
        text: a text, or its tokens, int64 ``[batch, tokens]``.
        tokenizer: of the model, for a text.

    Raises:
        ValueError: a text without a tokenizer, or a model without attention modules that are known.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=128, intermediate_size=128, num_attention_heads=4, vocab_size=100,
        ...     num_hidden_layers=3, num_key_value_heads=2))
        >>> similarity = cross_layer_similarity(model, torch.ones(1, 20, dtype=torch.long))
        >>> similarity.cosine.shape, similarity.difference.shape
        (torch.Size([3, 3]), torch.Size([2]))
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("tokenizer is needed for a text, got None")
        text = tokenizer(text, return_tensors="pt")["input_ids"]
    modules = [module for _, module in sorted(find_attention(model).items())]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention modules that are known")
    inputs: dict[int, Tensor] = {}

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        inputs[module.layer_idx] = x.float().flatten(0, 1)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for _, module in modules]
    try:
        model(text, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = torch.stack([x for _, x in sorted(inputs.items())])
    unit = F.normalize(layers, dim=-1)
    cosine = (torch.einsum("itc,jtc->ij", unit, unit) / unit.shape[1]).cpu()
    return Similarity(
        cosine, (layers[1:] - layers[:-1]).norm(dim=(1, 2)) / layers[1:].norm(dim=(1, 2))
    )
