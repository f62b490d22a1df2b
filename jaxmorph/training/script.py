"""The processes of a user's script: how they meet, what they read, and how they end on an error."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxmorph.config import Config, check_config, read_config, read_sections
from jaxmorph.config.checkpoint_section import RestartPolicy
from jaxmorph.config.sections import Run
from jaxmorph.errors import UserError
from jaxmorph.placement import ALONE, Replica
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import Joining, join_run, own_devices, rendezvous_of_joined
from jaxmorph.runtime.launcher import threads_for
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.runtime.watchdog import watch_over
from jaxmorph.runtime.xla_settings import have_cpu_devices, have_threads, limit_collectives
from jaxmorph.stage.model import MicrobatchShapes, Tree, count_targets
from jaxmorph.training.cluster import join_cluster, num_tasks, started_by_cluster
from jaxmorph.training.own_data import ROWS, cut_tree, parts_of, shapes_of
from jaxmorph.training.script_launch import launch_arguments
from jaxmorph.transport.secret import run_secret

# At most one entry each: a process has one rendezvous, which its trainers use in turn.
_met: list[tuple[Rendezvous, Joining]] = []
_left: list[Rendezvous] = []
_ends_at_once: list[bool] = []


def join(
    *,
    start_timeout_s: float = 120.0,
    step_timeout_s: float = 60.0,
    tensor: int = 1,
    fails_over: bool = False,
) -> None:
    """Join the script's other processes, in a script that uses JAX before it makes its `Trainer`.

    JAX must know all processes before it computes anything. A trainer that is made before that
    joins them itself.

    Args:
        start_timeout_s: How long to wait for the other processes.
        step_timeout_s: How long a transfer on CPU waits for its peer. The trainer's configuration
            comes too late to set it.
        tensor: The largest `parallelism.tensor` of this process's trainers.
        fails_over: Whether their links fail over, with `failover.enabled` or `adaptation.enabled`.

    Raises:
        UserError: JAX has already computed something, or can't place this process in its job.
    """
    meet(Joining(start_timeout_s, step_timeout_s, fails_over, tensor))


def meet(joining: Joining, least_threads: int = 1) -> Rendezvous:
    """The rendezvous of this script's processes, made on the first call.

    They are the processes that `jaxmorph launch` has started, that `jax.distributed` has joined,
    or the tasks of a cluster's job; otherwise this process alone.

    Args:
        least_threads: How many threads XLA's pools need, in processes of `jaxmorph launch`.

    Raises:
        UserError: As for `join`; or an earlier trainer of this process ended with an error, or an
            earlier call joined with fewer devices.
    """
    if _left:
        raise UserError(
            "Trainer: an earlier trainer of this process ended with an error, and the other "
            "processes no longer wait for it: start the script again"
        )
    if not _met:
        _met.append((_join(joining, least_threads), joining))
    rendezvous, joined = _met[0]
    _require_devices(joining, joined, has_links=rendezvous.num_ranks > 1)
    rendezvous.limit(joining.start_timeout_s, starts=True)
    return rendezvous


def _require_devices(joining: Joining, joined: Joining, *, has_links: bool) -> None:
    """Require that this process has joined with the devices that it needs now."""
    needed, earlier = joining.num_devices, "expected what this process has joined with"
    if needed > joined.num_devices:
        has = joined.num_devices if joined.fails_over else len(own_devices())  # without spare ones
        if needed > has:
            raise UserError(
                f"parallelism.tensor: got {needed}, {earlier}, {has}: jaxmorph.join(tensor="
                f"{needed}), or a trainer that is made first, gives it more devices"
            )
    if has_links and joining.fails_over and not joined.fails_over:
        raise UserError(
            f"failover.enabled: got links that fail over, {earlier}, no spare devices: "
            "jaxmorph.join(fails_over=True), or a trainer that is made first, gives it some"
        )


def leave() -> None:
    """Close the rendezvous; the other processes then know that this one has stopped."""
    while _met:
        met, _ = _met.pop()
        met.close()
        if met.num_ranks > 1:
            _left.append(met)


def _join(joining: Joining, least_threads: int) -> Rendezvous:
    launched = launch_arguments()
    try:
        if launched is not None:
            have_threads(launched, least_threads)
            return join_run(launched, joining)
        if jax.distributed.is_initialized():
            limit_collectives(joining.step_timeout_s)
            have_cpu_devices(joining.num_devices, spare=joining.fails_over)
            secret = partial(run_secret, joining.directory)
            met = rendezvous_of_joined(joining.start_timeout_s, secret)
        elif started_by_cluster():
            otherwise = "`jaxmorph launch` starts a script's stages here"
            met = join_cluster(joining, otherwise)
        else:
            have_cpu_devices(joining.num_devices, spare=False)
            return SoleRank()
    except UserError:
        end_on_uncaught_errors()
        raise
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise UserError(
            "Trainer: JAX has already computed something, expected the trainer to be made first, "
            "or jaxmorph.join() to be called: JAX must know all processes before it computes"
        ) from error
    if met.num_ranks > 1:
        watch_over(lambda stall: met.notify(str(stall), has_stalled=True))
        end_on_uncaught_errors()
    return met


def end_on_uncaught_errors() -> None:
    """From now on an uncaught error ends this process as soon as it is printed.

    During Python's clean-up JAX would wait minutes for the other ranks. Without a clean-up, the
    cluster's launcher notices the end at once, and so do the other ranks, by their connections. The
    exit code is 2 for a `UserError`, else 1. `end_if_failed` handles `sys.exit`.
    """
    print_error = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_error(kind, error, trace)
        _end(2 if issubclass(kind, UserError) else 1)

    sys.excepthook = end
    _ends_at_once[:] = [True]


def end_if_failed(ending: SystemExit) -> None:
    """End this process at once if `sys.exit` was called with a failure, as uncaught errors do.

    If the code is a text, print it and end with exit code 1, as Python does.
    """
    code = ending.code
    if not _ends_at_once or code is None or code == 0:
        return
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    _end(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_SOME_STAGES = 4

_OF_COMMAND = ("evaluation", "restart_policy")
_OF_RUN_DIRECTORY = ("checkpoint", "metrics", "trace")

Source = Config | Mapping[str, Any] | str | Path | None


def configure(source: Source) -> tuple[Config, Rendezvous]:
    """Check a configuration and join the script's processes.

    Args:
        source: A mapping of sections, the path of a YAML file, a `Config`, or None for defaults.

    Returns:
        The configuration, with `parallelism.stages` set, and the rendezvous.

    Raises:
        UserError: A key is wrong, or asks for another number of processes than there are.
    """
    tree, name = _tree(source), _name(source)
    # Joining needs some sections; values per stage can be checked only when the stages are known.
    first = check_config(_about_joining(tree), name)
    rendezvous = meet(Joining.of(first, _named_directory(source)), threads_for(first))
    replicas, processes = first.parallelism.data, rendezvous.num_ranks
    config = check_config(_with_stages(tree, max(1, processes // replicas)), name)
    stages, needed = config.parallelism.stages, config.parallelism.num_ranks
    if needed != processes:
        times = f" times parallelism.data, {replicas}," if replicas > 1 else ","
        raise UserError(
            f"parallelism.stages: got {stages}{times} expected the number of the script's "
            f"processes, {processes} (`jaxmorph launch --stages {needed} SCRIPT` starts {needed} "
            "here)"
        )
    return config, rendezvous


def script_directory(source: Source, config: Config) -> tuple[Path | None, Config]:
    """A script's run directory, if it names one, and its configuration.

    A script writes only if it sets `run.dir`, and saves only if it has a section `checkpoint`. The
    directory that follows from a YAML file's name doesn't count.
    """
    if _named_directory(source) is None:
        return None, config
    if "checkpoint" not in _tree(source):
        never = config.checkpoint.model_copy(update={"every_steps": 0})
        config = config.model_copy(update={"checkpoint": never})
    return Path(config.run.dir), config


def _named_directory(source: Source) -> Path | None:
    """The directory that `run.dir` names."""
    tree = read_sections(source) if isinstance(source, str | Path) else _tree(source)
    run = tree.get("run")
    default = Run().dir if isinstance(source, Config) else None  # a `Config` always has a directory
    named = run.get("dir") if isinstance(run, Mapping) else None
    return Path(named) if isinstance(named, str) and named != default else None


def sections_without_effect(config: Config, directory: Path | None = None) -> list[str]:
    """The configured sections that a trainer ignores, except for `compilation_cache`."""
    names = _OF_COMMAND if directory else sorted(_OF_COMMAND + _OF_RUN_DIRECTORY)
    kept = config.restart_policy.compilation_cache
    if kept is True and not directory:  # there is no run directory to keep them in
        kept = "auto"
    default = Config(restart_policy=RestartPolicy(compilation_cache=kept))
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def _tree(source: Source) -> Mapping[str, Any]:
    """The configuration as given, without defaults."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    if isinstance(source, Config):
        return source.model_dump(exclude_unset=True)
    if isinstance(source, str | Path):
        return read_config(source)
    got = type(source).__name__
    raise UserError(f"config: got {got}, expected a mapping of sections, a path or a Config")


def _about_joining(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that joining needs: what decides deadlines and the number of threads."""
    launched = launch_arguments()
    stages = launched.num_ranks if launched else _given_stages(tree)
    names = ["timeouts", "failover", "offload", "adaptation", "batch"]
    if stages is not None:
        names.append("emulation")  # it may have values per stage
    about = {name: tree.get(name) for name in names}
    given = tree.get("parallelism")
    shape = {
        name: given[name]
        for name in ("data", "tensor")
        if isinstance(given, Mapping) and name in given
    }
    replicas = shape.get("data", 1)
    if launched and isinstance(replicas, int) and replicas > 0:
        stages = max(1, launched.num_ranks // replicas)
    about["parallelism"] = {"stages": stages or _SOME_STAGES, **shape}
    return about


def _given_stages(tree: Mapping[str, Any]) -> int | None:
    given = tree.get("parallelism")
    stages = given.get("stages") if isinstance(given, Mapping) else None
    return stages if isinstance(stages, int) and stages > 0 else num_tasks()


def _name(source: Source) -> str:
    """The configuration's name in errors."""
    return str(source) if isinstance(source, str | Path) else "config"


def _with_stages(tree: Mapping[str, Any], num_stages: int) -> dict[str, Any]:
    given = tree.get("parallelism") or {}
    if not isinstance(given, Mapping):
        return dict(tree)  # `check_config` refuses it
    return {**tree, "parallelism": {"stages": num_stages, **given}}


def cut_batch(
    batch: Sequence[Any],
    config: Config,
    rank: int,
    vocab_size: int | None = None,
    shapes: MicrobatchShapes | None = None,
    *,
    reads_extras: bool = False,
    replica: Replica = ALONE,
) -> StepInputs:
    """Cut a batch into microbatches; returns what a rank reads of it.

    Args:
        rank: The rank's number in its replica.
        batch: Tokens and targets, integers [batch, sequence] each, or already cut: [microbatches,
            microbatch size, sequence]; or trees of `shapes`: inputs, targets, and maybe extras.
            Where targets are one array of integers, those below 0 don't count.
        vocab_size: The model's. Ids beyond it are refused: the embedding would take them for other
            ids. None: not known.
        shapes: The data of one microbatch; None: the configured text's.
        reads_extras: Whether the rank's stage takes extras.
    """
    inputs, targets, extras = trees = parts_of(batch)
    sizes = config.batch
    is_text, name, rows = shapes is None, "inputs", ROWS
    if shapes is None:
        shapes = MicrobatchShapes.of_text(sizes.microbatch_size, config.data.sequence_length)
        name, rows = "tokens", f"{ROWS}, and data.sequence_length"
    length_index = _length_index_of(trees, shapes)
    shapes = shapes.lengths[length_index]
    cut = partial(cut_tree, "batch", microbatches=sizes.microbatches, rows=rows)
    inputs = cut(name, inputs, shapes.inputs)
    targets = cut("targets", targets, shapes.targets)
    extras = cut("extras", extras, shapes.extras)
    if vocab_size is not None and is_text:
        _check_ids("tokens", int(inputs.min()), int(inputs.max()), vocab_size)
        _check_ids("targets", 0, int(targets.max()), vocab_size)
    placement = config.placement
    read = StepInputs(
        inputs=inputs if rank == placement.first.rank else None,
        targets=targets if rank == placement.last.rank else None,
        loss_weight=1.0 / max(1, count_targets(targets)),
        extras=extras if reads_extras else {},
        length_index=length_index,
    )
    return read.of_replica(replica)


def _length_index_of(trees: tuple[Tree, Tree, Mapping[str, Tree]], shapes: MicrobatchShapes) -> int:
    """The index of the length whose arrays end in the same axes as a batch's.

    It is 0, the longest, if none does: `cut_tree` then says what differs.
    """

    def ends_alike(array: Any, shape: jax.ShapeDtypeStruct) -> bool:
        axes = shape.shape[1:]
        return np.shape(array)[np.ndim(array) - len(axes) :] == axes

    for number, each in enumerate(shapes.lengths):
        of_length = each.inputs, each.targets, each.extras
        leaves, expected = jax.tree.leaves(trees), jax.tree.leaves(of_length)
        if len(leaves) == len(expected) and all(map(ends_alike, leaves, expected)):
            return number
    return 0


def example_shapes(
    example: Sequence[Any] | None, config: Config, shorter: Sequence[Sequence[Any]] = ()
) -> MicrobatchShapes | None:
    """The shapes of one microbatch of batches like the examples; None without examples.

    Raises:
        UserError: An example is not a batch, or not of the configured size.
    """
    if example is None:
        if shorter:
            raise UserError("shorter: got examples, expected one of the longest batch as `example`")
        return None
    sizes = config.batch
    num_examples = sizes.microbatches * sizes.microbatch_size
    longest, *others = [
        shapes_of(name, parts_of(each), num_examples, sizes.microbatch_size)
        for name, each in [("example", example), *(("shorter", each) for each in shorter)]
    ]
    return replace(longest, shorter=tuple(others))


def _check_ids(name: str, smallest: int, largest: int, vocab_size: int) -> None:
    if smallest < 0 or largest >= vocab_size:
        raise UserError(
            f"batch: got {name} from {smallest:,} to {largest:,}, expected ids from 0 to below "
            f"{vocab_size:,}, the model's vocabulary"
        )
