"""Names of the formats of exported programs, for modules that do not import torch."""

FORMATS = ("torch", "aoti", "onnx", "executorch", "c")
# Of a learner in C: of moments and sensitivities; int16 has matrices in fixed point too.
NUMBERS = ("float32", "bfloat16", "int16")
