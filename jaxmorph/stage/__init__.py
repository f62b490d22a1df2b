"""A stage's mathematics: a slice of a model, compiled as the ops F, B, W and BW.

Read `model` (what a model provides) and `parameters` first, then `backward`, which splits a
backward into B and W by minimum cuts over a traced function (`equations`). `stage_functions`
builds a stage from an embedding, layers and a head that are split this way, `build` compiles it
for its part of the device `mesh`, and `layer_costs` measures layers one by one. `sharding` splits
parameters over the devices of a stage, and `shard_checks` whether a model then computes the same.
"""
