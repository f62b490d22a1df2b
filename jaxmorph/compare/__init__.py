"""`jaxmorph compare`: measures systems under conditions of links.

Read `comparison` first. Then: `blocks` (what is measured in one go, and its file), `systems`,
`condition_links` and `condition_plans` (what a system runs under a condition), `condition_steps`
(measured steps), `rounds`, `rank` (one process of one system), and `matrix_record` with
`provenance` (the results). `whole_runs` compares whole runs instead, with their failures.
"""
