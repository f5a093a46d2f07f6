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

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from titan_loop.checkpoint.manifest import reference, untrained
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import UserError
from titan_loop.families.moe.model import SIZES, MoEOptions
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder, decoder_config, resolved_shape
from titan_loop.models.llama import LlamaOptions
from titan_loop.runs.conversion import written_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.tokenizer import TOKENIZER_NAME

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
        dense = run.model_options
        if not isinstance(dense, DenseOptions):
            raise UserError(
                f"{run.path} is of family {dense.family}; give a model of family nanbeige, whose "
                "feed-forwards become experts"
            )
        if dense.branch_scale:
            raise UserError(
                f"{run.path} has model.branch_scale={dense.branch_scale}, a factor that would "
                "change with the loop; experts are made of a model with 0.0"
            )
        if not 0 <= self.noise < 1:
            raise UserError(f"--noise={self.noise} must be 0 or more and below 1")
        names = [option.name for option in fields(LlamaOptions) if option.init]
        plain = type(dense)()
        for name in {option.name for option in fields(dense)} - {*names, "family"}:
            if getattr(dense, name) not in (getattr(plain, name), ()):
                raise UserError(
                    f"{run.path} has model.{name}={getattr(dense, name)}; experts are made of "
                    f"Llama's blocks, which have {getattr(plain, name)}"
                )
        same = {name: getattr(dense, name) for name in names} | asdict(resolved_shape(dense))
        same["size"] = dense.size if dense.size in SIZES else "debugmodel"
        same["recurrent_steps"] = recurrent_steps
        own = {name: value for name, value in asdict(self).items() if name != "noise"}
        options = MoEOptions(**same, **own)
        decoder_config(options, max_seq_len=1)  # refuses parts that do not fit
        return options


def upcycle_to_experts(
    parent: Path, output: Path, upcycling: MoEUpcycling, command: Sequence[str]
) -> Path:
    """Write a new run with one checkpoint of step 0; its lineage has parent and new parts.

    Args:
        parent: Run (its newest checkpoint is taken) or a checkpoint.

    Returns:
        The new checkpoint.

    Raises:
        UserError: As `MoEUpcycling.options`; `output` is not empty, or the checkpoint is not of the
            run's architecture.
    """
    run = SavedRun.open(parent)
    source = run.checkpoint()
    trainer = source.manifest["trainer"]
    own = decoder_config(run.model_options, max_seq_len=1).architecture
    check_architecture(trainer["architecture"], own)
    options = upcycling.options(run, source.recurrent_steps)
    config = {
        **run.config,
        "dump_folder": str(output),
        "dataloader": run.dataloader,
        "model": asdict(options),
    }
    assert options.recurrent_steps is not None
    content = untrained(
        options.recurrent_steps,
        decoder_config(options, max_seq_len=1).architecture,
        data=source.manifest["data"],
        lineage={"parent": reference(source.path), "moe": asdict(upcycling)},
    )
    with written_run(output, config, command, tokenizer=run.path / TOKENIZER_NAME) as new:
        entries = _entries(CheckpointReader(source.path), options, upcycling.noise)
        write_checkpoint(new.checkpoint(0), entries, content)
    return RunDirectory(output).checkpoint(0)


def _entries(
    reader: CheckpointReader, options: MoEOptions, noise: float
) -> Mapping[str, LazyTensor]:
    """Return the new model's tensors: the dense model's, copies of them, and new routers."""
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
