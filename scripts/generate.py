"""Continue texts with a model; the same as `hf-recurrent generate`."""

import sys

from hf_recurrent.cli.main import main

main(["generate", *sys.argv[1:]])
