"""Functions at (step, layer, site) of a model: they read, replace or add to what is computed there.

    with Hooks(model, [("loop.2.blocks.0.hook_resid_post", function)]):
        …  # forward passes, training steps, generation

Names are TransformerLens', with the recurrent step in front: `loop.` and its number, from 1. Layers
count from 0, as in `model.layers`; those outside the loop have no `loop.` part. LOOK_INSIDE.md
beside this file lists the sites with their shapes.

The hooks are torch's own, on the modules that a name concerns: without a scope nothing of this
runs.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor, nn

from titan_loop.errors import UserError, nearest
from titan_loop.models.context import CacheSlot
from titan_loop.models.decoder import LoopDecoder

logger = logging.getLogger(__name__)

AFTER_LAYERS = "loop.*.blocks.*.hook_resid_post"
"""The state after every looped layer of every step, before any norm between steps."""


class HookPoint(NamedTuple):
    """The place of a value.

    Attributes:
        step: Recurrent step, from 1; None outside the loop.
        layer: Number of the layer, from 0; None for a site that belongs to none.
        positions_BL: (B or 1, L) positions of the value's tokens; None outside of layers.
    """

    name: str
    step: int | None
    layer: int | None
    positions_BL: Tensor | None


Function = Callable[[Tensor, HookPoint], Tensor | None]
"""Takes a value; returns another of its shape and type to go on with, or None for the same. It must
not write into the value, which may also be the state that the step before is read from."""

NamedHook = tuple[str, Function]
"""The name of a site, or a pattern of names, and the function to call there."""


class _Tap(NamedTuple):
    """A site: an input or output of a module, the one at `place`; `heads` splits its last axis."""

    site: str
    module: nn.Module
    layer: int | None
    is_looped: bool
    is_input: bool = False
    place: int = 0
    heads: int | None = None

    def name(self, step: int | None) -> str:
        block = "" if self.layer is None else f"blocks.{self.layer}."
        return f"loop.{step}.{block}{self.site}" if self.is_looped else f"{block}{self.site}"


class Hooks:
    """A scope in which functions are called at sites of one model.

    Scopes may be nested: the inner one sees what the outer one changed. It must stay open until the
    backward pass of what ran in it, and until a stream of generated tokens ends. Compiled layers
    run eagerly in it. Values on several ranks are what this rank holds of them. Where rows of a
    batch are at different steps, as in generation, a function is given the rows of its step.

    Raises `UserError` for a name or pattern that names no site. Hooks that were never called are
    logged at the end.
    """

    def __init__(self, model: LoopDecoder, hooks: Iterable[NamedHook]) -> None:
        self._model, self._hooks = model, [*hooks]
        taps = [*_taps(model)]
        known = [tap.name(1) for tap in taps]
        self._taps: list[_Tap] = []
        for pattern, _ in self._hooks:
            steps = {*range(1, 10), *map(int, re.findall(r"^loop\.([1-9]\d*)\.", pattern))}
            wanted = [tap for tap in taps if any(fnmatchcase(tap.name(s), pattern) for s in steps)]
            if not wanted:
                raise UserError(f"hook {pattern} is no site of this model{nearest(pattern, known)}")
            self._taps += (tap for tap in wanted if tap not in self._taps)
        self._functions: dict[str, list[NamedHook]] = {}
        self._called: set[str] = set()
        self._step: int | Tensor = 1
        self._positions_BL: Tensor | None = None
        self._scope = ExitStack()

    def __enter__(self) -> "Hooks":
        model = self._model
        if not self._taps:
            return self
        if any(module._compiled_call_impl is not None for module in model.modules()):
            self._scope.enter_context(torch.compiler.set_stance("force_eager"))
        self._scope.callback(setattr, model, "tells_step", model.tells_step)
        model.tells_step = True  # layers are then told their step without a cache, too
        for _, layer in _layers(model):  # before their sites
            self._scope.callback(layer.register_forward_pre_hook(self._note).remove)
        for tap in self._taps:
            hook = self._hook_of(tap)
            register = tap.module.register_forward_hook
            if tap.is_input:
                register = tap.module.register_forward_pre_hook
            self._scope.callback(register(hook).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._scope.close()
        silent = {pattern for pattern, _ in self._hooks} - self._called
        if kind is None and silent:
            logger.warning("hooks that were not called: %s", ", ".join(sorted(silent)))

    def _note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Keep positions and step of a visit; norm and gate follow the last looped layer."""
        self._positions_BL = inputs[1].positions_BL
        slot = inputs[2]
        step = slot.step if isinstance(slot, CacheSlot) else 1
        if step is not None:
            self._step = step

    def _hook_of(self, tap: _Tap) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: Any, output: Any = None) -> Any:
            values = inputs if tap.is_input else output
            several = isinstance(values, tuple)
            old = values[tap.place] if several else values
            new = self._changed(tap, old)
            if new is old:
                return None
            return (*values[: tap.place], new, *values[tap.place + 1 :]) if several else new

        return hook

    def _changed(self, tap: _Tap, value: Tensor) -> Tensor:
        if tap.heads is None:
            return self._visited(tap, value)
        # Also where nothing is replaced: what was read is then part of the graph.
        return self._visited(tap, value.unflatten(-1, (-1, tap.heads))).flatten(-2)

    def _visited(self, tap: _Tap, value: Tensor) -> Tensor:
        step = self._step if tap.is_looped else None
        positions_BL = None if tap.layer is None else self._positions_BL
        if not isinstance(step, Tensor):
            return self._called_on(value, HookPoint(tap.name(step), step, tap.layer, positions_BL))
        for number in step.unique().tolist():
            if not self._named(tap.name(number)):
                continue
            rows = (step == number).nonzero()[:, 0]
            of_rows = None if positions_BL is None else positions_BL[rows]
            point = HookPoint(tap.name(number), number, tap.layer, of_rows)
            old = value[rows]
            new = self._called_on(old, point)
            if new is not old:
                value = value.index_copy(0, rows, new)
        return value

    def _called_on(self, value: Tensor, point: HookPoint) -> Tensor:
        for pattern, function in self._named(point.name):
            self._called.add(pattern)
            new = function(value, point)
            if new is None:
                continue
            if new.shape != value.shape or new.dtype != value.dtype:
                given, wanted = (f"{(*x.shape,)} {x.dtype}" for x in (new, value))
                raise UserError(f"hook {point.name} returned {given} in place of {wanted}")
            value = new
        return value

    def _named(self, name: str) -> list[NamedHook]:
        if name not in self._functions:
            hooks = self._hooks
            self._functions[name] = [each for each in hooks if fnmatchcase(name, each[0])]
        return self._functions[name]


def hook_names(model: LoopDecoder, recurrent_steps: int) -> list[str]:
    """Return the names of all sites at R steps: outside the loop first, then step by step."""
    taps = [*_taps(model)]
    outside = [tap.name(None) for tap in taps if not tap.is_looped]
    steps = range(1, recurrent_steps + 1)
    return outside + [tap.name(step) for step in steps for tap in taps if tap.is_looped]


def _layers(model: LoopDecoder) -> Iterator[tuple[int, nn.Module]]:
    for name, layer in model.layers.items():
        # Within activation checkpointing, so that a visit that is computed again notes its step.
        yield int(name), getattr(layer, "_checkpoint_wrapped_module", layer)


def _taps(model: LoopDecoder) -> Iterator[_Tap]:
    yield _Tap("hook_embed", model.tok_embeddings, None, False)
    for index, layer in _layers(model):
        where = index, index in model.config.looped
        yield _Tap("hook_resid_pre", layer, *where, is_input=True)
        parts = dict(layer.named_children())
        # The last of those that a block has is what is added to the state.
        for site, branch in (
            ("hook_attn_out", ("attention", "attention_bias", "attention_post_norm")),
            ("hook_mlp_out", ("feed_forward", "moe", "ffn_bias", "ffn_post_norm")),
        ):
            if site == "hook_attn_out" and "attention" in parts:
                yield from _attention_taps(parts["attention"], *where)
            if found := [parts[name] for name in branch if name in parts]:
                yield _Tap(site, found[-1], *where)
        yield _Tap("hook_resid_post", layer, *where)
    yield _Tap("ln_final.hook_out", model.norm, None, True)
    if model.exit_gate is not None:
        yield _Tap("exit_gate.hook_out", model.exit_gate, None, True)


def _attention_taps(attention: nn.Module, layer: int, is_looped: bool) -> Iterator[_Tap]:
    parts = dict(attention.named_children())
    if "later" in parts:  # an attention for each step: its parts are not those of every step
        return
    for number, name in enumerate("qkv"):
        yield _Tap(f"attn.hook_{name}", parts["qkv_linear"], layer, is_looped, place=number)
    head = attention.head_dim
    assert isinstance(head, int)
    yield _Tap("attn.hook_z", parts["wo"], layer, is_looped, is_input=True, heads=head)
