r"""The streamed readout, forward and backward: which chunk wins, and how far it is from its limit.

    python tools/bench/readout.py
    python tools/bench/readout.py --shapes 1024x49152x4 --tokens 16384 \
        --chunks 1024 2048 4096 8192 16384 --compiled --operations 12             # a GPU

A shape is width × vocabulary × recurrent steps. The limit is the time of every chunk's three matrix
products (logits, gradient of the states, gradient of the head) into memory allocated beforehand;
the rest of the readout's time goes into passes over the logits. It is compared with materialised
logits of all states and torch's cross entropy; with `--compiled` also with the default chunk whose
passes are compiled. All take turns. Extra memory is the peak beyond the head's weight and
its gradient; gradients of the states count.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conditions import begin
from roofline import print_operations
from timing import in_turn, ratios, spread
from torch import Tensor
from training_step import device, extra_bytes, start, step_parser

from titan_loop.models import readout
from titan_loop.models.readout import LMHead

DEFAULT_CHUNK = LMHead.Config(in_features=1, out_features=1).chunk_tokens
NEAR = 1.03  # slower by less than this, and the default may stay


class Readout:
    """One shape's head, states, labels and weights, the same for every way to read them out."""

    def __init__(self, shape: str, tokens: int):
        self.width, self.vocabulary, self.steps = (int(part) for part in shape.split("x"))
        dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
        torch.manual_seed(0)
        options = {"device": device(), "dtype": dtype}
        self.head = LMHead.Config(in_features=self.width, out_features=self.vocabulary).build()
        self.head.to(**options)
        torch.nn.init.normal_(self.head.weight, std=self.width**-0.5)
        self.hidden = tuple(
            torch.randn(1, tokens, self.width, **options).requires_grad_()
            for _ in range(self.steps)
        )
        self.labels = torch.randint(self.vocabulary, (1, tokens), device=device())
        self.weight = torch.rand(self.steps, 1, tokens, device=device()) / tokens

    def streamed(self, chunk_tokens: int) -> Callable[[], Tensor]:
        """Return a function that takes the streamed loss and its gradients."""

        def step() -> Tensor:
            self.head.chunk_tokens = chunk_tokens
            loss, _ = self.head(self.hidden, labels_BL=self.labels, weight_RBL=self.weight)
            return self._differentiated(loss)

        return step

    def compiled(self, chunk_tokens: int) -> Callable[[], Tensor]:
        """Return the streamed step with all between the products compiled."""
        step, eager = self.streamed(chunk_tokens), readout._cross_entropy_to_gradient_
        compiled = torch.compile(eager)

        def compiled_step() -> Tensor:
            readout._cross_entropy_to_gradient_ = compiled
            try:
                return step()
            finally:
                readout._cross_entropy_to_gradient_ = eager

        return compiled_step

    def materialised(self) -> Tensor:
        """Take the same with the logits of all states at once."""
        loss = torch.zeros((), device=device())
        for hidden, weight in zip(self.hidden, self.weight, strict=True):
            logits = F.linear(hidden, self.head.weight).flatten(0, 1).float()
            ce = F.cross_entropy(logits, self.labels.flatten(), reduction="none")
            loss = loss + (weight.flatten() * ce).sum()
        return self._differentiated(loss)

    def products(self, chunk_tokens: int) -> Callable[[], None]:
        """Return a function that does nothing but the products of the chunks."""
        head, tokens = self.head.weight.detach(), self.labels.numel()
        logits = head.new_empty(min(chunk_tokens, tokens), self.vocabulary)
        hidden_grad, head_grad = torch.empty_like(self.hidden[0][0]), torch.zeros_like(head)
        states = [hidden.detach()[0] for hidden in self.hidden]

        def step() -> None:
            for state in states:
                for first in range(0, tokens, chunk_tokens):
                    chunk = slice(first, first + chunk_tokens)
                    out = logits[: state[chunk].shape[0]]
                    torch.mm(state[chunk], head.t(), out=out)
                    torch.mm(out, head, out=hidden_grad[chunk])
                    # Not summed: with logits in the gradient's place the sum would grow and grow.
                    torch.mm(out.t(), state[chunk], out=head_grad)

        return step

    def _differentiated(self, loss: Tensor) -> Tensor:
        torch.autograd.grad(loss, [*self.hidden, self.head.weight])
        return loss.detach()


def main() -> int:
    """Print one table a shape."""
    parser = step_parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["256x2048x4", "512x49152x1"], help="width × vocabulary × R"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch, read out R times")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--operations", type=int, default=0, help="list the N longest at the best")
    parser.add_argument("--compiled", action="store_true", help="the passes compiled, too")
    options = begin(parser, start=start)
    for shape in options.shapes:
        _table(options, shape)
    dist.destroy_process_group()
    return 0


def _table(options: argparse.Namespace, shape: str) -> None:
    task = Readout(shape, options.tokens)
    default = min(DEFAULT_CHUNK, options.tokens)
    chunks = sorted({*(min(chunk, options.tokens) for chunk in options.chunks), default})
    streamed = [task.streamed(chunk) for chunk in chunks]
    named = {f"chunk {chunk}": step for chunk, step in zip(chunks, streamed, strict=True)}
    if options.compiled:
        named[f"chunk {default}, compiled"] = task.compiled(default)
    named["materialised"] = task.materialised
    steps = [*named.values(), task.products(default)]
    losses = torch.stack([step() for step in steps[:-1]])
    *seconds, limit = in_turn(steps, pairs=options.pairs, warmup=options.warmup)
    print(
        f"\nD × V × R = {shape}, {options.tokens} tokens, losses within "
        f"{float((losses.max() - losses.min()) / losses.min()):.0e} | s | over the products | "
        "over materialised | extra MB"
    )
    for (name, step), times in zip(named.items(), seconds, strict=True):
        print(
            f"{name} | {spread(times)} | {spread(ratios(times, limit), 2)} | "
            f"{spread(ratios(times, seconds[-1]), 2)} | "
            f"{extra_bytes(step, task.head) / 1e6:.0f}"
        )
    print(f"products, chunk {default} | {spread(limit)} | 1.00 | - | -")
    best = min(range(len(chunks)), key=lambda index: statistics.median(seconds[index]))
    behind = statistics.median(ratios(seconds[chunks.index(default)], seconds[best]))
    verdict = "stays" if behind <= NEAR else f"is too slow: more than {NEAR}"
    print(
        f"fastest: {chunks[best]}; the default, {default}, takes {behind:.3f} of it and {verdict}"
    )
    if options.operations:
        print_operations(streamed[best], options.operations)


if __name__ == "__main__":
    raise SystemExit(main())
