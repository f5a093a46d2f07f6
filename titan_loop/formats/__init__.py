"""Import and export of models as folders and files of other programs.

    config.json, *.safetensors ─► LlamaShape ─► a run with one checkpoint       (importing.py)
    checkpoint ─► LlamaShape ─► folder for transformers, SGLang, vLLM, MLX      (model_folder.py)
                            └─► one file for llama.cpp                          (gguf_file.py)

Each family's folder defines the shape of its models in a format, and registers the format.
"""

from titan_loop.plugins import Plugin, register

_FILE = "titan_loop.formats.gguf_file"

register(
    Plugin(
        families={"nanbeige": "titan_loop.models.dense:DENSE"},
        formats={
            "gguf": f"{_FILE}:GGUF",
            "gguf-unrolled": f"{_FILE}:GGUF_UNROLLED",
            "onnx": "titan_loop.formats.onnx_file:ONNX",
            "llama-unrolled": "titan_loop.formats.dense:LLAMA_FOLDER",
        },
    )
)
