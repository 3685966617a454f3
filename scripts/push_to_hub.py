"""Upload a checkpoint to the Hub; the same as `hf-recurrent push-to-hub`."""

import sys

from hf_recurrent.cli.main import main

main(["push-to-hub", *sys.argv[1:]])
