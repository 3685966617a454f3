"""HTTP: the OpenAI-compatible API and that of sessions. Needs the extra `serve`."""
