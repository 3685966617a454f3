"""The compiled kernels for CPUs, which may be missing; all else is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Extension, setup

# The files hold no symbol of Python's: one build serves every version, which is what "limited API" says in its name.
# Python without a global lock knows no such name.
any_version = not sysconfig.get_config_var("Py_GIL_DISABLED")

kernels = [
    Extension(
        f"hf_recurrent.kernels._{name}",
        sources=[f"hf_recurrent/kernels/{name}.c"],
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=[
            "-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-pthread",
        ],
        extra_link_args=["-pthread"],
        py_limited_api=any_version,
        optional=True,  # without a C compiler the installation goes on, and plain torch serves
    )
    for name in ("linear_scan_cpu", "sensitivities_cpu", "step_cpu")
]  # fmt: skip

setup(
    # The kernels use POSIX threads and the vector code of GCC and Clang.
    ext_modules=[] if sys.platform == "win32" else kernels,
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if any_version else {},
)
