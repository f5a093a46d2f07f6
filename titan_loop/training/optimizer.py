"""The optimisers of a run, in the groups that the model names, with torchtitan's container."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.parameter_groups import ParameterGroup


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW for the whole model.

    Weight decay applies to matrices, embedding and head included; see
    `titan_loop/models/parameter_groups.py`.

    Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, Table 1 (values); the exclusions are ours.
    """

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    def settings(self, group: ParameterGroup) -> ParamGroupConfig:
        """Return torchtitan's config of a group, without its parameters."""
        return ParamGroupConfig(
            pattern="",
            optimizer_name="AdamW",
            optimizer_kwargs={
                "lr": 0.0,
                "betas": (self.beta1, self.beta2),
                "eps": self.eps,
                "weight_decay": self.weight_decay if group.decays else 0.0,
            },
        )


class LoopOptimizers(OptimizersContainer):
    """The optimisers of a `LoopDecoder`, which says how each of its parameters is treated."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Settings of every optimiser; upstream's patterns are made from the model's groups."""

        adamw: AdamWConfig = field(default_factory=AdamWConfig)

        def settings(self, group: ParameterGroup) -> ParamGroupConfig:
            """Return optimiser and settings of a group, without its parameters."""
            return self.adamw.settings(group)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        names: dict[ParameterGroup, list[str]] = defaultdict(list)
        for part in model_parts:
            assert isinstance(part, LoopDecoder)
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    names[part.parameter_group(canonical_fqn(name), parameter)].append(name)
        settings = {group: config.settings(group) for group in names}
        # In the order in which upstream makes optimisers and their groups.
        members: dict[str, list[tuple[ParameterGroup, ParamGroupConfig]]] = defaultdict(list)
        for group, asked in settings.items():
            asked.pattern = f"^(?:{'|'.join(map(re.escape, names[group]))})$"
            members[asked.optimizer_name].append((group, asked))
        self._members = list(members.values())
        super().__init__(
            replace(config, param_groups=list(settings.values())), model_parts=model_parts
        )

    def apply_settings(self) -> None:
        """Let this start's config decide: a loaded checkpoint brought its own decay and betas."""
        for torch_group, _, settings in self._groups():
            torch_group.update(settings.optimizer_kwargs)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set every group's rate: the scheduled one times the group's factor."""
        for torch_group, group, _ in self._groups():
            torch_group["lr"] = learning_rate * group.rate_factor

    def _groups(self) -> Iterator[tuple[dict[str, Any], ParameterGroup, ParamGroupConfig]]:
        for optimizer, members in zip(self.optimizers, self._members, strict=True):
            for torch_group, (group, settings) in zip(optimizer.param_groups, members, strict=True):
                yield torch_group, group, settings

    def _log_optimizer(self, optimizer: Optimizer, part_idx: int, patterns: list[str]) -> None:
        """As upstream's, with a group's first parameter instead of a pattern of all names."""
        first = [f"{group['param_names'][0]}, …" for group in optimizer.param_groups]
        super()._log_optimizer(optimizer, part_idx, first)
