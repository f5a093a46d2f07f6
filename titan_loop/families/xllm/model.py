"""xLLM-Loop: named sizes and options; `decoder.py` has the equations.

Sizes `s`, `m` and `l` are from Part II (1 layer of prelude, 2 of core, 1 of coda: the defaults).
`730m` is from Part I and needs `prelude_layers=8` and `coda_layers=8` for the paper's 8, 12 and 8.
Initial weights follow the authors: normal with standard deviation 0.02 for matrices and 1/√D for
embedding and head, truncated at three standard deviations.

Source: Huang et al. 2026 (xLLM-Loop, "Towards Looped Models Done Right" I and II), arXiv
2610.06833, and their code. Deviation: AdamW does not decay the gains of norms. The authors' does,
since they keep a gain as its offset from 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Lt
from torch import nn
from torchtitan.models.common.nn_modules import RMSNorm

from titan_loop.errors import UserError
from titan_loop.families.xllm.decoder import States, XllmDecoder
from titan_loop.families.xllm.injection import Injection, injection_config
from titan_loop.families.xllm.start_state import Start, StartState
from titan_loop.models.family import (
    RUNTIME_OPTIONS,
    Family,
    FamilyName,
    ModelSize,
    require_usual,
)
from titan_loop.models.final_norm import FinalNorm
from titan_loop.models.initialisation import normal_matrix
from titan_loop.models.llama import LlamaOptions, llama_config
from titan_loop.models.loop_config import width_ratio
from titan_loop.models.loop_options import ResidualScale

SIZES = {
    "debugmodel": ModelSize(64, 4, 4, 192, vocab_size=128, recurrent_steps=3, n_kv_heads=2),
    "small": ModelSize(128, 4, 4, 384, vocab_size=1024, recurrent_steps=5, n_kv_heads=2),
    "s": ModelSize(1536, 4, 24, 4352, vocab_size=64_256, recurrent_steps=5, n_kv_heads=6),
    "m": ModelSize(3072, 4, 48, 8704, vocab_size=64_256, recurrent_steps=5, n_kv_heads=12),
    "l": ModelSize(6144, 4, 96, 17_408, vocab_size=64_256, recurrent_steps=5, n_kv_heads=24),
    "730m": ModelSize(1536, 28, 24, 4352, vocab_size=250_624, recurrent_steps=8, n_kv_heads=6),
}

DecoderConfig = TypeVar("DecoderConfig", bound=XllmDecoder.Config)


@dataclass(kw_only=True, slots=True)
class XllmOptions(LlamaOptions):
    """Options of a model with prelude, core and coda; every field is a flag."""

    retired: ClassVar[Mapping[str, Any]] = {"student": 0}

    family: FamilyName = field(default="xllm", init=False)

    prelude_layers: Annotated[int, Ge(0)] = 1
    """Number of first layers, which run once before the loop."""

    coda_layers: Annotated[int, Ge(0)] = 1
    """Number of last layers, which run after the loop on every state that is read."""

    norm_eps: Annotated[float, Gt(0), Lt(1)] = 1e-6
    """Added to the mean square in every norm."""

    residual_scale: ResidualScale = "none"
    """n in the initial gain of a layer's branches, 1/sqrt(2·n): the number of layers, or of their
    visits at the model's recurrent_steps; none makes the gain 1."""

    injection: Injection = "diagonal"  # type: ignore[assignment]  other kinds than the generic loop
    """Injection of the prelude's output into every update: none, diagonal, linear, orthogonal."""

    injection_step: Annotated[float, Gt(0), Lt(100)] = 1.0
    """Δ of the diagonal and the orthogonal injection before training."""

    start_state: Start = "normal"
    """State before the first update: normal (noise), zero, or input (the prelude's output)."""

    states: States = "one"
    """Recurrent states: one; or two, high and low, which are updated by the same looped layers
    (shared) or by one half of them each (split). A recurrent step is then a high cycle."""

    low_cycles: Annotated[int, Ge(1)] = 3
    """Updates of the low state in every high cycle; needs two states."""

    core_passes: Annotated[int, Ge(1)] = 1
    """Passes through an update's layers; the injection runs before the first pass only."""

    untied_steps: Annotated[int, Ge(1)] = 1
    """Number of equal parts of the looped layers, each preceded by an injection: with R = 1, an
    unrolled loop whose steps do not share weights."""

    prelude_norm: bool = False
    """Whether the prelude's output is normed before it enters the loop."""

    state_norm: bool = False
    """Whether every update ends with an RMSNorm that has no learned gain."""


def _check(options: XllmOptions, shape: ModelSize) -> None:
    require_usual(options, ("norm_placement",), "has no effect here, model.state_norm has")
    if options.states == "one":
        require_usual(options, ("low_cycles",), "has no effect with model.states=one")
    if options.injection in ("none", "linear"):
        problem = f"has no effect with model.injection={options.injection}"
        require_usual(options, ("injection_step",), problem)
    if options.injection == "none" and (options.start_state != "input" or options.prelude_norm):
        raise UserError(
            f"model.injection=none with model.start_state={options.start_state} and "
            f"model.prelude_norm={options.prelude_norm}: the core would not read its input; set "
            "start_state to input and prelude_norm to False, or choose an injection"
        )
    core = shape.n_layers - options.prelude_layers - options.coda_layers
    if options.states == "split" and core % 2:
        raise UserError(
            f"model.states=split needs an even number of looped layers, there are {core}: change "
            "model.n_layers, model.prelude_layers or model.coda_layers"
        )
    if options.untied_steps > 1 and (options.states != "one" or core % options.untied_steps):
        raise UserError(
            f"model.untied_steps={options.untied_steps} must divide the {core} looped layers, and "
            "needs model.states=one"
        )


def xllm_config(
    kind: type[DecoderConfig], options: XllmOptions, shape: ModelSize, max_seq_len: int, **own: Any
) -> DecoderConfig:
    """Return the architecture; arguments as in `loop_config`."""
    _check(options, shape)
    norm = {"normalized_shape": shape.dim, "eps": options.norm_eps}
    std = options.initializer_range / math.sqrt(width_ratio(options, shape))
    config = llama_config(
        kind,
        replace(options, injection="none"),
        shape,
        max_seq_len,
        injection=injection_config(
            options.injection,
            shape.dim,
            step=options.injection_step,
            std=std,
        ),
        start_state=StartState.Config(kind=options.start_state),
        states=options.states,
        low_cycles=options.low_cycles,
        core_passes=options.core_passes,
        untied_steps=options.untied_steps,
        prelude_norm=FinalNorm.Config(**norm, param_init={"weight": nn.init.ones_})
        if options.prelude_norm
        else None,
        state_norm=RMSNorm.Config(**norm, elementwise_affine=False) if options.state_norm else None,
        **own,
    )
    table = {"weight": partial(normal_matrix, std=shape.dim**-0.5)}
    config.tok_embeddings = replace(config.tok_embeddings, param_init=table)
    config.lm_head = replace(config.lm_head, param_init=table)
    return config


XLLM = Family(
    name="xllm",
    options=XllmOptions,
    sizes=SIZES,
    decoder_config=partial(xllm_config, XllmDecoder.Config),
    runtime_options=RUNTIME_OPTIONS | {"injection_step"},
    uses=frozenset({"export", "generate", "held_out"}),
)
