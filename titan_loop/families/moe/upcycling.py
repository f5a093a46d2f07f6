"""A dense model becomes a mixture of experts.

    F(x)   →   Σ_{e in K} g_e E_e(x),   E_e = F + noise,  Σ_K g_e = 1

With normalised scores, exact copies add up to the dense model, whichever experts the new router
chooses: without noise the first outputs are the dense model's, at every number of steps. A model
that loops keeps its loop. The optimiser state is left behind. One tensor is in memory at a time,
and for noise one expert's matrix.

Source: Komatsuzaki et al. 2023, arXiv 2212.05055 (experts are copies of a trained feed-forward, the
router is new). Deviations: scores are always normalised, copies may have noise, and every layer
becomes sparse unless it is named.
"""

import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor
from titan_loop.errors import UserError
from titan_loop.families.moe.model import SIZES, MoEOptions
from titan_loop.models.family import ModelOptions, build_decoder, decoder_config
from titan_loop.models.llama import llama_part
from titan_loop.runs.conversion import how_to_train, remade_run
from titan_loop.runs.saved_run import SavedRun

_STACKS = {"w1_EFD": "w1", "w2_EDF": "w2", "w3_EFD": "w3"}
_EXPERTS = "moe.routed_experts.inner_experts."


@dataclass(frozen=True, kw_only=True)
class MoEUpcycling:
    """The mixture that is made of a dense model.

    Attributes:
        experts: Copies of a dense feed-forward, E.
        top_k: Experts that a token visits, k.
        router: Function from a router's logits to scores.
        noise: Standard deviation of the noise on a copy, over the root mean square of its matrix.
        dense_layers: Layers that stay dense, from 1.
        routers: Number of routers of a looped layer; step r uses router r, later steps the last.
    """

    experts: int
    top_k: int = 2
    router: Literal["sigmoid", "softmax"] = "sigmoid"
    noise: float = 0.0
    dense_layers: tuple[int, ...] = ()
    routers: int = 1

    def options(self, run: SavedRun, recurrent_steps: int) -> MoEOptions:
        """Return the new model's options.

        Args:
            recurrent_steps: R that its checkpoint was trained with.

        Raises:
            UserError: The parent is of another family, or it and the experts do not fit together.
        """
        if not 0 <= self.noise < 1:
            raise UserError(f"--noise={self.noise} must be 0 or more and below 1")
        same = llama_part(run.model_options, SIZES, holder=run.path, made="experts are made")
        same["recurrent_steps"] = recurrent_steps
        own = {name: value for name, value in asdict(self).items() if name != "noise"}
        options = MoEOptions(**same, **own)
        decoder_config(options, max_seq_len=1)  # refuses parts that do not fit
        return options


def moe(model: Path, *, output: Path, upcycling: MoEUpcycling) -> None:
    """Give a dense model experts, in a new run directory.

    A model that loops keeps its loop; `titan-loop retrofit --mode plain` makes one of a model that
    does not. See titan_loop/families/moe/README.md.

    Args:
        model: A run of family nanbeige, or a checkpoint of one; `titan-loop convert import` makes
            one of a LlamaForCausalLM folder.
        output: New run directory.
    """
    print(
        remade_run(
            *(model, output, sys.argv),
            options=upcycling.options,
            entries=partial(_entries, noise=upcycling.noise),
            how={"moe": asdict(upcycling)},
        )
    )
    print(how_to_train(output))


def _entries(
    reader: CheckpointReader, options: ModelOptions, *, noise: float
) -> Mapping[str, LazyTensor]:
    """Return the new model's tensors: the dense model's, copies of them, and new routers."""
    assert isinstance(options, MoEOptions)
    model = build_decoder(options, max_seq_len=1, device="meta")
    saved, dtype = {*reader.tensor_keys()}, reader.dtype("tok_embeddings.weight")
    entries: dict[str, LazyTensor] = {}
    for name, tensor in model.state_dict().items():
        shape, layer = tuple(tensor.shape), name.split(".moe.")[0]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name in saved:
            entries[name] = LazyTensor(shape, reader.dtype(name), partial(reader.read, name))
        elif _EXPERTS in name:
            matrix = f"{layer}.feed_forward.{_STACKS[name.rpartition('.')[2]]}.weight"
            copies = partial(_copies, reader, matrix, shape, noise, generator)
            entries[name] = LazyTensor(shape, dtype, copies)
        elif name.endswith(".expert_bias_SE"):
            entries[name] = LazyTensor(shape, tensor.dtype, partial(torch.zeros, shape))
        else:
            draw = partial(_router, shape, options.initializer_range, generator, dtype)
            entries[name] = LazyTensor(shape, dtype, draw)
    return entries


def _copies(
    reader: CheckpointReader,
    matrix: str,
    shape: tuple[int, ...],
    noise: float,
    generator: torch.Generator,
) -> Tensor:
    """Return E copies of a matrix, each with its own noise."""
    weight = reader.read(matrix)
    copies = weight.expand(shape).clone()
    if noise:
        size = noise * float(weight.double().square().mean().sqrt())
        for copy in copies:
            draw = torch.randn(weight.shape, generator=generator)
            copy += (size * draw).to(weight.dtype)
    return copies


def _router(
    shape: tuple[int, ...], std: float, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    return (std * torch.randn(shape, generator=generator)).to(dtype)
