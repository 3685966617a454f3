"""Learn from an endless stream while reading it; the same as `hf-recurrent learn`."""

from hf_recurrent.cli.learn import main

main()
