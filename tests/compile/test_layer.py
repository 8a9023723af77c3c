"""A `KVQLayer` in a compiled module of one's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.compile.attention import Attention, make_attention
from tests.compile.decoding import Compiled
from torch_kvq import KVQLayer

KINDS = pytest.mark.parametrize("options", [{"max_cache_len": 448}, {}], ids=["static", "growing"])


def captured(attention: Attention) -> str:
    """What the graph of one step calls, but for what becomes of the input before."""
    lines = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                lines.append(f"{node.target}\n    {', '.join(map(_name, node.args))}")
        return graph.forward

    torch.compile(attention, backend=backend, fullgraph=True)(torch.randn(1, 1, 32))
    return "\n".join(line for line in lines if "linear" not in line)


def _name(argument: Any) -> str:
    if not isinstance(argument, torch.fx.Node):
        return str(argument)
    name: str = argument.name
    for prefix in ("l_self_layer_", "state_", "table_pool_"):
        name = name.removeprefix(prefix)
    return name


def outputs(attend: Any, steps: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Results for so many tokens at a time."""
    tokens, batch = sum(steps), 1 if mask is None else len(mask)
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(batch, tokens, 32, generator=generator).split(steps, 1)
    if mask is None:
        return torch.cat([attend(part) for part in parts], 2)
    masks = mask.split(steps, 2)
    return torch.cat([attend(*pair) for pair in zip(parts, masks, strict=True)], 2)


def test_graph_of_a_static_layer() -> None:
    """Pages are touched by the two operators alone."""
    assert_expected_inline(
        captured(make_attention(100, max_cache_len=448)),
        """\
kvq.quantize_tile_.default
    tiles, table_tensor, balance, exact_key, exact_value, lengths, key, value, 4, 4, 4, 64, 256
kvq.lut_attention.default
    query, tiles, table_tensor, balance, exact_key, exact_value, lengths, None
<built-in function getitem>
    lut_attention_default, 0""",
    )


def test_graph_of_a_growing_layer() -> None:
    """It knows neither pages nor buffers."""
    assert_expected_inline(
        captured(make_attention(100)),
        """\
kvq._layer_update.default
    ticket, detach, detach_1
kvq._layer_attend.default
    ticket, detach_2, None, 64""",
    )


@KINDS
@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
def test_steps_are_one_graph(options: dict[str, int]) -> None:
    """Two, once lengths were seen to change; those of a module's own layer need a setting."""
    steps = (1,) * 300
    plain, attention = make_attention(100, **options), make_attention(100, **options)
    compiled = Compiled(attention)
    torch.testing.assert_close(outputs(compiled, steps), outputs(plain, steps), rtol=0, atol=0)
    assert attention.layer.state.lengths.tolist() == [[0, 400, 320]]
    assert compiled.graphs == (1 if options else 2)


def test_growing_layer_as_an_argument() -> None:
    """It needs no setting."""

    def step(layer: KVQLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer.update(key, value)
        return layer.attend(query)

    compiled = Compiled(step)
    for _ in range(2):
        layer, other = KVQLayer(4), KVQLayer(4)
        for _ in range(300):
            query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 2, 1, 64)
            out = compiled(layer, query, key, value)
            assert torch.equal(out, step(other, query, key, value))
    assert compiled.graphs <= 3


@KINDS
def test_chunks(options: dict[str, int]) -> None:
    """Of a prompt, and several tokens later on."""
    steps = (90, 70, 1, 5, 150, 1, 1)
    compiled = Compiled(make_attention(**options), "aot_eager")
    plain = make_attention(**options)
    torch.testing.assert_close(outputs(compiled, steps), outputs(plain, steps), rtol=0, atol=0)


@KINDS
def test_row_that_begins_with_a_later_chunk(options: dict[str, int]) -> None:
    """Until then its keys are kept back, in memory that the graph would use again."""
    steps = (40, 60, 1, 200, 1, 1)
    position = torch.arange(sum(steps))
    start = torch.tensor([50, 0])[:, None, None, None]
    mask = (position <= torch.arange(sum(steps))[:, None]) & (position >= start)
    plain, attention = make_attention(**options), make_attention(**options)
    compiled = Compiled(attention, "inductor")
    torch.testing.assert_close(
        outputs(compiled, steps, mask), outputs(plain, steps, mask), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(attention.layer.state.lengths, plain.layer.state.lengths)
    assert attention.layer.state.lengths[:, 0].tolist() == [50, 0]


def test_what_is_no_step_breaks_the_graph() -> None:
    attention = make_attention(100)

    def cut(x: Tensor) -> Tensor:
        attention(x)
        attention.layer.crop(-1)
        return attention(x)

    with pytest.raises(RuntimeError, match="outside of compiled graphs"):
        torch.compile(cut, backend="eager", fullgraph=True)(torch.randn(1, 1, 32))
    torch.compile(cut, backend="eager")(torch.randn(1, 1, 32))
    assert attention.layer.get_seq_length() == 101


def test_copies_go_by_names_of_their_own() -> None:
    attention = make_attention(100)
    layer, fork, copied = attention.layer, attention.layer.fork(), copy.deepcopy(attention.layer)
    loaded = pickle.loads(pickle.dumps(layer))
    compiled = Compiled(attention)
    for attention.layer in (fork, fork, copied, loaded):
        compiled(torch.randn(1, 1, 32))
    lengths = [each.get_seq_length() for each in (layer, fork, copied, loaded)]
    assert lengths == [100, 102, 101, 101]
    assert [int(each.state.lengths[0, 1]) for each in (layer, fork, copied, loaded)] == lengths
