"""Looped Llama blocks on the quick start's corpus: a model that inference engines run.

titan-loop train nanbeige_quickstart
titan-loop convert export runs/nanbeige --to gguf --output nanbeige.gguf
bash tools/chat.sh nanbeige.gguf
"""

from titan_loop.models.dense import DenseOptions
from titan_loop.training.trainer import LoopTrainer

from ..quickstart.recipes import quickstart


def nanbeige_quickstart() -> LoopTrainer.Config:
    """The quick start with a pre-norm block, no gate and no norm between the four steps.

    Its heads of 32 suit engines: llama.cpp's quantised caches and vLLM's CPU kernels lack the quick
    start's 24.
    """
    config = quickstart()
    config.dump_folder = "runs/nanbeige"
    config.model = DenseOptions(
        size="quickstart",
        n_layers=1,
        dim=96,
        n_heads=3,
        n_kv_heads=3,
        hidden_dim=256,
        recurrent_steps=4,
    )
    return config
