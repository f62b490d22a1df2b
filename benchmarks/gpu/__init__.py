"""Whether jaxmorph computes right and fast on this machine's GPU: `python -m benchmarks.gpu`.

Read `__main__` (the parts, their order, the result), `child` (a part in a process of its own), then
the parts: `environment`, `copies`, `stage`, `two_stages`, and with two GPUs `two_gpus`. They need
JAX, Flax, Optax and numpy, and none of jaxmorph's other dependencies; only the part `restart` does.
"""
