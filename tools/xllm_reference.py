"""Compares family xllm with xLLM-Loop's own modules: injections, draws of depths, learned prior.

    git clone https://github.com/ifm-ai/xllm-loop
    python -m tools.xllm_reference xllm-loop

Their injections import parallel layers of a package that needs CUDA; one rank's stand in for them.
Not part of CI, which has no checkout: `tests/families/xllm` holds independent references.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor, nn

from titan_loop.families.xllm.depth import DrawnDepth
from titan_loop.families.xllm.injection import Injection, injection_config
from titan_loop.families.xllm.prior import DepthPrior, PriorSettings

DIM, DRAWS, UPDATES = 48, 10_000, 200
NAMES: dict[Injection, tuple[str, dict[str, str]]] = {
    "diagonal": (
        "InputInjection",
        {"weight": "input_adapter.weight", "log_decay": "A_log", "step_bias": "dt_bias"},
    ),
    "linear": ("LinearInputInjection", {"weight": "adapter.weight", "bias": "adapter.bias"}),
}
NAMES["orthogonal"] = ("OrthogonalInputInjection", NAMES["diagonal"][1])


class OneRank(nn.Linear):
    """Their column-parallel matrix on one rank."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.output_size_per_partition = outputs


def stand_in(checkout: Path) -> None:
    """Make `xllm.models` importable from a checkout, with one rank's layers and no kernels."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def itself(value: Tensor, *_: Any) -> Tensor:
        return value

    def world(*_: Any) -> int:
        return 1

    content = {
        "xllm": {"__path__": [str(checkout / "xllm")]},
        "xllm.config": {"ModelConf": Any},
        "xllm.distributed": dict.fromkeys(
            ("get_model_parallel_rank", "get_model_parallel_world_size"), world
        ),
        "xllm.modules": {"GroupRMSNorm": nn.Module},
        "xllm.modules.context_parallel": {"gather_from_context_parallel_region": itself},
        "xllm.modules.fused_ops": {"memory_efficient_dropout": itself},
        "xllm.modules.model_parallel": {
            "ColumnParallelLinear": OneRank,
            "gather_copy_model_parallel_region": itself,
        },
        "xllm.models.transformer": {"Transformer": nn.Module},
        "xllm.utils": {"get_init_fn": nothing},
    }
    for name, attributes in content.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def injection_error(kind: Injection, theirs: Any) -> float:
    """Return the largest difference of outputs and gradients, in float64."""
    name, names = NAMES[kind]
    conf = SimpleNamespace(
        model_dim=DIM,
        apply_bias_term=True,
        init_mode="gaussian",
        init_std=0.02,
        huginn_diagonal_dt_init=0.7,
        huginn_diagonal_a_init=1.0,
        huginn_ortho_projection_eps=1e-6,
    )
    settings = {"diagonal_dt_init": 0.7, "diagonal_a_init": 1.0} if kind == "diagonal" else {}
    other = getattr(theirs, name)(conf, **settings).double()
    config = injection_config(kind, DIM, step=0.7, std=0.02)
    assert config is not None
    own = config.build().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, their in names.items():
            drawn = torch.randn(own.get_parameter(mine).shape, generator=generator) * 0.3
            own.get_parameter(mine).copy_(drawn)
            other.get_parameter(their).copy_(drawn)
    inputs = [torch.randn(2, 5, DIM, generator=generator).double() for _ in range(2)]
    found: list[list[Tensor]] = []
    for module, parameters in ((own, names), (other, names.values())):
        leaves = [each.clone().requires_grad_() for each in inputs]
        output = module(*leaves)
        reached = [*leaves, *(module.get_parameter(each) for each in parameters)]
        gradients = torch.autograd.grad(output.square().sum(), reached)
        found.append([output.detach(), *gradients])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def draws_differ(theirs: Any) -> int:
    """Return how many of the first depths differ, plain and antithetic."""
    table = theirs.pln_pmf(5.0, 0.5, 64)
    differing = 0
    for antithetic in (False, True):
        own = DrawnDepth(probabilities=table, antithetic=antithetic)
        upto = theirs.cumulative_distribution(table)
        for index in range(DRAWS):
            want = theirs.sample_depth(upto, index, antithetic=antithetic)
            differing += own.draw(index) != want
    return differing


def prior_error(theirs: Any, table: tuple[float, ...]) -> float:
    """Return the largest difference of probabilities after updates with the same losses."""
    worst = 0.0
    for entropy in (0.0, 0.01):
        other = theirs.LearnedDepthPrior(theirs.DepthPriorConfig(entropy), table)
        own = DepthPrior(PriorSettings(entropy_weight=entropy), table)
        generator = torch.Generator().manual_seed(1)
        for _ in range(UPDATES):
            loss = 3 + torch.rand((), generator=generator, dtype=torch.float64)
            depth = other.sample()
            other.observe(loss.reshape(1))
            other.finish_step()
            own.learn(depth, float(loss))
        worst = max(worst, float((own.probabilities - other.probabilities()).abs().max()))
    return worst


def main() -> None:
    """Print the differences; exit with 1 if one is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    if not (checkout / "xllm" / "models" / "looped.py").exists():
        sys.exit(f"{checkout} has no xllm/models/looped.py; clone ifm-ai/xllm-loop there")
    stand_in(checkout)
    looped, depth, prior = (
        importlib.import_module(f"xllm.models.{name}")
        for name in ("looped", "looped_depth", "looped_depth_prior")
    )
    errors = {f"injection {kind}": injection_error(kind, looped) for kind in NAMES}
    errors["probabilities of the learned prior"] = prior_error(prior, depth.pln_pmf(5.0, 0.5, 64))
    errors[f"differing depths of {2 * DRAWS:,}"] = float(draws_differ(depth))
    for name, error in errors.items():
        print(f"{name}: {error:.1e}")
    sys.exit(max(errors.values()) > 1e-9)


if __name__ == "__main__":
    main()
