"""Copies payloads between a stage's device and the slots of the data plane, in several ways."""
