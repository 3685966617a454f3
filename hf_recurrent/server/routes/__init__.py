"""HTTP: the OpenAI-compatible API, sessions and learning. Needs the extra `serve`."""
