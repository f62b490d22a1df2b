"""`jaxmorph compare`: systems, conditions of links, and rounds of steps.

`comparison` is the whole of it. Read on in this order: `systems`, `condition_links` and
`condition_plans` (what each of them runs under which condition), `condition_steps` (steps,
measured), `detecting_rounds` and `rounds`, `rank` (one process of one system) and `matrix_record`
(what is made of what they tell). `whole_runs` is the other kind of comparison: of whole runs, with
the failures that there are.
"""
