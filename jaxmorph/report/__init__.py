"""What a run writes and shows: its directory, the terminal, figures and HTML pages.

Read `run_directory` and `terminal` first. `history` keeps a run's steps, `text` has the wording,
`answers` prints plans, `run_matrix`, `bars`, `matrix_table` and `matrix_figure` are a comparison's
results, `draw` draws timelines, and `page` makes HTML pages.
"""
