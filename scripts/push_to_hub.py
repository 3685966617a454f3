"""Upload a checkpoint to the Hub; the same as `hf-recurrent push-to-hub`."""

from hf_recurrent.cli.push_to_hub import main

main()
