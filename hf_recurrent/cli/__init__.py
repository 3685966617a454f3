"""The `hf-recurrent` command; every verb is also a script in `scripts/`."""
