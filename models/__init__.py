"""Models, which know nothing of pipelines, stages or schedules."""
