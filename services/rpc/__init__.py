"""Stubs generated from proto/thimble/v1/engine.proto by `make proto`; a test proves them fresh."""
