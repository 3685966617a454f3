"""Learn from an endless stream while reading it; the same as `hf-recurrent learn`."""

import sys

from hf_recurrent.cli.main import main

main(["learn", *sys.argv[1:]])
