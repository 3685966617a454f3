"""Hawk: a temporal convolution and RG-LRU."""
