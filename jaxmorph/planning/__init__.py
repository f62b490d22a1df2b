"""How the ranks of a run agree on what to run: measured, planned on rank 0, lowered by all.

In order: `layer_choice` (how layers are cut), `device_budget` (what stashes may take of devices),
`first_plan` (a few steps for their timings, and what is planned with them), `plan_in_force` (rank 0
plans, all adopt), `offload_planning` (holding more than fits), `step_programs` (a schedule's
instructions).
"""
