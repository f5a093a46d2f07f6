"""Folders and files of retrofitted models for engines: Llama, with every visit a layer of its own.

A visit's adapters are merged into its layer: W + U_s V_s. Bridge, mixer and damped steps have no
place in Llama, and are refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.families.nanbeige.formats import UnrolledShape
from titan_loop.formats.format import Export, Format
from titan_loop.formats.model_folder import write_model_folder


@dataclass(frozen=True, kw_only=True)
class RetrofitUnrolledShape(UnrolledShape):
    """Llama's shape of an unrolled loop with adapters.

    Attributes:
        adapter_rank: Rank of the adapters; 0 for none.
        adapter_sets: Number of sets of them.
        adapter_first_step: The first step that has them.
    """

    family: ClassVar[str] = "retrofit"

    adapter_rank: int = 0
    adapter_sets: int = 1
    adapter_first_step: int = 1

    def read(self, reader: CheckpointReader, tensor: str) -> Tensor:
        """As of the base class, with the adapters of the visit."""
        weight = super().read(reader, tensor)
        chosen = self._adapters_of(tensor)
        stem = self.parameter_name(tensor).removesuffix("weight")
        if chosen is None or stem.endswith("norm."):
            return weight
        up, down = (reader.read(f"{stem}{name}")[chosen].double() for name in ("up", "down"))
        return (weight.double() + up @ down).to(weight.dtype)

    def _adapters_of(self, tensor: str) -> int | None:
        """Return the set of a tensor's visit; None outside the loop and where there is none."""
        if not self.adapter_rank or not tensor.startswith("model.layers."):
            return None
        visit = int(tensor.split(".")[2])
        core = max(self.visits) + 1 - self.prelude_layers - self.coda_layers
        if not self.prelude_layers <= visit < len(self.visits) - self.coda_layers:
            return None
        step = (visit - self.prelude_layers) // core + 1
        chosen = min(step - self.adapter_first_step, self.adapter_sets - 1)
        return None if chosen < 0 else chosen


def _write(export: Export, output: Path) -> None:
    about = f"A language model of {export.shape.n_layers} Llama blocks, unrolled from a loop."
    write_model_folder(export, output, about=about, tags=("llama",))


UNROLLED = Format(
    summary="folder for every engine in which every visit is a layer of Llama, adapters merged",
    shape=RetrofitUnrolledShape.from_architecture,
    write=_write,
    dtypes=("float32", "bfloat16", "float16"),
    gguf=RetrofitUnrolledShape,
)
