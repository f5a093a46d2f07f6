"""A run's optimisers: torchtitan's container, with parameter groups that the model defines."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, get_args, get_type_hints

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from tyro.conf import Suppress

from titan_loop.checkpoint.loading import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from titan_loop.distributed.muon import Muon
from titan_loop.errors import Refusal
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.exit_gate import Trainable
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.weight_average import WeightAverage, WeightAverageConfig


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW for the whole model; weight decay applies to matrices, embedding and head included.

    Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 1 (values); vectors without decay are
    our choice, see `titan_loop/models/parameter_groups.py`.
    """

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    def settings(self, group: ParameterGroup) -> "GroupSettings":
        """Return the settings of one of the model's groups."""
        return GroupSettings(
            pattern="",
            optimizer_name="AdamW",
            optimizer_kwargs={
                "lr": 0.0,
                "betas": (self.beta1, self.beta2),
                "eps": self.eps,
                "weight_decay": self.weight_decay if group.decays else 0.0,
            },
            rate_factor=group.rate_factor / group.width_ratio,
        )

    def refusals(self) -> Iterator[Refusal]:
        """Refuse values out of range."""
        share = "must be at least 0 and below 1; AdamW decays by it"
        yield from Refusal.unless(
            "adamw",
            self,
            ("beta1", 0 <= self.beta1 < 1, share),
            ("beta2", 0 <= self.beta2 < 1, share),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "must be finite and at least 0"),
            ("eps", 0 < self.eps < math.inf, "must be above 0; 1e-8 is usual"),
        )


@dataclass(kw_only=True, slots=True)
class MuonConfig:
    """Muon for the matrices of the layers; see `titan_loop/distributed/muon.py`.

    With the default scale Muon takes AdamW's rate and decay. `original` and `sphere` need rates an
    order of magnitude larger, which `rate_factor` sets; on the sphere a rate is the length of a
    step relative to the matrix.
    """

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    momentum: float = 0.95
    """Decay of the average of gradients."""

    nesterov: bool = True
    """Whether the update looks one gradient ahead of the average."""

    iterations: int = 5
    """Newton-Schulz iterations."""

    scale: Literal["original", "match_rms_adamw", "sphere"] = "match_rms_adamw"
    """Factor on an update: original is max(1, √(rows/columns)); match_rms_adamw 0.2·√(larger side).
    With sphere it is the norm of the matrix over the update's, and the matrix keeps its norm."""

    rate_factor: float = 1.0
    """Factor on the scheduled learning rate for Muon."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the iteration; auto is bfloat16 on CUDA and float32 on CPU."""

    def settings(self, group: ParameterGroup) -> "GroupSettings":
        """Return the settings of one of the model's groups.

        With the factor √(rows/columns) or on the sphere, an orthogonal update changes outputs
        equally at every width. 0.2·√(larger side) grows by √m at m times the width; the rate undoes
        that. On the sphere decay has no effect to first order, so there is none.
        """
        by_width = group.width_ratio**-0.5 if self.scale == "match_rms_adamw" else 1.0
        decays = group.decays and self.scale != "sphere"
        return GroupSettings(
            pattern="",
            optimizer_name="Muon",
            optimizer_kwargs={
                "lr": 0.0,
                "weight_decay": self.weight_decay if decays else 0.0,
                "momentum": self.momentum,
                "nesterov": self.nesterov,
                "ns_steps": self.iterations,
                "adjust_lr_fn": self.scale,
                "fused": False,  # Muon ignores `found_inf`; the host reads the verdict first
            },
            rate_factor=self.rate_factor * group.rate_factor * by_width,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of `dtype` on this machine."""
        if self.dtype == "auto":
            return torch.bfloat16 if compat.device_type() == "cuda" else torch.float32
        return getattr(torch, self.dtype)

    def refusals(self) -> Iterator[Refusal]:
        """Refuse values out of range."""
        yield from Refusal.unless(
            "muon",
            self,
            ("momentum", 0 <= self.momentum < 1, "must be at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "must be finite and at least 0"),
            ("iterations", 1 <= self.iterations < 100, "must be from 1 to 99; 5 is usual"),
            ("rate_factor", 0 < self.rate_factor < math.inf, "must be above 0"),
        )
        for name in ("scale", "dtype"):
            known = get_args(get_type_hints(type(self))[name])
            if (value := getattr(self, name)) not in known:
                fix = f"use {' or '.join(known)}"
                yield Refusal.of(f"muon.{name}", value, "is unknown", fix)


@dataclass(kw_only=True, slots=True)
class GroupSettings(ParamGroupConfig):
    """torchtitan's config of a parameter group, with a rate factor; `pattern` is filled in last."""

    rate_factor: float


OptimizerName = Literal["adamw", "muon"]
Implementation = Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"]

_EMA = AVERAGE_PREFIX.removeprefix(OPTIMIZER_PREFIX)
_SETTINGS = "param_groups."  # upstream's prefix


class LoopOptimizers(OptimizersContainer):
    """The optimisers of a `LoopDecoder`, which assigns each of its parameters to a group."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Choice of optimisers; the fields hidden from the command line are derived."""

        name: OptimizerName = "adamw"
        """adamw for all parameters, or muon for the matrices of the layers and AdamW for the rest:
        embedding, head, norms, gate."""

        adamw: Suppress[AdamWConfig] = field(default_factory=AdamWConfig)
        muon: Suppress[MuonConfig] = field(default_factory=MuonConfig)
        ema: Suppress[WeightAverageConfig] = field(default_factory=WeightAverageConfig)
        param_groups: Suppress[list[ParamGroupConfig]] = field(default_factory=list)
        implementation: Suppress[Implementation] = "fused"
        optimizer_factory_kwargs_by_name: Suppress[dict[str, Any]] = field(default_factory=dict)

        def settings(self, group: ParameterGroup) -> GroupSettings:
            """Return the optimiser and settings of a group."""
            chosen = self.muon if self.name == "muon" and group.is_hidden_matrix else self.adamw
            return chosen.settings(group)

        def refusals(self) -> Iterator[Refusal]:
            """Refuse an unknown name."""
            known = get_args(OptimizerName)
            if self.name not in known:
                fix = f"use {' or '.join(known)}"
                yield Refusal.of("optimizer.name", self.name, "is unknown", fix)

        def setting_refusals(
            self, *, trainable: Trainable, training: TrainingConfig, parallelism: ParallelismConfig
        ) -> Iterator[Refusal]:
            """Refuse settings that do not work with Muon."""
            if self.name != "muon":
                return
            offload, backend = training.enable_cpu_offload, parallelism.spmd_backend
            if trainable == "exit_gate":
                problem = f"has no matrix to update with trainable={trainable}"
                yield Refusal.of("optimizer.name", "muon", problem, "use adamw")
            if offload:
                problem = f"optimizer.name=muon with training.enable_cpu_offload={offload} would "
                problem += "multiply matrices on the host; leave it False, or use adamw"
                yield Refusal("training.enable_cpu_offload", problem)
            if backend != "partial_dtensor":
                problem = f"optimizer.name=muon does not support parallelism.spmd_backend={backend}"
                fix = "use partial_dtensor, or adamw"
                yield Refusal("parallelism.spmd_backend", f"{problem} yet", fix)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        found: list[tuple[GroupSettings, list[str]]] = []
        for part in model_parts:
            assert isinstance(part, LoopDecoder)
            for name, parameter in part.named_parameters():
                if not parameter.requires_grad:
                    continue
                group = part.parameter_group(canonical_fqn(name), parameter)
                settings = config.settings(group)
                equal = [names for other, names in found if other == settings]
                if equal:
                    equal[0].append(name)
                else:
                    found.append((settings, [name]))
        # The order in which upstream makes optimisers and their groups; `_groups` relies on it.
        members: dict[str, list[GroupSettings]] = defaultdict(list)
        for settings, names in found:
            settings.pattern = f"^(?:{'|'.join(map(re.escape, names))})$"
            members[settings.optimizer_name].append(settings)
        self._members = list(members.values())
        groups = [settings for settings, _ in found]
        own = {"Muon": {"dtype": config.muon.torch_dtype}}
        config = replace(config, param_groups=groups, optimizer_factory_kwargs_by_name=own)
        super().__init__(config, model_parts=model_parts)
        weights = {
            name: parameter
            for group, _ in self._groups()
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        self._average = WeightAverage(config.ema, weights) if config.ema.decay else None

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == "Muon":
            return Muon
        return OptimizersContainer._resolve_optimizer_factory(name)

    def restart(self) -> None:
        """Set all moments and step counts to zero."""
        for optimizer in self.optimizers:
            _set_to_zero(optimizer)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set every group's rate: the scheduled one times the group's factor."""
        for group, settings in self._groups():
            group["lr"] = learning_rate * settings.rate_factor

    def own_rates(self, learning_rate: float) -> dict[str, float]:
        """Return the rates that differ from the scheduled one, by names `lr/OPTIMIZER_xFACTOR`."""
        settings = [settings for _, settings in self._groups() if settings.rate_factor != 1]
        return {
            f"lr/{own.optimizer_name.lower()}_x{own.rate_factor:g}": learning_rate * own.rate_factor
            for own in settings
        }

    def update_average(self, *, step: int, tokens: int) -> None:
        """Update the average of the weights, if there is one; skipped steps count, too."""
        if self._average is not None:
            self._average.update(step=step, tokens=tokens)

    def restart_average(self) -> None:
        """Let the average, if there is one, start again from the current weights."""
        if self._average is not None:
            self._average.updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return upstream's state without settings; the average of the weights is under "ema."."""
        for optimizer in self.optimizers:
            if not optimizer.state:
                optimizer.zero_grad()  # of skipped steps, beside which upstream makes no state
                init_optim_state(optimizer)
                _set_to_zero(optimizer)  # upstream counts the step that makes it
        self._start_unreached()
        # Settings are the config's; ten entries for each parameter double the time of a save.
        entries = super().state_dict().items()
        state = {name: value for name, value in entries if not name.startswith(_SETTINGS)}
        if self._average is not None:
            state.update({_EMA + name: value for name, value in self._average.state_dict().items()})
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state; the settings stay as they are."""
        super().load_state_dict({**super().state_dict(), **state_dict})
        if self._average is not None:
            named = (item for item in state_dict.items() if item[0].startswith(_EMA))
            own = {name.removeprefix(_EMA): value for name, value in named}
            self._average.load_state_dict(own)

    def _start_unreached(self) -> None:
        """Give parameters that no gradient has reached yet the state that they will start with."""
        # A truncated backward pass may leave out the embedding for a while; without a state it
        # would be missing from the checkpoint.
        for optimizer in self.optimizers:
            known = next(((p, state) for p, state in optimizer.state.items() if state), None)
            if known is None:
                continue
            model, values = known
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if optimizer.state[parameter]:
                        continue
                    for name, value in values.items():
                        like = parameter if value.shape == model.shape else value
                        zeros = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
                        optimizer.state[parameter][name] = zeros

    def _groups(self) -> Iterator[tuple[dict[str, Any], GroupSettings]]:
        for optimizer, members in zip(self.optimizers, self._members, strict=True):
            yield from zip(optimizer.param_groups, members, strict=True)

    def _log_optimizer(self, optimizer: Optimizer, part_idx: int, patterns: list[str]) -> None:
        first = [f"{group['param_names'][0]}, …" for group in optimizer.param_groups]
        super()._log_optimizer(optimizer, part_idx, first)


def _set_to_zero(optimizer: Optimizer) -> None:
    for value in chain.from_iterable(state.values() for state in optimizer.state.values()):
        if isinstance(value, Tensor):
            value.zero_()
