"""The optional compiled kernels for CPUs; everything else is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Distribution, Extension, setup

# The kernels use no Python symbols, so one build works with every version: its file name says "abi3" (limited API).
# Free-threaded Python has no limited API.
any_version = not sysconfig.get_config_var("Py_GIL_DISABLED")


class PlatformDistribution(Distribution):
    """Wheels are for one platform, also without kernels: others would prefer one for "any" to building their own."""

    def has_ext_modules(self):
        return True


# The source of each extension is of its name; these are the files that it includes, headers without ".h".
PARTS = ("", "_contexts", "_mixing", "_all_bytes", "_reading", "_coder", "_coding")
COUNTS = [f"count_memory{part}" for part in PARTS]
INCLUDED = {
    "count_memory_cpu": COUNTS,
    "count_memory_large_cpu": [*COUNTS, "count_memory_large", "count_memory_cpu.c"],
    "count_memory_small_cpu": [*COUNTS, "count_memory_cpu.c"],
    "linear_scan_cpu": ["kernel", "linear_scan_elements", "linear_scan_levels", "linear_scan_rows", "thread_pool"],
    "sensitivities_cpu": ["kernel", "sensitivities", "thread_pool"],
    "thread_pool_cpu": ["kernel", "thread_pool"],
    "training_cpu": [
        "kernel", "thread_pool", "versions", "training_body", "vectors", "vector_functions", "products",
        "products_bf16", "gelu", "gates", "convolution", "losses", "adagrad", "tables", "layer", "few_rows",
    ],
    "step_cpu": [
        "kernel", "bytecode", "versions", "vectors", "vector_functions", "linear", "map", "rows", "matmul",
        "recurrences", "adagrad", "gradients", "interpreter",
    ],
}  # fmt: skip
FOLDER = "hf_recurrent/kernels"
# Kernels whose results do not depend on the compiler.
EXACT = {"count_memory_cpu", "count_memory_large_cpu", "count_memory_small_cpu"}

kernels = [
    Extension(
        f"hf_recurrent.kernels._{name}",
        sources=[f"{FOLDER}/{name}.c"],
        depends=[f"{FOLDER}/{file}" if "." in file else f"{FOLDER}/{file}.h" for file in files],
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=[
            "-std=c11", "-O3", f"-ffp-contract={'off' if name in EXACT else 'fast'}", "-fno-math-errno",
            "-fvisibility=hidden", "-pthread",
        ],
        extra_link_args=["-pthread"],
        py_limited_api=any_version,
        optional=True,  # without a C compiler, installation continues and plain torch is used
    )
    for name, files in INCLUDED.items()
]  # fmt: skip

setup(
    distclass=PlatformDistribution,
    # The kernels use POSIX threads and vector extensions of GCC and Clang.
    ext_modules=[] if sys.platform == "win32" else kernels,
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if any_version else {},
)
