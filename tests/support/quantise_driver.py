"""llama.cpp's own quantiser, of npm's @node-llama-cpp: FOLDER SOURCE OUTPUT NUMBER_OF_THE_TYPE."""

import ctypes
import sys


class Parameters(ctypes.Structure):
    """The first fields, in a block that is larger than the whole."""

    _fields_ = [
        ("threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 1016),
    ]


if __name__ == "__main__":
    folder, source, output, file_type = sys.argv[1:]
    library = ctypes.CDLL(f"{folder}/libllama.v0.5.0.so")
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    parameters.threads, parameters.file_type = 1, int(file_type)
    paths = (source.encode(), output.encode())
    sys.exit(library.llama_model_quantize(*paths, ctypes.byref(parameters)))
