"""What a training run is made of, from its start to its record.

`train.py` is one rank's run, top to bottom. In the order in which it needs them: `resume` (what a
run goes on from, and whether it can), `model_factory` and `run_parts` (model and data),
`open_stage` (a rank's stage), `run_checkpoints` and `carried_over` (what an earlier life of the run
left), `gradients` (the end of a step), `evaluation`, `save_times` (when to save, and to end),
`bookkeeping` (what rank 0 tells of the steps) and `record` (who writes it down). `cluster` knows
the jobs that start ranks, `device_needs` what stages would keep, and `saved_model` continues a
text.
"""
