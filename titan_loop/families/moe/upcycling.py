"""A dense model becomes a mixture of experts, or a mixture becomes a loop.

    dense    F(x)                        →   Σ_{e in K} g_e E_e(x),   E_e = F + noise,  Σ_K g_e = 1
    mixture  N layers that run once      →   P + C + K layers, C of them looped R times

With normalised scores, exact copies add up to the dense model, whichever experts the new router
chooses: without noise the first outputs are the dense model's, at every number of steps. A loop of
one step is the mixture, and routers of its steps begin as copies of the one router. The optimiser
state is left behind. One tensor is in memory at a time, and for noise one expert's matrix.

Source: Komatsuzaki et al. 2023, arXiv 2212.05055 (experts are copies of a trained feed-forward, the
router is new). Deviations: scores are always normalised, copies may have noise, and every layer
becomes sparse unless it is named.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
    """New parts of a model; None keeps the model's own.

    Attributes:
        experts: Copies of a dense feed-forward, E.
        top_k: Experts that a token visits, k.
        router: Function from a router's logits to scores.
        noise: Standard deviation of the noise on a copy, over the root mean square of its matrix.
        dense_layers: Layers that stay dense, from 1.
        prelude: Number of layers before the new loop, P.
        coda: Number of layers after it, K.
        recurrent_steps: R of the new loop.
        routers: Number of routers of a looped layer; step r uses router r, later steps the last.
    """

    experts: int | None = None
    top_k: int | None = None
    router: Literal["sigmoid", "softmax"] | None = None
    noise: float | None = None
    dense_layers: tuple[int, ...] | None = None
    prelude: int | None = None
    coda: int | None = None
    recurrent_steps: int | None = None
    routers: int | None = None

    def options(self, run: SavedRun, recurrent_steps: int) -> MoEOptions:
        """Return the new model's options.

        Args:
            run: The parent.
            recurrent_steps: R that its checkpoint was trained with.

        Raises:
            UserError: The parent is of another family, or it and the new parts do not fit together.
        """
        parent = run.model_options
        if isinstance(parent, MoEOptions):
            new = self._of_mixture(run, parent)
        elif isinstance(parent, DenseOptions):
            new = self._of_dense(run, parent)
        else:
            raise UserError(
                f"{run.path} is of family {parent.family}; give a model of family "
                "nanbeige, whose feed-forwards become experts, or one of moe, which becomes a loop"
            )
        if parent.branch_scale:
            raise UserError(
                f"{run.path} has model.branch_scale={parent.branch_scale}, a factor that would "
                "change with the loop; experts are made of a model with 0.0"
            )
        loop = {"recurrent_steps": recurrent_steps, **self._loop(run, recurrent_steps)}
        options = replace(new, **loop)
        decoder_config(options, max_seq_len=1)  # refuses parts that do not fit
        return options

    def _of_dense(self, run: SavedRun, dense: LlamaOptions) -> MoEOptions:
        if self.experts is None:
            raise UserError(f"--experts is missing; {run.path} is dense, so say --experts 8")
        if not 0 <= (self.noise or 0.0) < 1:
            raise UserError(f"--noise={self.noise} must be 0 or more and below 1")
        names = [option.name for option in fields(LlamaOptions) if option.init]
        plain = type(dense)()
        for name in {option.name for option in fields(dense)} - {*names, "family"}:
            if getattr(dense, name) not in (getattr(plain, name), ()):
                raise UserError(
                    f"{run.path} has model.{name}={getattr(dense, name)}; experts are made of "
                    f"Llama's blocks, which have {getattr(plain, name)}"
                )
        shape = asdict(resolved_shape(dense))
        same = {name: getattr(dense, name) for name in names} | shape
        given = {name: getattr(self, name) for name in ("top_k", "router", "dense_layers")}
        return MoEOptions(
            **same | {"size": dense.size if dense.size in SIZES else "debugmodel"},
            experts=self.experts,
            routers=self.routers or 1,
            **{name: value for name, value in given.items() if value is not None},
        )

    def _of_mixture(self, run: SavedRun, mixture: MoEOptions) -> MoEOptions:
        for name in ("experts", "top_k", "router", "noise", "dense_layers"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')}={getattr(self, name)} is for a dense model; "
                    f"{run.path} has experts already, so it can only become a loop"
                )
        if self.recurrent_steps is None:
            raise UserError(
                f"--recurrent-steps is missing; {run.path} has experts already, so it can only "
                "become a loop"
            )
        if mixture.routers > 1 and self.routers is not None:
            raise UserError(
                f"--routers={self.routers} is for a mixture with one router per layer, and "
                f"{run.path} has {mixture.routers}; leave it out"
            )
        return replace(mixture, routers=self.routers or mixture.routers)

    def _loop(self, run: SavedRun, recurrent_steps: int) -> dict[str, int]:
        """Return the options of the new loop; nothing if there is none."""
        options, steps = run.model_options, self.recurrent_steps
        assert isinstance(options, LlamaOptions)
        if steps is None:
            for name in ("prelude", "coda"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"--{name}={getattr(self, name)} needs --recurrent-steps, the R of the loop"
                    )
            return {}
        prelude, coda = self.prelude or 0, self.coda or 0
        layers = resolved_shape(options).n_layers
        looped = {"prelude_layers": 0, "coda_layers": 0, "norm_placement": "readout"}
        for name, wanted in looped.items():
            if getattr(options, name) != wanted:
                raise UserError(
                    f"{run.path} has model.{name}={getattr(options, name)}; a loop is made of a "
                    f"model with {wanted}; leave out --recurrent-steps"
                )
        if recurrent_steps != 1:
            raise UserError(
                f"{run.path} runs {recurrent_steps} recurrent steps; a loop is made of a model "
                "that runs one; leave out --recurrent-steps"
            )
        if steps < 1 or min(prelude, coda) < 0 or prelude + coda >= layers:
            raise UserError(
                f"--prelude={prelude} --coda={coda} --recurrent-steps={steps} do not loop one of "
                f"the {layers} layers; use fewer layers outside the loop, and at least 1 step"
            )
        return {"prelude_layers": prelude, "coda_layers": coda, "recurrent_steps": steps}


def upcycle_to_experts(
    parent: Path, output: Path, upcycling: MoEUpcycling, command: Sequence[str]
) -> Path:
    """Write a new run with one checkpoint of step 0; its lineage has parent and new parts.

    Args:
        parent: Run (its newest checkpoint is taken) or a checkpoint.
        output: The new run directory.
        command: Recorded in the new `run.json`.

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
        entries = _entries(CheckpointReader(source.path), options, upcycling.noise or 0.0)
        write_checkpoint(new.checkpoint(0), entries, content)
    return RunDirectory(output).checkpoint(0)


def _entries(
    reader: CheckpointReader, options: MoEOptions, noise: float
) -> Mapping[str, LazyTensor]:
    """Return the new model's tensors: the parent's, copies of them, and new routers."""
    model = build_decoder(options, max_seq_len=1, device="meta")
    saved, dtype = {*reader.tensor_keys()}, reader.dtype("tok_embeddings.weight")
    entries: dict[str, LazyTensor] = {}
    for name, tensor in model.state_dict().items():
        shape, layer = tuple(tensor.shape), name.split(".moe.")[0]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        first_router = f"{layer}.moe.router.gate.weight"
        if name in saved:
            produce = partial(_rows, reader, name, shape)
        elif _EXPERTS in name:
            matrix = f"{layer}.feed_forward.{_STACKS[name.rpartition('.')[2]]}.weight"
            produce = partial(_copies, reader, matrix, shape, noise, generator)
        elif name.endswith(".expert_bias_SE"):
            produce = partial(torch.zeros, shape)
        elif first_router in saved:
            produce = partial(reader.read, first_router)
        else:
            std = options.initializer_range
            produce = partial(_router, shape, std, generator, dtype)
        kept = reader.dtype(name) if name in saved else dtype
        is_bias = name.endswith(".expert_bias_SE")
        entries[name] = LazyTensor(shape, tensor.dtype if is_bias else kept, produce)
    return entries


def _rows(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a saved tensor; new routers' biases are copies of the first router's."""
    saved = reader.read(name)
    return saved if saved.shape == shape else saved[:1].expand(shape).clone()


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
