"""Continue texts with a model; the same as `hf-recurrent generate`."""

from hf_recurrent.cli.generate import main

main()
