"""Learn from an endless stream while it is read: the same as `hf-recurrent learn`."""

from hf_recurrent.cli.learn import main

main()
