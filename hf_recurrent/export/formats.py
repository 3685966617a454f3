"""Names of the formats of exported programs, for modules that do not import torch."""

FORMATS = ("torch", "aoti", "onnx", "executorch", "c")
NUMBERS = ("float32", "bfloat16")  # of moments and sensitivities of a learner in C
