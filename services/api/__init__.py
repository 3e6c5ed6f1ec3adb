"""The OpenAI-compatible front: text, templates, HTTP, dialog snapshots. Never imports torch or the engine."""
