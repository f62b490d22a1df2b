"""Saves a run's state so that the run can resume.

Read in this order: `checksums`, `manifest` (a checkpoint's description, and whether it is whole),
`folder` (how a checkpoint is committed and removed), `saver` (how all ranks write one during
training), `tree_files` (arrays, with Orbax) and `recut` (resuming with another cut into stages).
"""
