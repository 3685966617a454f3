"""Documents, corpora and the streams made of them."""
