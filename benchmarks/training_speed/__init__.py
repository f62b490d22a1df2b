"""Tokens per second of jaxmorph, of a plain JAX loop and of torch.distributed.pipelining.

`python -m benchmarks.training_speed` trains the same GPT-2 from the same parameters on the same
batches with all of them, side by side: every contender has processes of its own, which live as
long as the benchmark, and they take turns, round by round, so that what disturbs the machine for a
while disturbs all alike. A process is confined to the cores that it is given.
"""
