"""llama.cpp, whose KV cache can be packed too: the same model, weights and tokens.

It is reached through the C API of https://pypi.org/project/llama-cpp-python/. Its attention to
packed keys and values is its flash attention, which is on for all types.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import weakref

import torch
from torch import Tensor

from torch_kvq.demo.model import find_gguf

NAME = "llama.cpp"
INSTALL = (
    "CMAKE_ARGS='-DGGML_NATIVE=ON -DGGML_OPENMP=OFF' "
    "pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36"
)
KV_TYPES = ("f16", "q8_0", "q4_0")
"""Of keys and values; the first one stands for the exact cache."""

CHUNK = 512
"""Tokens of a call that reads a prompt, as many as its default for one graph."""


def missing() -> str:
    """Why llama.cpp cannot be timed, empty if it can."""
    return "" if importlib.util.find_spec("llama_cpp") else f"not installed: {INSTALL}"


def describe() -> str:
    """The release, what it was compiled for and how it is called, or why it is missing."""
    if reason := missing():
        return reason
    import llama_cpp

    found = llama_cpp.llama_print_system_info().decode().partition("CPU : ")[2]
    enabled = [item.split(" = ")[0] for item in found.split(" | ") if item.endswith(" = 1")]
    version = importlib.metadata.version("llama-cpp-python")
    return f"{version} ({' '.join(enabled)}), C API, flash attention, one thread"


class Model:
    """The model of the other caches as the file has it, which they read with float32 weights."""

    def __init__(self) -> None:
        import llama_cpp

        self.library = llama_cpp
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        path = str(find_gguf()).encode()
        self.pointer = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        if not self.pointer:
            raise RuntimeError(f"llama.cpp cannot read {find_gguf()}")
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)

    @property
    def weights(self) -> str:
        """How the file stores most weights, as llama.cpp names it."""
        text = ctypes.create_string_buffer(128)
        self.library.llama_model_desc(self.pointer, text, len(text))
        return text.value.decode().split()[-1]

    def session(self, kv_type: str, tokens: int) -> Session:
        """An empty cache for at most ``tokens`` tokens whose keys and values have a type."""
        return Session(self, kv_type, tokens)


class Session:
    """Tokens that were read, and decoding after them.

    Args:
        model: the model.
        kv_type: of keys and values, one of `KV_TYPES`.
        tokens: the most that will be held.
    """

    def __init__(self, model: Model, kv_type: str, tokens: int) -> None:
        self._model, self._library, self.length = model, model.library, 0
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = tokens
        params.n_threads, params.n_threads_batch = 1, os.cpu_count() or 1
        params.type_k = params.type_v = getattr(library, f"GGML_TYPE_{kv_type.upper()}")
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = library.llama_init_from_model(model.pointer, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {tokens} tokens in {kv_type}")
        weakref.finalize(self, library.llama_free, self._context)
        vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model.pointer))
        self._logits_type = ctypes.POINTER(ctypes.c_float * vocabulary)

    @property
    def bytes(self) -> int:
        """Bytes of the tokens that are held; memory is there for the most that will be."""
        return int(self._library.llama_state_seq_get_size(self._context, 0))

    def read(self, ids: Tensor) -> None:
        """Read a text, on all cores, of which the first tokens may have been read before.

        Args:
            ids: ``int64[1, tokens]``.
        """
        for part in ids[:, self.length :].split(CHUNK, 1):
            self._decode(part)

    def step(self, token: Tensor) -> Tensor:
        """Decode one token.

        Args:
            token: ``int64[1, 1]``.

        Returns:
            float32 ``[1, vocabulary]``, the logits.
        """
        self._decode(token)
        pointer = self._library.llama_get_logits_ith(self._context, -1)
        logits = ctypes.cast(pointer, self._logits_type).contents
        return torch.frombuffer(logits, dtype=torch.float32).clone().unsqueeze(0)

    def rewind(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        memory = self._library.llama_get_memory(self._context)
        if not self._library.llama_memory_seq_rm(memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp cannot go back to {length} tokens")
        self.length = length

    def _decode(self, ids: Tensor) -> None:
        tokens = ids[0].tolist()
        array = (self._library.llama_token * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(array, len(tokens))
        if status := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {status} at {self.length} tokens")
        self._library.llama_synchronize(self._context)
        self.length += len(tokens)


def sessions(tokens: int) -> dict[str, Session]:
    """An empty session for every type of keys and values, by name; none where it is missing.

    Args:
        tokens: the most that each will hold.
    """
    if missing():
        return {}
    model = Model()
    return {session_name(model.weights, kv): model.session(kv, tokens) for kv in KV_TYPES}


def session_name(weights: str, kv_type: str) -> str:
    """What the report calls a session."""
    return f"{NAME}, {weights} weights, KV {kv_type}"
