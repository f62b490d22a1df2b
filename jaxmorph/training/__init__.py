"""A training run, from the command that starts it to its last step.

- The process that the user started: `start`, `job` (this process is a rank of a cluster's job),
  `supervisor` (starts ranks again), `ledger` (what failures cost), `record` (writes what rank 0
  reports), `start_lines` (says what starting ranks do), `resume`, and `verification` (of a
  checkpoint, by all ranks).
- One rank: `train`, `run` (a run's parts), `loop` and `callbacks`; `run_parts`, `open_stage`,
  `first_plan`, `evaluation`, `run_checkpoints`, `step_recorder`.
- Agreeing on a plan: `plan_in_force`, `layer_choice`, `device_memory`.
- Adapting: `adaptation` (every rank), `control_loop` and `starting_point` (rank 0),
  `planning_client` and `planning_process` (plans are made beside training), `replay`.
- A user's own loop: `trainer`, `script` (what a script reads, how its processes meet and end),
  `script_launch` and `script_rank` (how `jaxmorph launch` starts them).
"""
