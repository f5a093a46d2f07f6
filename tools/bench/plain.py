"""A training step against a plain PyTorch implementation of the same model and objective.

    python tools/bench/plain.py                                # both CPU shapes
    python tools/bench/plain.py --size 134m --seq-len 4096 --batch 4 --recurrent-steps 4   # a GPU
    python tools/bench/plain.py --released FOLDER    # beside the code of the released models, too

The plain model is written the way a careful researcher would: SDPA, one matrix product for q, k, v
and one for gate and up, `F.rms_norm`, fused AdamW, all logits of all steps materialised, bf16
autocast on CUDA. It starts from the same weights; the losses must agree or the script ends with 1.
Steps run in turn in one process. FLOPs over the matmul rate are the model's FLOPs per second over
those of the feed-forward's own product, measured in the same run; the ratio of times is printed
only if the plain model reaches a share of that rate, lest it be a straw man: 0.60 in the first CPU
shape and 0.80 in the second; a named size has no such bound.

FOLDER has `modeling_ouro.py` and `configuration_ouro.py` of a released Ouro model. They run as they
are, with the same weights and the same loss (the authors' training code is not released), in the
environment with transformers 4 that `tools/test_hf.sh` makes, `.venv/hf4`.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conditions import begin
from timing import in_turn, ratios, spread
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_step import (
    ENTROPY_WEIGHT,
    Job,
    batch,
    build,
    device,
    extra_bytes,
    flops_per_step,
    matmul_flops,
    mfu,
    optimizer_step,
    start,
    step_parser,
    trainer_step,
)

from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape
from titan_loop.families.ouro.model import SIZES, OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.loop_config import NORM_EPS

LOSS_TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}  # fp32 in another order; bf16


@dataclass(frozen=True)
class Case:
    """A shape to compare, and the share of the matmul rate the plain model must reach."""

    name: str
    model: OuroOptions
    seq_len: int
    windows: int
    least_share: float


CASES = [
    Case(
        "D 256, 4 layers, V 2,048, L 256, B 2",
        OuroOptions(dim=256, n_layers=4, n_heads=4, hidden_dim=768, vocab_size=2048),
        256,
        2,
        0.60,
    ),
    Case(
        "D 512, 6 layers, V 49,152, L 512, B 1",
        OuroOptions(dim=512, n_layers=6, n_heads=8, hidden_dim=1536, vocab_size=49_152),
        512,
        1,
        0.80,
    ),
]


class PlainLayer(nn.Module):
    """One layer: sandwich norms, fused projections."""

    def __init__(self, source: nn.Module, heads: int) -> None:
        super().__init__()
        weights = {name: whole(parameter) for name, parameter in source.named_parameters()}
        projections = ["attention.qkv_linear.wq", "attention.qkv_linear.wk"]
        projections.append("attention.qkv_linear.wv")
        self.heads = heads
        self.qkv = nn.Parameter(torch.cat([weights[f"{n}.weight"] for n in projections]))
        self.out = nn.Parameter(weights["attention.wo.weight"])
        gate, up = weights["feed_forward.w1.weight"], weights["feed_forward.w3.weight"]
        self.gate_up = nn.Parameter(torch.cat([gate, up]))
        self.down = nn.Parameter(weights["feed_forward.w2.weight"])
        names = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
        self.norms = nn.ParameterList([nn.Parameter(weights[f"{name}.weight"]) for name in names])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer; (B, L, D)."""
        before, after, ffn_before, ffn_after = self.norms
        b, length, d = x.shape
        qkv = F.linear(norm(x, before), self.qkv).view(b, length, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        attended = F.linear(attended.transpose(1, 2).reshape(b, length, d), self.out)
        x = x + norm(attended, after)
        gate, up = F.linear(norm(x, ffn_before), self.gate_up).chunk(2, dim=-1)
        return x + norm(F.linear(F.silu(gate) * up, self.down), ffn_after)


def whole(weight: Tensor) -> Tensor:
    """Return a copy of a weight, also of one that FSDP shards (on CUDA at a world of one, too)."""
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight.detach().clone()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the width."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), NORM_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, N, L, H)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class PlainLoop(nn.Module):
    """The looped model and its Stage I loss with all logits in memory."""

    def __init__(self, source: LoopDecoder, heads: int, seq_len: int) -> None:
        super().__init__()
        self.steps = source.recurrent_steps
        self.embedding = nn.Parameter(whole(source.tok_embeddings.weight))
        self.head = nn.Parameter(whole(source.lm_head.weight))
        self.final_norm = nn.Parameter(whole(source.norm.weight))
        self.layers = nn.ModuleList(PlainLayer(layer, heads) for layer in source.layers.values())
        assert source.exit_gate is not None
        self.gate = nn.Linear(self.embedding.shape[1], 1)
        gate = source.exit_gate.state_dict()
        self.gate.load_state_dict({name: whole(value) for name, value in gate.items()})
        positions = torch.arange(seq_len, device=device()).unsqueeze(0)
        rows = source.positions.shared(positions, positions)
        assert rows is not None
        cos, sin = rows.transpose(1, 2).chunk(2, dim=-1)
        self.register_buffer("cos", cos.clone())
        # Ours has the sign of the exchanged half in the table.
        self.register_buffer("sin", sin[..., sin.shape[-1] // 2 :].repeat(1, 1, 1, 2))
        self.to(device())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss in nats per token."""
        with torch.autocast("cuda", torch.bfloat16, enabled=device().type == "cuda"):
            state = F.embedding(tokens, self.embedding)
            states = []
            for _ in range(self.steps):
                for layer in self.layers:
                    state = layer(state, self.cos, self.sin)
                state = norm(state, self.final_norm)
                states.append(state)
            stacked = torch.stack(states)
            logits = F.linear(stacked, self.head)
        return expected_loss(logits, self.gate(stacked.float()), labels)


class ReleasedLoop(nn.Module):
    """The code of the released models around the same Stage I loss."""

    def __init__(self, folder: str, source: LoopDecoder, seq_len: int) -> None:
        super().__init__()
        from transformers.dynamic_module_utils import (  # pyright: ignore[reportMissingImports]
            get_class_from_dynamic_module,
        )

        shape = OuroShape.from_architecture(
            source.config.architecture,
            recurrent_steps=source.recurrent_steps,
            max_positions=seq_len,
        )
        kinds = ("configuration_ouro.OuroConfig", "modeling_ouro.OuroForCausalLM")
        config_class, model_class = (get_class_from_dynamic_module(kind, folder) for kind in kinds)
        fields = shape.to_config(dtype="float32", bos_id=None, eos_id=None)
        self.causal = model_class(config_class(**fields, attn_implementation="sdpa"))
        weights = {name: whole(parameter) for name, parameter in source.named_parameters()}
        ours = {name: weights[shape.parameter_name(name)] for name in shape.tensor_shapes()}
        self.causal.load_state_dict(ours)
        self.to(device())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss in nats per token."""
        with torch.autocast("cuda", torch.bfloat16, enabled=device().type == "cuda"):
            _, states, exit_logits = self.causal.model(tokens, use_cache=False)
            logits = self.causal.lm_head(torch.stack(states))
        return expected_loss(logits, torch.stack(exit_logits).float(), labels)


def expected_loss(logits: Tensor, exit_logits: Tensor, labels: Tensor) -> Tensor:
    """Return Stage I's loss of (R, B, L, V) logits and (R, B, L, 1) exit logits."""
    steps = len(logits)
    cross_entropy = F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.expand(steps, *labels.shape).flatten(),
        reduction="none",
    ).view(steps, -1)
    exit_logit = exit_logits.squeeze(-1).flatten(1)
    go_on = F.logsigmoid(-exit_logit).cumsum(dim=0)
    before = torch.cat([torch.zeros_like(go_on[:1]), go_on[:-1]])
    log_p = torch.cat([(F.logsigmoid(exit_logit) + before)[:-1], before[-1:]])
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=0)
    return ((p * cross_entropy).sum(dim=0) - ENTROPY_WEIGHT * entropy).mean()


def main() -> int:
    """Compare every case and print the table."""
    parser = step_parser(__doc__)
    parser.add_argument("--size", help="a named size instead of the two CPU shapes")
    parser.add_argument("--seq-len", type=int, default=4096, help="with --size")
    parser.add_argument("--batch", type=int, default=4, help="with --size")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true", help="leave compiled steps out")
    parser.add_argument(
        "--compile-plain", action="store_true", help="compile the plain layers, too"
    )
    parser.add_argument("--released", metavar="FOLDER", help="code of a released model")
    options = begin(parser, start=start)
    if options.released:
        if not (Path(options.released) / "modeling_ouro.py").is_file():
            parser.error(f"--released {options.released} has no modeling_ouro.py")
        if find_spec("transformers") is None:
            parser.error("--released needs transformers; use .venv/hf4/bin/python")
    cases = CASES
    if options.size is not None:
        named = OuroOptions(size=options.size)
        cases = [Case(options.size, named, options.seq_len, options.batch, 0.0)]
    agree = [_compare(case, options) for case in cases]
    dist.destroy_process_group()
    return 0 if all(agree) else 1


def _compare(case: Case, options: argparse.Namespace) -> bool:
    case.model.recurrent_steps = options.recurrent_steps
    shape = SIZES[case.model.size]
    heads = case.model.n_heads or shape.n_heads
    job = Job(model=case.model, seq_len=case.seq_len, windows=case.windows)
    compiled = Job(model=case.model, seq_len=case.seq_len, windows=case.windows, compiled=True)
    source = build(job)
    tokens, labels = batch(job)
    models: dict[str, nn.Module] = {}
    steps = {}
    models["plain"] = plain = PlainLoop(source, heads, case.seq_len)
    steps["plain"] = optimizer_step(plain, lambda: plain(tokens, labels))
    if options.compile_plain:
        quick = PlainLoop(source, heads, case.seq_len)
        for layer in quick.layers:
            layer.compile()
        models["plain, compiled"] = quick
        steps["plain, compiled"] = optimizer_step(quick, lambda: quick(tokens, labels))
    if options.released:
        for name in ("released", "released, compiled")[: 1 if options.no_compile else 2]:
            models[name] = released = ReleasedLoop(options.released, source, case.seq_len)
            if name.endswith("compiled"):
                for layer in released.causal.model.layers:
                    layer.compile()
            steps[name] = optimizer_step(
                released, lambda released=released: released(tokens, labels)
            )
    models["titan_loop"] = source
    steps["titan_loop"] = trainer_step(job, source)
    if not options.no_compile:
        models["titan_loop, compiled"] = build(compiled)
        steps["titan_loop, compiled"] = trainer_step(compiled, models["titan_loop, compiled"])
    losses = {name: float(step()) for name, step in steps.items()}
    times = dict(
        zip(
            steps,
            in_turn(list(steps.values()), pairs=options.pairs, warmup=options.warmup),
            strict=True,
        )
    )
    extra = {name: extra_bytes(step, models[name]) for name, step in steps.items()}
    width = case.model.dim or shape.dim
    feed_forward = case.model.hidden_dim or shape.hidden_dim
    rate = matmul_flops(job.tokens, width, feed_forward)
    flops = flops_per_step(job)
    print(f"\n{case.name}, R = {options.recurrent_steps}; matmul {rate / 1e9:.0f} GFLOP/s")
    print(
        "model | loss | step s | tokens/s | FLOPs over matmul rate | MFU | extra MB | "
        "plain over it, time | memory"
    )
    share = {name: flops / statistics.median(t) / rate for name, t in times.items()}
    for name in steps:
        faster = spread(ratios(times["plain"], times[name]), 2)
        if share["plain"] < case.least_share:
            faster = f"- (plain below {case.least_share:.2f})"
        print(
            f"{name} | {losses[name]:.5f} | {spread(times[name])} | "
            f"{job.tokens / statistics.median(times[name]):,.0f} | {share[name]:.2f} | "
            f"{mfu(flops, times[name])} | "
            f"{extra[name] / 1e6:.0f} | {faster} | {extra['plain'] / extra[name]:.2f}"
        )
    tolerance = LOSS_TOLERANCE[device().type]
    agree = all(abs(loss / losses["plain"] - 1) <= tolerance for loss in losses.values())
    if not agree:
        print(f"losses differ by more than {tolerance}", file=sys.stderr)
    return agree


if __name__ == "__main__":
    raise SystemExit(main())
