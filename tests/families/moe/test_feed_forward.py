"""Router, dispatch, balance and losses of a mixture, against slow loops in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.families.moe.feed_forward import LoopMoE
from titan_loop.families.moe.model import MoEOptions
from titan_loop.models.family import build_decoder

B, L, D = 2, 7, 64
CLOSE = 2e-6  # fp32 sums of up to 192 products; outputs are near 0.3


def mixture(**options: object) -> LoopMoE:
    """Return a mixture whose every weight and bias matters."""
    chosen = MoEOptions(n_layers=1, **options)  # type: ignore[arg-type]
    moe = build_decoder(chosen, max_seq_len=8).get_submodule("layers.0.moe")
    assert isinstance(moe, LoopMoE)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.1)
        moe.expert_bias_SE.normal_(std=0.2)
    return moe


def gated(x_D: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return w2 @ (F.silu(w1 @ x_D) * (w3 @ x_D))


def reference(moe: LoopMoE, x_BLD: Tensor, options: MoEOptions, router: int = 0) -> dict:
    """Return output, loads, balance and z, one token at a time in float64."""
    state = {name: value.double() for name, value in moe.state_dict().items()}
    gate = "router" if router == 0 else f"later_routers.{router - 1}"
    experts = [state[f"routed_experts.inner_experts.{w}"] for w in ("w1_EFD", "w2_EDF", "w3_EFD")]
    out, load = torch.zeros(B, L, D).double(), torch.zeros(B, options.experts).double()
    share, z = torch.zeros(B, options.experts).double(), torch.zeros(B, L).double()
    for b in range(B):
        for t in range(L):
            x_D = x_BLD[b, t].double()
            logit_E = state[f"{gate}.gate.weight"] @ x_D
            score_E = logit_E.sigmoid() if options.router == "sigmoid" else logit_E.softmax(0)
            choice_E = score_E + state["expert_bias_SE"][router]
            chosen = sorted(range(options.experts), key=lambda e: -choice_E[e])[: options.top_k]
            total = sum(score_E[e] for e in chosen) if options.normalise_scores else 1.0
            for e in chosen:
                weight = options.score_scale * score_E[e] / total
                out[b, t] += weight * gated(x_D, *(w[e] for w in experts))
                load[b, e] += 1
            if options.shared_experts:
                shared = (state[f"shared_experts.w{n}.weight"] for n in (1, 2, 3))
                out[b, t] += gated(x_D, *shared)
            share[b] += score_E / score_E.sum() / L
            z[b, t] = logit_E.exp().sum().log() ** 2
    frequency = load * options.experts / (options.top_k * L)
    return {"out": out, "load": load.sum(0), "balance": (frequency * share).sum(1), "z": z}


VARIANTS = {
    "sigmoid": {},
    "softmax": {"router": "softmax", "top_k": 3, "score_scale": 2.5},
    "raw": {"normalise_scores": False, "top_k": 1},
    "shared": {"shared_experts": 2, "expert_hidden_dim": 24},
    "routers": {"routers": 3, "experts": 5},
}


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_visit_is_that_of_one_token_at_a_time(name):
    options = MoEOptions(**VARIANTS[name])
    moe, x_BLD = mixture(**VARIANTS[name]), torch.randn(B, L, D)
    for step in (None, 1, 2, 7):
        router = min(step or 1, options.routers) - 1
        want = reference(moe, x_BLD, options, router)
        out_BLD, routing = moe(x_BLD, step)
        torch.testing.assert_close(out_BLD.double(), want["out"], atol=CLOSE, rtol=1e-5)
        assert routing.load_E.tolist() == want["load"].tolist()
        assert routing.load_E.sum() == B * L * options.top_k  # no token is dropped
        torch.testing.assert_close(routing.balance_B.double(), want["balance"], atol=CLOSE, rtol=0)
        torch.testing.assert_close(routing.z_BL.double(), want["z"], atol=CLOSE, rtol=1e-5)


def test_gradients_reach_router_and_experts_as_in_the_reference():
    options = MoEOptions()
    moe, x_BLD = mixture(), torch.randn(B, L, D)
    out_BLD, routing = moe(x_BLD)
    cotangent = torch.randn(B, L, D)
    loss = (out_BLD * cotangent).sum() + routing.balance_B.sum() + routing.z_BL.mean()
    weights = [moe.router.gate.weight, moe.routed_experts.inner_experts.w2_EDF]
    got = torch.autograd.grad(loss, weights)

    def slow(gate: Tensor, down: Tensor) -> Tensor:
        inner = moe.routed_experts.inner_experts
        logit = x_BLD.double() @ gate.T
        score = logit.sigmoid()
        _, chosen = (score + moe.expert_bias_SE[0]).topk(options.top_k)
        picked = score.gather(-1, chosen)
        picked = picked / picked.sum(-1, keepdim=True)
        up = torch.einsum("bld,efd->blef", x_BLD.double(), inner.w3_EFD.double())
        on = F.silu(torch.einsum("bld,efd->blef", x_BLD.double(), inner.w1_EFD.double()))
        every = torch.einsum("blef,edf->bled", on * up, down)
        parts = every.gather(2, chosen[..., None].expand(-1, -1, -1, D)) * picked[..., None]
        load = F.one_hot(chosen, options.experts).sum((1, 2)) / (options.top_k * L)
        share = (score / score.sum(-1, keepdim=True)).mean(1)
        balance = options.experts * (load * share).sum()
        z = logit.logsumexp(-1).square().mean()
        return (parts.sum(2) * cotangent).sum() + balance + z

    doubles = [weight.detach().double().requires_grad_() for weight in weights]
    want = torch.autograd.grad(slow(*doubles), doubles)
    torch.testing.assert_close([each.double() for each in got], [*want], atol=1e-5, rtol=1e-4)


def test_balancing_raises_the_bias_of_idle_experts_alone():
    moe = mixture(experts=4)
    moe.expert_bias_SE.zero_()
    moe.balance(torch.tensor([[10, 0, 6, 4]]), 0.5)  # mean load 5: sign -, +, -, +
    assert moe.expert_bias_SE.tolist() == [[-0.5, 0.5, -0.5, 0.5]]
    moe.balance(torch.tensor([[9, 1, 1, 1]]), 0.5)  # directions -1, 1, 1, 1, less their mean 1/2
    assert moe.expert_bias_SE.tolist() == [[-1.25, 0.75, -0.25, 0.75]]
