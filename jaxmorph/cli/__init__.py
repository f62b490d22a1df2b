"""The command line: `app` parses arguments, the other modules are the commands.

`plan` has helpers in `plan_options`, `measured_run` (`--profile`) and `layer_cut`
(`--layers-cost`); `doctor` has its checks in `doctor_host` and `doctor_accelerators`; `models` is
`export`, `sample` and `model`. `jaxmorph train` is `training.start`, `jaxmorph compare` is
`compare.comparison`.
"""
