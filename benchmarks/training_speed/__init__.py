"""Tokens per second of jaxmorph, a plain JAX loop, SpectraX and torch.distributed.pipelining.

`python -m benchmarks.training_speed` trains the same GPT-2 from the same parameters on the same
batches with all of them, side by side: every contender has its own processes for the
whole benchmark. They take turns, round by round, so that other work on the machine slows down all
alike. A process is confined to the cores that it is given.
"""
