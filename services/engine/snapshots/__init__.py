"""Bytes of a stored state. Policy (when, where, how long) is the api's."""
