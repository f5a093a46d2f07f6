"""A dense checkpoint becomes the first checkpoint of a looped one.

    run or folder ─► Dense: options, tensors by name ─► a mode ─► options and tensors of the loop
    ─► a run whose manifest names the parent and the surgery

| mode | layers | new parameters | with R = 1 |
|---|---|---|---|
| identity | all | a bridge of zeros | the dense model |
| plain | all | none; family `nanbeige` | the dense model |
| damped | all | none; a step is 1/K of a pass, K = R | with R = K = 1 the dense model |
| dropped | the first P, the last C + K | a mixer that keeps the state | the layers that are left |
| tied | C for R·C of them (`tying.py`) | adapters of each step | the first of R passes |

`rank` gives every mode but tied adapters that start at zero and act from the second step on; plain
is then of family `retrofit`. One tensor is in memory at a time. The dense model's optimiser state
is not carried over.
"""

import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import torch
from annotated_types import Ge
from torch import Tensor

from titan_loop.bounds import FINITE, refused
from titan_loop.checkpoint.loading import OPTIMIZER_PREFIX
from titan_loop.checkpoint.manifest import reference, untrained
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.errors import UserError, raise_first, seen_from
from titan_loop.families.retrofit.bridge import read_one
from titan_loop.families.retrofit.model import RetrofitOptions
from titan_loop.families.retrofit.tying import TiedSpan, Tying
from titan_loop.formats.importing import CONFIG, ModelFolder, import_run
from titan_loop.models.dense import BlockOptions, DenseOptions
from titan_loop.models.family import (
    build_decoder,
    completed_architecture,
    decoder_config,
    resolved,
)
from titan_loop.runs.conversion import written_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.tokenizer import TOKENIZER_NAME

Mode: TypeAlias = Literal["identity", "plain", "damped", "dropped", "tied"]


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """The layers to loop, and the way to loop them: flags of `titan-loop retrofit`."""

    mode: Mode = "identity"
    prelude: Annotated[int, Ge(0)]
    core: Annotated[int, Ge(1)]
    coda: Annotated[int, Ge(0)]
    recurrent_steps: Annotated[int, Ge(1)] = 2
    rank: Annotated[int, Ge(0)] = 0
    noise: Annotated[float, Ge(0), FINITE] = 0.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Surgery, include_extras=True).items():
            raise_first(refused(f"--{name.replace('_', '-')}", getattr(self, name), hint))
        if self.noise and self.mode != "dropped":
            raise UserError(
                f"--noise={self.noise} has no effect with --mode={self.mode}, only with dropped"
            )

    def flags(self) -> list[str]:
        """Return the flags of `titan-loop retrofit` that ask for this surgery."""
        return [
            word
            for field in fields(self)
            for word in (f"--{field.name.replace('_', '-')}", str(getattr(self, field.name)))
        ]

    def check_layers(self, n_layers: int) -> None:
        """Raise `UserError` unless the spans make up a dense model of `n_layers`."""
        passes = self.recurrent_steps if self.mode == "tied" else 1
        total = self.prelude + passes * self.core + self.coda
        if self.mode == "dropped":
            if total >= n_layers:
                raise UserError(
                    f"--prelude={self.prelude} --core={self.core} --coda={self.coda} are {total} "
                    f"layers of {n_layers}; --mode=dropped leaves at least one out"
                )
            return
        if total != n_layers:
            times = f" × --recurrent-steps={passes}" if self.mode == "tied" else ""
            raise UserError(
                f"--prelude={self.prelude} --core={self.core}{times} --coda={self.coda} are "
                f"{total} layers, and the model has {n_layers}; --mode={self.mode} uses every "
                "layer once"
            )

    def sources(self, n_layers: int) -> list[list[int]]:
        """Return, for each layer of the looped model, the dense layers that it is made of."""
        last = self.core + self.coda
        if self.mode == "dropped":
            kept = [*range(self.prelude), *range(n_layers - last, n_layers)]
            return [[layer] for layer in kept]
        if self.mode != "tied":
            return [[layer] for layer in range(n_layers)]
        span = self.span
        outside = {new: [old] for old, new in span.outside()}
        looped = {span.prelude + layer: span.behind(layer) for layer in range(span.core)}
        return [found for _, found in sorted({**outside, **looped}.items())]

    @property
    def span(self) -> TiedSpan:
        """The layers that `tied` makes one of."""
        return TiedSpan(self.prelude, self.core, self.recurrent_steps, self.coda)

    def _chosen(self, dense: BlockOptions) -> dict[str, Any]:
        """Return the options that name layers, with the looped model's numbers."""
        known = resolved(dense)
        assert known.n_layers is not None
        sources, chosen = self.sources(known.n_layers), {}
        for name in ("windowed_layers", "unrotated_layers"):
            if not (layers := getattr(known, name)):
                continue
            kinds = [{layer in layers for layer in behind} for behind in sources]
            for behind, kind in zip(sources, kinds, strict=True):
                if len(kind) > 1:
                    raise UserError(
                        f"model.{name}={layers}: --mode=tied would make one layer of {behind}, "
                        "which differ in that; choose --core so that they agree"
                    )
            chosen[name] = tuple(new for new, kind in enumerate(kinds) if True in kind)
        return chosen

    def options(self, dense: BlockOptions) -> BlockOptions:
        """Return the looped model's options; `UserError` if spans or rank do not fit the model."""
        architecture = decoder_config(dense, max_seq_len=1).architecture
        if self.mode == "tied" and architecture["relative_window"] is not None:
            raise UserError(
                f"model.positions={dense.positions}: --mode=tied makes matrices and norms of "
                "several layers, not tables of distances; use another mode"
            )
        self.check_layers(architecture["n_layers"])
        if self.rank > architecture["dim"]:
            raise UserError(f"--rank={self.rank} is above the model's width, {architecture['dim']}")
        loop = replace(
            dense,
            **self._chosen(dense),
            n_layers=self.prelude + self.core + self.coda,
            prelude_layers=self.prelude,
            coda_layers=self.coda,
            recurrent_steps=self.recurrent_steps,
        )
        if self.mode in ("plain", "tied") and not self.rank:
            return loop
        shared = {
            field.name: getattr(loop, field.name) for field in fields(BlockOptions) if field.init
        }
        tied = self.mode == "tied"
        return RetrofitOptions(
            **shared,
            bridge=self.mode == "identity",
            mixer=self.mode == "dropped",
            start_noise=self.noise,
            damping=self.recurrent_steps if self.mode == "damped" else 1,
            adapter_rank=self.rank,
            adapter_sets=self.recurrent_steps if tied else 1,
            adapter_first_step=2 if self.rank and not tied else 1,
        )


class Dense:
    """The dense model to start from; `UserError` unless it is one stack that runs once."""

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.checkpoint = run.checkpoint()
        architecture = completed_architecture(self.checkpoint.manifest["trainer"]["architecture"])
        options = run.model_options
        if not isinstance(options, DenseOptions):
            raise UserError(
                f"{run.path} is of family {options.family}; retrofit starts from a dense model, "
                "family nanbeige or a folder of titan-loop retrofit --list"
            )
        looped = {
            "prelude_layers": 0,
            "coda_layers": 0,
            "exit_gate": False,
            "norm_placement": "readout",
            "injection": "none",
            "branch_scale": 0.0,
        }
        for name, wanted in looped.items():
            if architecture[name] != wanted:
                raise UserError(
                    f"{run.path} has model.{name}={architecture[name]}; retrofit starts from a "
                    f"dense model, which has {wanted}"
                )
        if self.checkpoint.recurrent_steps != 1:
            raise UserError(
                f"{run.path} runs {self.checkpoint.recurrent_steps} recurrent steps; retrofit "
                "starts from a dense model, which runs one"
            )
        self.options = options
        self._reader = CheckpointReader(self.checkpoint.path)

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._reader.read(name)

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the model's tensors by name."""
        return {
            name: LazyTensor(
                tuple(self._reader.shape(name)),
                self._reader.dtype(name),
                partial(self.read, name),
            )
            for name in self._reader.tensor_keys()
            if not name.startswith(OPTIMIZER_PREFIX)
        }


@contextmanager
def opened(path: Path, command: Sequence[str]) -> Iterator[tuple[Dense, Mapping[str, Any]]]:
    """Open a run, a checkpoint, or a folder that `convert import` reads.

    Args:
        path: One of them. A folder is imported into a temporary run.

    Yields:
        The model, and the lineage that its descendants record.

    Raises:
        UserError: There is no such model, or it is not dense.
    """
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder{seen_from(path)}; give a folder of a dense model, a run or a "
            "checkpoint"
        )
    if not (path / CONFIG).exists() or RunDirectory(path).run_json.exists():
        dense = Dense(SavedRun.open(path))
        yield dense, {"parent": reference(dense.checkpoint.path)}
        return
    folder = ModelFolder(path)
    with tempfile.TemporaryDirectory(prefix="retrofit-") as place:
        run = Path(place) / "dense"
        import_run(folder, run, command, dtype=torch.float32)
        try:
            yield Dense(SavedRun(run)), {"parent": None, **folder.lineage()}
        except UserError as error:  # name the user's folder: the temporary run is about to go
            raise UserError(str(error).replace(str(run), str(path))) from error


def retrofit_run(path: Path, output: Path, surgery: Surgery, command: Sequence[str]) -> Path:
    """Write a new run with one checkpoint of step 0, the looped model; return that checkpoint.

    Its configuration is the dense run's with the new model; its `lineage.retrofit` has the fields
    of `surgery`. Raises as `opened` does, and if `output` is not empty or the spans do not fit.
    """
    with opened(path, command) as (dense, lineage):
        options = surgery.options(dense.options)
        config = {
            **dense.run.config,
            "dump_folder": str(output),
            "dataloader": dense.run.dataloader,
            "model": asdict(options),
        }
        content = untrained(
            surgery.recurrent_steps,
            decoder_config(options, max_seq_len=1).architecture,
            data=dense.checkpoint.manifest["data"],
            lineage={**lineage, "retrofit": asdict(surgery)},
        )
        tokenizer = dense.run.path / TOKENIZER_NAME
        with written_run(output, config, command, tokenizer=tokenizer) as new:
            write_checkpoint(new.checkpoint(0), _entries(dense, surgery, options), content)
    return RunDirectory(output).checkpoint(0)


def _entries(dense: Dense, surgery: Surgery, options: BlockOptions) -> dict[str, LazyTensor]:
    """Return the looped model's tensors: the dense model's, and initial values of the new ones."""
    old = dense.tensors()
    dtype = next(iter(old.values())).dtype
    if surgery.mode == "tied":
        tying = Tying(surgery.span, surgery.rank, dense.read, options.norm_offset)
        shapes = {name: entry.shape for name, entry in old.items()}
        return {
            name: LazyTensor(shape, dtype, partial(produce, dtype))
            for name, (shape, produce) in tying.tensors(shapes).items()
        }
    if surgery.mode == "dropped":
        old = _without_middle(old, surgery)
    model = build_decoder(options, max_seq_len=1, device="meta")
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    new, noisy = [name for name in wanted if name not in old], surgery.noise > 0
    return old | {
        name: LazyTensor(wanted[name], dtype, partial(_initial, name, wanted[name], noisy, dtype))
        for name in new
    }


def _without_middle(old: dict[str, LazyTensor], surgery: Surgery) -> dict[str, LazyTensor]:
    """Return the tensors without the layers between the prelude and the last C + K."""
    layers = {int(name.split(".")[1]) for name in old if name.startswith("layers.")}
    sources = surgery.sources(len(layers))
    renumbered = {f"layers.{number}.": f"layers.{new}." for new, (number,) in enumerate(sources)}
    result: dict[str, LazyTensor] = {}
    for name, entry in old.items():
        if not name.startswith("layers."):
            result[name] = entry
            continue
        before = ".".join(name.split(".", 2)[:2]) + "."
        if before in renumbered:
            result[name.replace(before, renumbered[before], 1)] = entry
    return result


def _initial(name: str, shape: tuple[int, ...], noise: bool, dtype: torch.dtype) -> Tensor:
    """Return a new parameter's initial value: zeros for bridge and U, random for V."""
    if name == "mixer.weight":
        mixer = torch.empty(shape, dtype=dtype)
        read_one(mixer, prelude=noise)
        return mixer
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    if not name.endswith(".down"):
        return torch.zeros(shape, dtype=dtype)
    seed = zlib.crc32(name.encode())
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return draw.mul_(shape[-1] ** -0.5).to(dtype)
