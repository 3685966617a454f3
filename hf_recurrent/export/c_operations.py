"""Operations of exported graphs as C text: element-wise ones, and helper functions that the file then holds."""

import re
from typing import Any

import torch

aten = torch.ops.aten

# Operations that move, repeat or drop numbers.
MOVES = {
    aten.alias.default, aten.cat.default, aten.clone.default, aten.detach.default, aten.expand.default,
    aten.flip.default, aten.gather.default, aten.index_select.default, aten.permute.default, aten.reshape.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.stack.default, aten.transpose.int, aten.unbind.int, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip

# {0}, {1} … are operands; NAME_ becomes the prefix of the file's names.
ELEMENTWISE = {
    aten.add.Tensor: "({0} + {1})",
    aten.add.Scalar: "({0} + {1})",
    aten.sub.Tensor: "({0} - {1})",
    aten.sub.Scalar: "({0} - {1})",
    aten.rsub.Scalar: "({1} - {0})",
    aten.mul.Tensor: "({0} * {1})",
    aten.mul.Scalar: "({0} * {1})",
    aten.div.Tensor: "({0} / {1})",
    aten.div.Scalar: "({0} / {1})",
    aten.neg.default: "(-{0})",
    aten.reciprocal.default: "(1.0f / {0})",
    aten.abs.default: "fabsf({0})",
    aten.exp.default: "expf({0})",
    aten.expm1.default: "expm1f({0})",
    aten.log.default: "logf({0})",
    aten.log1p.default: "log1pf({0})",
    aten.sqrt.default: "sqrtf({0})",
    aten.rsqrt.default: "(1.0f / sqrtf({0}))",
    aten.sin.default: "sinf({0})",
    aten.cos.default: "cosf({0})",
    aten.tanh.default: "tanhf({0})",
    aten.maximum.default: "fmaxf({0}, {1})",
    aten.minimum.default: "fminf({0}, {1})",
    aten.relu.default: "fmaxf({0}, 0.0f)",
    aten.gt.Scalar: "({0} > {1})",
    aten.where.self: "({0} != 0.0f ? {1} : {2})",
    aten.addcmul.default: "({0} + {1} * {2})",
    aten.sigmoid.default: "NAME_sigmoid({0})",
    aten.silu.default: "NAME_silu({0})",
    aten.softplus.default: "NAME_softplus({0})",
    aten.square.default: "NAME_square({0})",
}

# Helper functions, each written where it is used.
HELPERS = {
    "sigmoid": "static float NAME_sigmoid(float x) {\n    return 1.0f / (1.0f + expf(-x));\n}",
    "silu": "static float NAME_silu(float x) {\n    return x / (1.0f + expf(-x));\n}",
    "softplus": "static float NAME_softplus(float x) {\n    return x > 20.0f ? x : log1pf(expf(x));\n}",
    "square": "static float NAME_square(float x) {\n    return x * x;\n}",
    "gelu": ("static float NAME_gelu(float x) {\n    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));\n}"),
    "gelu_tanh": """static float NAME_gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}""",
    "linear": """/* y = scale * (table x) + bias, where there is one. */
static void NAME_linear(const int8_t *table, const float *scale, const float *bias, const float *x, float *y,
                       int outputs, int inputs) {
    for (int k = 0; k < outputs; k++) {
        float sum = 0.0f;
        for (int i = 0; i < inputs; i++) sum += (float)table[(long)k * inputs + i] * x[i];
        y[k] = scale[k] * sum + (bias ? bias[k] : 0.0f);
    }
}""",
    "layer_norm": """/* Mean 0 and variance 1, then weight and bias, where there are any. */
static void NAME_layer_norm(const float *weight, const float *bias, float eps, const float *x, float *y, int size) {
    float mean = 0.0f, variance = 0.0f;
    for (int i = 0; i < size; i++) mean += x[i];
    mean /= (float)size;
    for (int i = 0; i < size; i++) variance += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / sqrtf(variance / (float)size + eps);
    for (int i = 0; i < size; i++) {
        y[i] = (x[i] - mean) * factor * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
    }
}""",
    "rms_norm": """/* Mean square 1, then weight, where there is one. */
static void NAME_rms_norm(const float *weight, const float *bias, float eps, const float *x, float *y, int size) {
    float square = 0.0f;
    (void)bias;
    for (int i = 0; i < size; i++) square += x[i] * x[i];
    const float factor = 1.0f / sqrtf(square / (float)size + eps);
    for (int i = 0; i < size; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}""",
    "wide": """/* The float of a half-precision number. */
static float NAME_wide(uint16_t half) {
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    const int exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 0) return sign * ldexpf((float)fraction, -24);
    return sign * ldexpf((float)(fraction + 1024), exponent - 25);
}""",
    "narrow": """/* The nearest half-precision number, ties to even; the largest one for those beyond. */
static uint16_t NAME_narrow(float x) {
    const uint16_t sign = x < 0.0f ? 0x8000 : 0;
    int exponent = -13; /* of numbers below 2^-14, zero among them */
    x = fabsf(x);
    if (!(x < 65504.0f)) return (uint16_t)(sign | 0x7bff);
    if (x >= 6.103515625e-05f) (void)frexpf(x, &exponent);
    const float scaled = ldexpf(x, 11 - exponent);
    int rounded = (int)scaled;
    const float rest = scaled - (float)rounded;
    if (rest > 0.5f || (rest == 0.5f && (rounded & 1))) rounded++;
    /* A fraction of 2048 carries into the exponent. */
    return (uint16_t)(sign | (rounded + ((exponent + 13) << 10)));
}""",
}


def literal(value: float) -> str:
    """A float in C."""
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = f"{float(torch.tensor(value, dtype=torch.float32)):.9g}"
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return f"({text}f)" if value < 0 else f"{text}f"


def elementwise(target: Any, args: tuple, kwargs: dict) -> tuple[str, list] | None:
    """Template and operands of an element-wise operation, or None for another one."""
    options = {name: value for name, value in kwargs.items() if value is not None}
    if target in (aten.add.Tensor, aten.sub.Tensor) and "alpha" in options:
        sign = "+" if target is aten.add.Tensor else "-"
        return f"({{0}} {sign} {{2}} * {{1}})", [*args, options["alpha"]]
    if target is aten.addcmul.default and "value" in options:
        return "({0} + {3} * ({1} * {2}))", [*args, options["value"]]
    if target in ELEMENTWISE and not options:
        arity = len(set(re.findall(r"\{\d\}", ELEMENTWISE[target])))
        # Further arguments: beta 1 and threshold 20 of softplus, which are in the helper, and alpha 1.
        usual = target is not aten.softplus.default or args[1:] == (1, 20)[: len(args) - 1]
        usual &= target is aten.softplus.default or all(extra == 1 for extra in args[arity:])
        return (ELEMENTWISE[target], list(args[:arity])) if usual else None
    if target is aten.gelu.default:
        name = "gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu"
        return f"NAME_{name}({{0}})", [args[0]]
    if target is aten.pow.Tensor_Scalar:
        return ("NAME_square({0})", [args[0]]) if args[1] == 2 else ("powf({0}, {1})", list(args))
    if target is aten.clamp.default:
        low, high = (*args[1:], None, None)[:2]
        template, operands = "{0}", [args[0]]
        for function, bound in (("fmaxf", low), ("fminf", high)):
            if bound is not None:
                template = f"{function}({template}, {{{len(operands)}}})"
                operands.append(bound)
        return template, operands
    return None
