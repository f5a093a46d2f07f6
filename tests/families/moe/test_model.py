"""The looped decoder with experts: costs, counting, checkpointing, decoding, refusals."""

import math

import pytest
import titan_loop.compat as compat
import torch
from torch import Tensor
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from tests.distributed.parallel_model import parallel_model
from tests.distributed.test_parity import CHECKPOINTING
from titan_loop.distributed.parallelize import parallelism_refusals
from titan_loop.errors import UserError, raise_first
from titan_loop.families.inkling.model import InklingOptions
from titan_loop.families.moe.decoder import MoEDecoder
from titan_loop.families.moe.model import MoEOptions
from titan_loop.families.moe.objective import MoELoss
from titan_loop.families.xllm_moe.model import XllmMoEOptions
from titan_loop.models.dense import DenseOptions
from titan_loop.models.exit_gate import freeze_all_but_the_exit_gate
from titan_loop.models.family import ModelOptions, build_decoder, decoder_config

L = 16
ALONE = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND)
SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "dense_layers": (1, 2)}
XLLM = {"experts": 25, "top_k": 2, "expert_hidden_dim": 2432, "size": "xllm", "rope_theta": 1e6}
TOKENS_PER_STEP = 4_194_304  # of the released recipes


def model_of(**options: object) -> MoEDecoder:
    torch.manual_seed(0)
    model = build_decoder(MoEOptions(**options), max_seq_len=2 * L)  # type: ignore[arg-type]
    assert isinstance(model, MoEDecoder)
    return model


def tokens(windows: int = 2) -> Tensor:
    return torch.randint(128, (windows, L), generator=torch.Generator().manual_seed(1))


def parameters(**options: object) -> tuple[int, int]:
    """Return the parameters of a model, and those that a token meets, each once."""
    config = decoder_config(MoEOptions(**options), max_seq_len=8)  # type: ignore[arg-type]
    assert isinstance(config, MoEDecoder.Config)
    with torch.device("meta"):
        model = config.build()
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = sum(
        (mixture.num_experts - mixture.router.top_k)
        * 3
        * config.dim
        * mixture.routed_experts.inner_experts.hidden_dim
        for mixture in config.sparse.values()
    )
    return total, total - idle


@pytest.mark.parametrize(("layers", "stop_step"), [(28, 7_457), (112, 18_814)])
def test_active_parameters_are_those_of_the_released_25_expert_models(layers, stop_step):
    """Their `20tpp` stop is ceil(20 × active parameters / 4,194,304), arXiv 2610.06833's code."""
    total, active = parameters(n_layers=layers, **XLLM)
    assert math.ceil(20 * active / TOKENS_PER_STEP) == stop_step
    assert math.ceil(20 * (active - 200_000) / TOKENS_PER_STEP) < stop_step  # 1e-4 of them
    if layers == 28:  # 8B-A0.8B, without embedding and head
        assert (total - 2 * 250_624 * 1536, active - 2 * 250_624 * 1536) == (
            8_010_972_672,
            793_886_208,
        )


def test_flops_count_a_tokens_own_experts_at_every_visit():
    config = model_of(**SPLIT, shared_experts=1, expert_hidden_dim=64).config
    attention, dense = 64 * (64 + 32 + 32 + 64), 3 * 64 * 192
    sparse = 8 * 64 + 3 * 3 * 64 * 64  # router; two chosen and one shared
    want = 6 * (attention + dense + 3 * (2 * attention + dense + sparse) + attention + sparse)
    assert config.training_flops(L, 3).matrices == want
    frozen = 2 * 2 * (2 * attention + dense + sparse) + 2 * (attention + dense)
    truncated = 6 * ((2 * attention + dense + sparse) + attention + sparse)
    assert config.training_flops(L, 3, backward_steps=1).matrices == frozen + truncated


@pytest.mark.parametrize("policy", CHECKPOINTING)
def test_recomputation_routes_as_the_forward_pass_and_counts_once(policy, monkeypatch):
    routed: list[Tensor] = []
    route = TokenChoiceTopKRouter.forward

    def spy(router, x_BLD, bias):
        result = route(router, x_BLD, bias)
        routed.append(result[1].clone())
        return result

    monkeypatch.setattr(TokenChoiceTopKRouter, "forward", spy)
    config = decoder_config(MoEOptions(**SPLIT, routers=2), max_seq_len=L)
    checkpointing = CHECKPOINTING[policy]
    model, _ = parallel_model(config, ALONE, ac_config=checkpointing and checkpointing())
    assert isinstance(model, MoEDecoder)
    output = model(tokens(), recurrent_steps=3, collect="last")
    forward = len(routed)
    assert forward == 4  # one sparse layer in the loop, three times, and the coda's
    loss = output.hidden_RBLD[-1].square().mean() + output.aux["balance"].mean()
    loss.backward()
    again = routed[forward:]
    if policy != "none":  # selective keeps the choice and computes the scores again
        assert len(again) >= forward
    for number, choice in enumerate(reversed(again)):
        if len(again) == forward:
            assert torch.equal(choice, routed[number])
    assert all(any(torch.equal(choice, first) for first in routed[:forward]) for choice in again)
    counted = {key: load.sum().item() for key, load in model._counted.items()}
    assert counted == dict.fromkeys([(2, 1), (2, 2), (2, 3), (3, None)], 2 * L * 2)


@pytest.mark.parametrize("options", [MoEOptions, XllmMoEOptions, InklingOptions])
def test_training_the_exit_gate_moves_no_bias(options):
    model = build_decoder(options(exit_gate=True), max_seq_len=2 * L).train()
    freeze_all_but_the_exit_gate(model)
    model(tokens())
    model.after_update(None, torch.tensor(True))
    biases = [buffer for name, buffer in model.named_buffers() if "expert_bias" in name]
    assert biases
    assert not any(bias.any() for bias in biases)


def test_the_loss_is_a_sum_over_windows():
    model = model_of()
    loss_fn = MoELoss.Config(balance_weight=0.5, router_z_weight=0.25).build(
        compile_config=CompileConfig()
    )
    loss_fn.set_lm_head(model.lm_head)

    def loss(rows: slice) -> tuple[float, dict[str, Tensor]]:
        output = model(tokens()[rows], recurrent_steps=2, collect="last")
        value, metrics = loss_fn(output, tokens()[rows], torch.tensor(2 * L))
        return float(value.detach()), metrics

    whole, metrics = loss(slice(None))
    parts = [loss(slice(row, row + 1)) for row in range(2)]
    assert whole == pytest.approx(sum(value for value, _ in parts), rel=1e-6)
    for name in ("experts/balance", "experts/router_z"):
        assert float(metrics[name]) == pytest.approx(sum(float(m[name]) for _, m in parts), 1e-6)
    price = 0.5 * metrics["experts/balance"] + 0.25 * metrics["experts/router_z"]
    assert whole == pytest.approx(float(metrics["ce/step_2"] + price), rel=1e-6)


def spread(family_options: ModelOptions, world: int, **parallelism: object) -> None:
    config = decoder_config(family_options, max_seq_len=8)
    layout = ParallelismConfig(spmd_backend=compat.SPMD_BACKEND, **parallelism)  # type: ignore[arg-type]
    raise_first(parallelism_refusals(layout, world_size=world, n_heads=4, n_kv_heads=2, seq_len=8))
    config.check_spreading(
        tensor_parallel=layout.tensor_parallel_degree,
        context_parallel=layout.context_parallel_degree,
        expert_parallel=layout.expert_parallel_degree,
    )


@pytest.mark.parametrize(
    ("options", "world", "parallelism", "message"),
    [
        (MoEOptions(), 4, {"expert_parallel_degree": 3}, "=3 must divide the 4 ranks"),
        (
            MoEOptions(),
            4,
            {"expert_parallel_degree": 4, "data_parallel_replicate_degree": 2},
            "=4 must divide the 2 ranks of a replica",
        ),
        (MoEOptions(experts=6), 4, {"expert_parallel_degree": 4}, "must divide model.experts=6"),
        (MoEOptions(), 2, {"context_parallel_degree": 2}, "context_parallel_degree=2 does not"),
        (DenseOptions(), 2, {"expert_parallel_degree": 2}, "family=nanbeige has no experts"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_in_a_line(options, world, parallelism, message):
    with pytest.raises(UserError) as found:
        spread(options, world, **parallelism)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
