"""Training while faults happen all the time, and how runs end: `python -m benchmarks.chaos`."""
