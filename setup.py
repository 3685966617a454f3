"""The compiled kernel of the linear scan, which may be missing; all else is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Extension, setup

# The file holds no symbol of Python's: one build serves every version, which is what "limited API" says in its name.
# Python without a global lock knows no such name.
any_version = not sysconfig.get_config_var("Py_GIL_DISABLED")

kernel = Extension(
    "hf_recurrent.kernels._linear_scan_cpu",
    sources=["hf_recurrent/kernels/linear_scan_cpu.c"],
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=any_version,
    optional=True,  # without a C compiler the installation goes on, and plain torch serves
)

setup(
    # The kernel uses POSIX threads and the vector code of GCC and Clang.
    ext_modules=[] if sys.platform == "win32" else [kernel],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if any_version else {},
)
