"""What inductor makes of a step: the state of a layer is written in place, and never copied."""

from __future__ import annotations

import re

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from tests.compile.attention import Attention, make_attention

STATE = r"(arg\d+_1), (arg\d+_1), (arg\d+_1), (arg\d+_1), (arg\d+_1), (arg\d+_1)"

NEW = r"(?:buf|reinterpret_tensor\(buf)"


def code_of_step(attention: Attention) -> str:
    """The code that calls the kernels of one step."""
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        _, sources = run_and_get_code(
            torch.compile(attention, fullgraph=True), torch.randn(1, 1, 32)
        )
    (source,) = sources
    return source[source.index("def call(") : source.index("runner = ")]


def assert_nothing_is_copied(code: str, largest: int) -> None:
    """New buffers are no larger than the projections of a token, and none was cloned to write."""
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    assert sizes
    for size in sizes:
        elements = 1
        for length in size.replace(" ", "").strip(",").split(","):
            elements *= int(length)
        assert elements <= largest
    assert not re.search(r"copy_\(|clone", code)
    missed = {name: n for name, n in counters["inductor"].items() if "missed_reinplacing" in name}
    assert not any(missed.values()), missed


def test_static_layer_is_written_in_place() -> None:
    attention = make_attention(100, max_cache_len=1024)
    tensors = attention.layer.state.tensors
    addresses = [x.data_ptr() for x in tensors]
    code = code_of_step(attention)
    assert_nothing_is_copied(code, largest=256)
    written = re.search(rf"torch.ops.kvq.quantize_tile_.default\({STATE}, {NEW}", code)
    assert written, code
    read = re.search(rf"torch.ops.kvq.lut_attention.default\(.*?, {STATE}, ", code)
    assert read and read.groups() == written.groups(), code
    for name, tensor in zip(written.groups(), tensors, strict=True):
        assert f"assert_size_stride({name}, {tuple(tensor.shape)}, " in code
    assert [x.data_ptr() for x in attention.layer.state.tensors] == addresses
    assert int(attention.layer.state.lengths[0, 1]) == 101


def test_growing_layer_is_not_in_the_code() -> None:
    attention = make_attention(100)
    code = code_of_step(attention)
    assert_nothing_is_copied(code, largest=256)
    assert re.search(rf"torch.ops.kvq._layer_update.default\(arg\d+_1, {NEW}", code), code
    assert int(attention.layer.state.lengths[0, 1]) == 101
