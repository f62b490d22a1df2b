"""Whether jaxmorph computes rightly and fast on this GPU: `python -m jaxmorph.gpu_check`.

Imports JAX, Flax, Optax, numpy and such rooms of jaxmorph as import nothing else, so that it runs
where the other dependencies are absent.
"""
