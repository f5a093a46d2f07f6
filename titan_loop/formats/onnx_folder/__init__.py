"""Files that an ONNX export has beside the model."""
