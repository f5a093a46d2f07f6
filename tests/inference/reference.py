"""A slow looped decoder in float64 that knows nothing of the engine: one token, one key at a time.

It keeps every key and value of every step of every token in dictionaries, and asks a rule which of
them a later token sees. The rotary table is the model's own (fp32, as in training), so that what
remains to differ is rounding in float64.
"""

import math

import torch
from torch import Tensor

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.inference.exit_decider import exit_steps
from titan_loop.inference.exit_policy import QExit
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

CONTEXT = 48
VOCABULARY = 128


def make_model(seed: int = 0, **options) -> LoopDecoder:
    """Return a debug model away from its symmetric start: norms of 1, a silent gate."""
    torch.manual_seed(seed)
    return perturbed(build_decoder(OuroOptions(size="debugmodel", **options), max_seq_len=CONTEXT))


def perturbed(model: LoopDecoder) -> LoopDecoder:
    """Add noise to every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def prompts(*lengths: int, seed: int = 3, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def q_exit_steps(exit_logit_RBL: Tensor, threshold: float) -> Tensor:
    """Return the exit steps under `QExit` of states that are their own exit logits."""
    return exit_steps(
        QExit(threshold),
        list(exit_logit_RBL.unsqueeze(-1)),
        gate=lambda hidden: hidden.squeeze(-1),
        readout=lambda hidden: hidden,
    )


class Reference:
    """One row: `state(token)` runs it through `steps` steps and remembers what it leaves behind."""

    def __init__(self, model: LoopDecoder, kv_cache: str, deepest: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.deepest = deepest
        self.weights = {k: v.detach().double() for k, v in model.state_dict().items()}
        self.kept: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = []

    def prompt(self, tokens: list[int]) -> list[Tensor]:
        """Return the last token's states after every step; each step sees its own step's keys."""
        visited = [self._run(token, self.deepest, visited_only=True) for token in tokens]
        return visited[-1]

    def token(self, token: int, steps: int) -> list[Tensor]:
        """Return a generated token's states after each of `steps` steps."""
        return self._run(token, steps, visited_only=False)

    def logits(self, state: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ state

    def gate(self, state: Tensor) -> float:
        weight = self.weights
        return float(weight["exit_gate.weight"][0] @ state + weight["exit_gate.bias"][0])

    def _run(self, token: int, steps: int, *, visited_only: bool) -> list[Tensor]:
        mine: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        h = self.weights["tok_embeddings.weight"][token]
        states = []
        for step in range(1, steps + 1):
            for layer in range(len(self.model.layers)):
                h = self._layer(h, step, layer, mine, visited_only)
            h = self._norm(h, "norm")
            states.append(h)
        self.kept.append(mine)
        return states

    def _seen(self, mine: dict, step: int, layer: int, visited_only: bool):
        """What the current step sees of an earlier token."""
        last = max(s for s, _ in mine)
        if visited_only:  # within the prompt
            return mine[step, layer]
        match self.kv_cache:
            case "full":
                return mine[min(step, last), layer]
            case "last":
                return mine[last, layer]
            case "first":
                return mine[1, layer]
            case _:
                pairs = [mine[s, layer] for s in range(1, last + 1)]
                return tuple(torch.stack(part).mean(0) for part in zip(*pairs, strict=True))

    def _layer(self, h: Tensor, step: int, layer: int, mine: dict, visited_only: bool) -> Tensor:
        name = f"layers.{layer}"
        x = self._norm(h, f"{name}.attention_norm")
        q, k, v = (
            (self.weights[f"{name}.attention.qkv_linear.w{c}.weight"] @ x).view(4, 16)
            for c in "qkv"
        )
        position = len(self.kept)
        mine[step, layer] = (self._rotate(k, position), v)
        seen = [self._seen(old, step, layer, visited_only) for old in self.kept]
        keys, values = zip(*seen, mine[step, layer], strict=True)
        q = self._rotate(q, position)
        heads = []
        for head in range(4):
            scores = torch.stack([q[head] @ key[head] for key in keys]) / math.sqrt(16)
            weights = scores.softmax(0)
            heads.append(sum(w * value[head] for w, value in zip(weights, values, strict=True)))
        out = self.weights[f"{name}.attention.wo.weight"] @ torch.cat(heads)
        h = h + self._norm(out, f"{name}.attention_post_norm")
        x = self._norm(h, f"{name}.ffn_norm")
        w1, w2, w3 = (self.weights[f"{name}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        out = w2 @ (torch.nn.functional.silu(w1 @ x) * (w3 @ x))
        return h + self._norm(out, f"{name}.ffn_post_norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        cos, sin = self.model.positions.table.cache[position].double().chunk(2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((second, first), -1) * sin  # the table has their signs


def generate(
    model: LoopDecoder,
    prompt: list[int],
    count: int,
    *,
    kv_cache: str = "full",
    deepest: int = 3,
    leaves=lambda states, reference: False,
) -> tuple[list[int], list[int], list[Tensor]]:
    """Decode greedily with the reference; return tokens, exit steps and logits.

    `leaves(states so far, reference)` says whether to leave after the last of these states.
    """
    reference = Reference(model, kv_cache, deepest)

    def exit_step(states: list[Tensor]) -> int:
        early = [r for r in range(1, deepest) if leaves(states[:r], reference)]
        return min(early, default=deepest)

    tokens, steps, logits = [], [], []
    states = reference.prompt(prompt)
    while True:
        steps.append(exit_step(states))
        logits.append(reference.logits(states[steps[-1] - 1]))
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count:
            return tokens, steps, logits
        # To know where the token leaves, look at its states without leaving anything behind.
        states = reference.token(tokens[-1], deepest)
        reference.kept.pop()
        states = reference.token(tokens[-1], exit_step(states))
