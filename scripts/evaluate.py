"""Bits per byte of a model on held-out episodes; the same as `hf-recurrent evaluate`."""

from hf_recurrent.cli.evaluate import main

main()
