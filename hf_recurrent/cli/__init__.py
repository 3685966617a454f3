"""The `hf-recurrent` command; every command is also a script in `scripts/`."""
