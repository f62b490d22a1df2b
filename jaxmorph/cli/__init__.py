"""The command line: `app` parses and calls; the other modules are what commands do.

`plan` and `plan_options`, `validate`, `trace`, `models`, `measured_run`, `layer_cut`, `dry_run`;
`doctor` prints what `doctor_host` and `doctor_accelerators` find out. `jaxmorph train` is
`training.start`, `jaxmorph compare` is `compare.comparison`.
"""
