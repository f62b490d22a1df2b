"""Answers drawn into a file."""

from collections.abc import Mapping
from pathlib import Path

from jaxmorph.schedule.answer import Answer
from jaxmorph.schedule.draw import save_timelines
from jaxmorph.schedule.problem import Problem


def save_answers(path: Path, answers: Mapping[str, Answer], problem: Problem | None) -> None:
    """Draws the steps of answers under each other, as ``draw.save_timelines`` does.

    Args:
        answers: Answers by the name of their panel.
        problem: Whose links they all ran over, for the messages in flight; None when they differ.

    Raises:
        UserError: An unknown suffix, or a file that cannot be written.
    """
    timelines = {name: answer.timeline for name, answer in answers.items()}
    if problem is None or problem.link_model == "blocking":
        save_timelines(path, timelines)  # a blocking link's delay is in its transfers
    else:
        save_timelines(path, timelines, problem.links, problem.link_model)
