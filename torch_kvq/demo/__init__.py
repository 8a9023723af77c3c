"""A demonstration on a small model: ``python -m torch_kvq.demo``.

`load_model` and `document` also give the tests and the benchmarks their model and their text.
"""

from .model import load_model
from .text import document

__all__ = ["document", "load_model"]
