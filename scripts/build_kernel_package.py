"""Write the linear scan as a package for the `kernels` library, and print its build variants.

    python scripts/build_kernel_package.py --output_dir linear-scan
    hf upload OWNER/linear-scan linear-scan --repo-type kernel

The variant with the compiled kernel is for the platform of this machine. For a package that others load, run it with
the wheels of hf_recurrent, which are built for old versions of the C library.
"""

import argparse
from pathlib import Path

from hf_recurrent.hub.kernel_package import write_kernel_package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="new directory")
    directory = parser.parse_args().output_dir
    try:
        variants = write_kernel_package(directory)
    except FileExistsError as error:
        parser.error(f"--output_dir: {error}")
    for variant, description in variants.items():
        print(f"{directory / 'build' / variant}: {description}")
    if len(variants) == 2:
        print("no variant with the compiled kernel: hf-recurrent was installed without a C compiler")


if __name__ == "__main__":
    main()
