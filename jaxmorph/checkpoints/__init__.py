"""What a run saves of itself, so that it can go on: files, commits and when they are made.

To be read in this order: `checksums`, `manifest` (one checkpoint, and whether it is whole),
`folder` (how one comes to exist, and goes), `saver` (how all ranks write one beside training),
`tree_files` (arrays, by Orbax) and `recut` (a state for other stages than those that saved it).
"""
