"""Routing without the real model: generators of different structure, calibrated where something was published."""
