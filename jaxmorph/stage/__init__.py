"""A stage's mathematics: a slice of a model as compiled F, B, W and BW.

Read `model` (what a model provides) and `parameters`, then `backward`, which splits one backward
into B and W by minimum cuts over the equations of `equations`; `stage_functions` makes a stage of
such pieces, and `build` compiles it on a part of the `mesh`. `layer_costs` measures pieces.
"""
