"""Answer a question about a long text with a packed cache, then with Transformers' own.

Every figure of the table is measured in the run that prints it.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

from torch_kvq import KVQCache

from .model import load_model
from .text import document

QUESTION = "Explain how Python resolves names, using the text above."
MIB = 2**20

console = Console(highlight=False)


@dataclass
class Clock(BaseStreamer):
    """Notes when ``generate`` hands over the prompt and each new token.

    Attributes:
        text: A streamer that also prints the tokens, or None to stay silent.
        times: Seconds, the first for the prompt, then one for each token.
    """

    text: BaseStreamer | None = None
    times: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        """Take ``int64[1, n]``, the prompt, or ``int64[1]``, a token."""
        self.times.append(time.perf_counter())
        if self.text is not None:
            self.text.put(value)

    def end(self) -> None:
        """Take the end of the answer."""
        if self.text is not None:
            self.text.end()


@dataclass(frozen=True)
class Run:
    """What one generation gave: its tokens, its times in seconds and its cache's bytes."""

    answer: list[int]
    prefill: float
    decode: float
    cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Speed after the prompt: the first token belongs to the prefill."""
        return (len(self.answer) - 1) / self.decode


def main() -> None:
    """Parse the command line, run both caches and print the table."""
    args = parse_args()
    # Newer releases call it cache, older ones know past_key_values alone.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)

    model, tokenizer = load_model(args.model)
    inputs = prompt(tokenizer, args.context)
    # The first call of a process also imports modules and starts threads.
    model.generate(inputs["input_ids"][:, :16], max_new_tokens=2, do_sample=False)
    length = inputs["input_ids"].shape[1]
    console.print(f"[bold]{length} tokens of text[/], then: {QUESTION}\n")

    packed_cache = KVQCache(bits=args.bits)
    text = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    packed = generate(model, inputs, packed_cache, args.tokens, Clock(text))
    report = packed_cache.memory_report()
    console.print()
    with console.status("The same with an uncompressed cache"):
        plain_cache = transformers.DynamicCache(config=model.config)
        plain = generate(model, inputs, plain_cache, len(packed.answer), Clock(), exactly=True)
    console.print(table(f"KVQCache(bits={args.bits!r})", packed, plain))
    console.print(str(report), markup=False)


def parse_args() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m torch_kvq.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a path or a name on the hub")
    parser.add_argument("--bits", default=4, type=bits, help='2, 3, 4, 16 or "4/3"')
    parser.add_argument("--tokens", default=96, type=int, help="length of the answer, at most")
    parser.add_argument("--context", default=3072, type=int, help="tokens of text to read first")
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error("--tokens must be 2 or more: the speed is that of the second and later ones")
    return args


def bits(text: str) -> int | str:
    """A preset of `KVQCache`: a number, or a text such as ``4/3``."""
    value = int(text) if text.isdecimal() else text
    try:
        KVQCache(bits=value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def prompt(tokenizer: Any, context: int) -> dict[str, torch.Tensor]:
    """A chat of one message: `context` tokens of text, then the question."""
    content = f"{tokenizer.decode(document(tokenizer, context)[0])}\n\n{QUESTION}"
    inputs: dict[str, torch.Tensor] = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    return inputs


def generate(
    model: Any,
    inputs: dict[str, torch.Tensor],
    cache: transformers.Cache,
    tokens: int,
    clock: Clock,
    exactly: bool = False,
) -> Run:
    """Generate greedily, at most `tokens` tokens or exactly as many, into an empty `cache`."""
    output = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens if exactly else None,
        do_sample=False,
        streamer=clock,
    )
    start, first, *_, last = clock.times
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(answer, first - start, last - first, cache_bytes(cache))


def cache_bytes(cache: transformers.Cache) -> int:
    """Bytes that `cache` holds for the tokens it has seen."""
    if isinstance(cache, KVQCache):
        return int(cache.memory_report().total_bytes)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def table(name: str, packed: Run, plain: Run) -> Table:
    """The two runs side by side."""
    rows = Table()
    for header in ("", name, "DynamicCache", "ratio"):
        rows.add_column(header, justify="right" if header else "left")

    def row(title: str, a: float, b: float, ratio: float, digits: int = 2) -> None:
        rows.add_row(title, f"{a:.{digits}f}", f"{b:.{digits}f}", f"{ratio:.2f}x")

    fast, slow = packed.tokens_per_second, plain.tokens_per_second
    size, full = packed.cache_bytes / MIB, plain.cache_bytes / MIB
    row("decode, tokens/s", fast, slow, fast / slow, digits=1)
    row("prefill, s", packed.prefill, plain.prefill, plain.prefill / packed.prefill)
    row("cache, MiB", size, full, full / size)
    pairs = zip(packed.answer, plain.answer, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.answer))
    rows.add_row("same tokens from the start", str(same), str(len(plain.answer)), "")
    return rows


if __name__ == "__main__":
    main()
