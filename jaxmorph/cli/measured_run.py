"""``jaxmorph plan --profile``: a run's configuration and measurements as a planning problem."""

import json
from pathlib import Path
from typing import Any

from jaxmorph.config import Config, load_config
from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.placement import placement_of
from jaxmorph.plain_json import without_sum
from jaxmorph.report.run_directory import PROFILE
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.problem import default_chunks


def read_run(path: Path) -> tuple[Config, Profile]:
    """A run's configuration and measured costs; the run may still be running.

    Raises:
        UserError: No such directory, or one without a readable configuration or profile.
    """
    if not (path / "config.yaml").is_file():
        raise UserError(f"profile: got {path}, expected a run directory, with a config.yaml")
    config = load_config(path / "config.yaml")
    profile = _read_profile(path / PROFILE)
    if profile.costs.num_stages != config.parallelism.stages:
        raise UserError(
            f"profile: {path / PROFILE}: got costs of {profile.costs.num_stages} stages, expected "
            f"parallelism.stages, {config.parallelism.stages}"
        )
    return config, profile


def run_fields(
    config: Config,
    profile: Profile,
    schedule: str | None = None,
    num_chunks: int | None = None,
) -> dict[str, Any]:
    """A run as the fields of a problem (``parse_problem``).

    Args:
        schedule: The schedule to plan; None: the run's.
        num_chunks: Virtual stages to plan for; None: the run's, or the usual number for another
            schedule.
    """
    costs, own = profile.costs, config.schedule
    if num_chunks is None:
        other = schedule is not None and schedule != own.name
        num_chunks = default_chunks(schedule or "") if other else config.parallelism.chunks
    stages = config.parallelism.stages
    # A link that the run has not measured has no delay.
    placement = placement_of(schedule or own.name, stages, num_chunks)
    links = [profile.links.get(link, LinkDelay()) for link in placement.links]
    return _stash_fields(config, profile) | {
        "num_stages": stages,
        "num_microbatches": config.microbatches,
        "schedule": schedule or own.name,
        "chunks": num_chunks,
        "max_live": own.max_live_per_stage(stages),
        "live_until": own.live_until,
        "weight_group": own.weight_group,
        "forward_ms": list(costs.forward_ms),
        "backward_input_ms": list(costs.backward_input_ms),
        "backward_weight_ms": list(costs.backward_weight_ms),
        "link_forward_ms": [link.forward_latency_ms for link in links],
        "link_backward_ms": [link.backward_latency_ms for link in links],
    }


def _stash_fields(config: Config, profile: Profile) -> dict[str, Any]:
    sizes, stages = profile.stash_bytes, config.parallelism.stages
    if sizes is None:
        return {}
    return {
        "stash_bytes_after_forward": list(sizes.after_forward),
        "stash_bytes_after_backward": list(sizes.after_backward_input),
        "max_stash_bytes": config.schedule.max_stash_bytes_per_stage(stages),
    }


def _read_profile(path: Path) -> Profile:
    try:
        text = path.read_text(encoding="utf-8")
        return Profile.from_json(without_sum(json.loads(text), path.name))
    except FileNotFoundError:
        raise UserError(
            f"profile: got {path.parent} without {PROFILE}, expected a run that has recorded a "
            "step (see trace.every_steps), by this version of jaxmorph"
        ) from None
    except OSError as error:
        raise UserError(f"profile: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected measured costs and links"
        raise UserError(f"profile: {path}: got {error!r}, {expected}") from error
