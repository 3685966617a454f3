"""Bits per byte of a model on held-out episodes; the same as `hf-recurrent evaluate`."""

import sys

from hf_recurrent.cli.main import main

main(["evaluate", *sys.argv[1:]])
