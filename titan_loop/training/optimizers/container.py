"""A run's optimisers: torchtitan's container, with parameter groups that the model defines."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from tyro.conf import Suppress

from titan_loop.checkpoint.loading import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.parameter_groups import ParameterGroup
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.optimizers.settings import GroupSettings, OptimizerSettings
from titan_loop.training.weight_average import WeightAverage, WeightAverageConfig

_EMA = AVERAGE_PREFIX.removeprefix(OPTIMIZER_PREFIX)
_SETTINGS = "param_groups."  # upstream's prefix


class LoopOptimizers(OptimizersContainer):
    """The optimisers of a `LoopDecoder`, which assigns each of its parameters to a group."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Choice of an optimiser; the fields hidden from the command line are derived."""

        name: str = "adamw"
        """adamw for all parameters, or muon for the matrices of the layers and AdamW for the rest:
        embedding, head, norms, gate."""

        chosen: Suppress[OptimizerSettings] = field(default_factory=AdamWConfig)
        rest: Suppress[OptimizerSettings] = field(default_factory=AdamWConfig)
        ema: Suppress[WeightAverageConfig] = field(default_factory=WeightAverageConfig)
        param_groups: Suppress[list[ParamGroupConfig]] = field(default_factory=list)
        implementation: Suppress[
            Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"]
        ] = "fused"
        optimizer_factory_kwargs_by_name: Suppress[dict[str, Any]] = field(default_factory=dict)

        def settings(self, group: ParameterGroup) -> GroupSettings:
            """Return the optimiser and settings of a group."""
            takes = self.chosen.takes_all or group.is_hidden_matrix
            return (self.chosen if takes else self.rest).settings(group)

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
        used = {each.title: each for each in (config.rest, config.chosen)}
        self._factories = {title: each.factory for title, each in used.items()}
        own = {title: each.factory_arguments() for title, each in used.items()}
        config = replace(config, param_groups=groups, optimizer_factory_kwargs_by_name=own)
        super().__init__(config, model_parts=model_parts)
        weights = {
            name: parameter
            for group, _ in self._groups()
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        self._average = WeightAverage(config.ema, weights) if config.ema.decay else None

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Optimizer]:  # type: ignore[override]
        return self._factories[name]

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

    def update_average(self) -> None:
        """Update the average of the weights, if there is one; skipped steps count, too."""
        if self._average is not None:
            self._average.update()

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
