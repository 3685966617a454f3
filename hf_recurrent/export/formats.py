"""Names of the formats of exported programs, for modules that do not import torch."""

FORMATS = ("torch", "aoti", "onnx", "executorch", "c")
