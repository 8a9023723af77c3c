"""Long English prose that every CPython carries: the topics of its ``help()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prose before tables; topics that an interpreter lacks are passed over.
TOPICS = (
    *("objects", "execmodel", "customization", "class", "exceptions", "import", "with", "lambda"),
    *("string-methods", "debugger", "specialnames", "numeric-types", "try", "function"),
    *("compound", "types", "attribute-access", "assignment", "comparisons", "naming", "strings"),
    *("formatstrings", "typesseq", "typesmapping", "calls", "sequence-types"),
)


def document(tokenizer: PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """The first `tokens` tokens of the text, the same at every call.

    Args:
        tokenizer: The tokenizer of the model that reads the text.
        tokens: Length of the result.

    Returns:
        ``int64[1, tokens]``, without special tokens, to pass on as ``input_ids``.

    Raises:
        ValueError: The interpreter's text has fewer tokens.
    """
    ids: list[int] = []
    for topic in _topics():
        if len(ids) >= tokens:
            break
        ids += tokenizer(topic + "\n\n", add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"tokens={tokens}, but the text has only {len(ids)}")
    return torch.tensor([ids[:tokens]])


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (topics[name].strip() for name in TOPICS if name in topics)
