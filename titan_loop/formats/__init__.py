"""Import and export of models as folders and files of other programs.

    config.json, *.safetensors ─► LlamaShape ─► a run with one checkpoint       (importing.py)
    checkpoint ─► LlamaShape ─► folder for transformers, SGLang, vLLM, MLX      (model_folder.py)
                            └─► one file for llama.cpp                          (gguf_file.py)

Each family's folder defines the shape of its models in a format, and registers the format.
"""

from titan_loop.plugins import Plugin, register

register(
    Plugin(
        formats={
            "gguf": "titan_loop.formats.gguf_file:GGUF",
            "gguf-unrolled": "titan_loop.formats.gguf_file:GGUF_UNROLLED",
        }
    )
)
