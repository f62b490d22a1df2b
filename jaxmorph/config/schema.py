"""The whole configuration of a run as one typed tree, and the rules between its sections."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from jaxmorph.config.checkpoint_section import (
    DEFAULT_MINUTES,
    Checkpoint,
    RestartPolicy,
    restarting_problems,
)
from jaxmorph.config.compare_section import Compare, compare_problems
from jaxmorph.config.link_problems import (
    emulated_host_problems,
    emulated_link_problems,
    link_trace_problems,
    possible_links,
    unknown_links,
)
from jaxmorph.config.link_sections import Emulation, Failover, Routes, Transport, of_replica
from jaxmorph.config.problems import CROSS_FIELD, Problem, mismatch
from jaxmorph.config.sections import (
    PLANNED_SCHEDULES,
    REPLACEABLE_SCHEDULES,
    Adaptation,
    Batch,
    Data,
    Evaluation,
    Expected,
    Limits,
    Metrics,
    Model,
    Offload,
    Optimizer,
    Parallelism,
    Precision,
    Run,
    Schedule,
    Timeouts,
    Trace,
)
from jaxmorph.placement import Layout, Placement, placement_of

IN_A_V: Literal["zb-v"] = "zb-v"
"""What `schedule.placement: auto` chooses, if not `adaptive`."""

_STEP_SHARES = 4
"""`timeouts.step_s` divided by this is the time for a failover, while other ranks wait."""


class Config(BaseModel):
    """The whole configuration of a run, checked as far as possible without the model and the data.

    Rules that depend on the model, such as no more stages than layers, are checked once it is
    known, and `located_error` gives their errors the same form.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    batch: Batch = Field(default_factory=Batch)
    schedule: Schedule = Field(default_factory=Schedule)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    precision: Precision = Field(default_factory=Precision)
    stash: Literal["full", "recompute"] = "full"
    """`full` keeps what the backward needs. `recompute` keeps only each layer's input, and B runs
    the layer again: this takes less memory from F to B, and about one more forward of time."""

    offload: Offload = Field(default_factory=Offload)
    limits: Limits = Field(default_factory=Limits)
    routes: Routes = Field(default_factory=Routes)
    adaptation: Adaptation = Field(default_factory=Adaptation)
    failover: Failover = Field(default_factory=Failover)
    transport: Transport = Field(default_factory=Transport)
    emulation: Emulation = Field(default_factory=Emulation)
    trace: Trace = Field(default_factory=Trace)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    metrics: Metrics = Field(default_factory=Metrics)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    restart_policy: RestartPolicy = Field(default_factory=RestartPolicy)
    timeouts: Timeouts = Field(default_factory=Timeouts)
    compare: Annotated[Compare | None, Expected("null, or a section with conditions")] = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.batch.microbatches * self.batch.microbatch_size * self.data.sequence_length

    @property
    def microbatches(self) -> int:
        """Microbatches of a step in one replica of the pipeline."""
        return self.batch.microbatches // self.parallelism.data

    @property
    def num_optimizer_shares(self) -> int:
        """Among how many replicas the optimizer's state is divided."""
        return self.parallelism.data if self.optimizer.shard == "data" else 1

    def of_replica(self, index: int) -> "Config":
        """The configuration as one replica sees it, without other replicas' links."""
        if self.parallelism.data == 1:
            return self
        link_ms = of_replica(self.schedule.link_ms or {}, index)
        own = {
            "routes": self.routes.of_replica(index),
            "schedule": self.schedule.model_copy(update={"link_ms": link_ms or None}),
            "emulation": self.emulation.of_replica(index),
        }
        return self.model_copy(update=own)

    @property
    def layout(self) -> Layout:
        """Which rank is which stage of which replica when the run starts."""
        cut, per_host = self.parallelism, self.emulation.ranks_per_host
        return Layout.first(cut.stages, cut.data, per_host)

    @property
    def placement(self) -> Placement:
        """Which stage runs which of the parts that the layers are cut into."""
        cut = self.parallelism
        return placement_of(self.schedule.name, cut.stages, cut.chunks)

    def placed(self, *, in_a_v: bool) -> "Config":
        """The configuration with `schedule.placement: auto` replaced by what was chosen."""
        name, chunks = (IN_A_V, 2) if in_a_v else (self.schedule.name, self.parallelism.chunks)
        chosen = {"name": name, "placement": "default"}
        return self.model_copy(
            update={
                "schedule": self.schedule.model_copy(update=chosen),
                "parallelism": self.parallelism.model_copy(update={"chunks": chunks}),
            }
        )

    @property
    def adapts(self) -> bool:
        """Whether the plan may change during the run."""
        wanted, is_planned = self.adaptation.enabled, self.schedule.name in PLANNED_SCHEDULES
        return self.parallelism.stages > 1 and (is_planned if wanted == "auto" else wanted)

    @property
    def fails_over(self) -> bool:
        """Whether a direct link whose path fails continues delegated."""
        return self.parallelism.stages > 1 and self._wants_failover

    @property
    def hands_over(self) -> bool:
        """Whether a direct link that turns slow in mid-step continues delegated."""
        return self.adapts and self.fails_over

    @property
    def reduction_fails_over(self) -> bool:
        """Whether replicas sum delegated once their direct sum has failed."""
        return self.parallelism.data > 1 and self._wants_failover

    @property
    def _wants_failover(self) -> bool:
        wanted, is_asked = self.failover.enabled, self.adaptation.enabled is True
        return self.adapts and is_asked if wanted == "auto" else bool(wanted)

    @property
    def remaps(self) -> bool:
        """Whether ranks may change places during the run."""
        cut, wanted = self.parallelism, self.adaptation.remaps
        has_places = min(cut.data, cut.stages) > 1
        return has_places and (self.adapts if wanted == "auto" else wanted != "never")

    @property
    def direct_timeout_s(self) -> float:
        """The deadline of a direct transfer, in seconds."""
        fails_over = self.fails_over or self.reduction_fails_over
        return self.failover_timeout_s if fails_over else self.timeouts.step_s

    @property
    def failover_timeout_s(self) -> float:
        """The deadline of a direct transfer with failover, in seconds."""
        step_s, direct_s = self.timeouts.step_s, self.timeouts.direct_s
        if direct_s is not None:
            return direct_s
        return min(step_s, max(step_s / _STEP_SHARES, self.longest_backlog_s))

    @property
    def longest_backlog_s(self) -> float:
        """The longest time of one step's ops on a stage, in seconds; 0 where ops are not emulated.

        No plan makes a transfer wait longer than that behind ops on its stage's queue.
        """
        accelerator = self.emulation.accelerator
        times_ms = () if accelerator is None else accelerator.model_dump().values()
        slowest_ms = sum(max(each) if isinstance(each, tuple) else each for each in times_ms)
        return self.microbatches * slowest_ms / 1e3

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        problems = tuple(_disagreements(self))
        if problems:
            context = {"problems": problems, "first": f"{problems[0].key}: {problems[0].message}"}
            raise PydanticCustomError(CROSS_FIELD, "{first}", context)
        return self


def _disagreements(config: Config) -> Iterator[Problem]:
    """Yields the contradictions between sections."""
    yield from _shape_problems(config)
    yield from _placement_problems(config)
    for key, value in _per_stage_values(config):
        if isinstance(value, tuple) and len(value) != config.parallelism.stages:
            expected = f"a list of {config.parallelism.stages}, one for each of parallelism.stages"
            yield mismatch(key, list(value), expected)
    if config.schedule.max_live is not None and config.schedule.max_stash_bytes is not None:
        expected = "null, as schedule.max_live is given: one of the two"
        yield mismatch("schedule.max_stash_bytes", config.schedule.max_stash_bytes, expected)
    minutes = config.checkpoint.every_minutes
    if minutes not in (None, DEFAULT_MINUTES) and not config.checkpoint.saves:
        expected = "null, as checkpoint.every_steps is 0: nothing is saved"
        yield mismatch("checkpoint.every_minutes", minutes, expected)
    if config.optimizer.warmup_steps > config.run.steps:
        expected = f"at most run.steps, which is {config.run.steps}"
        yield mismatch("optimizer.warmup_steps", config.optimizer.warmup_steps, expected)
    yield from _data_problems(config)
    if config.adaptation.enabled is True and config.schedule.name not in REPLACEABLE_SCHEDULES:
        others = ", ".join(REPLACEABLE_SCHEDULES)
        names = f"a schedule.name that can be replaced while a run lasts: {others}"
        expected = f"auto, false, or {names}"
        yield mismatch("adaptation.enabled", True, expected)
    sidecars = config.transport.sidecars
    if config.limits.host_gib is not None and sidecars not in ("auto", 1, 2):
        expected = "auto, 1 or 2, as limits.host_gib is given: each needs a slot of every channel"
        yield mismatch("transport.sidecars", sidecars, expected)
    yield from _waiting_problems(config)
    yield from _link_problems(config)
    if config.compare is not None:
        num_hosts = len(config.layout.hosts)
        yield from compare_problems(config.compare, config.parallelism, num_hosts)
        yield from restarting_problems(config.compare, config.checkpoint, config.restart_policy)
        if "zb-opportunistic" in config.compare.systems:
            yield from _opportunistic_problems(config.emulation)


def _opportunistic_problems(emulation: Emulation) -> Iterator[Problem]:
    if emulation.accelerator is None:
        expected = "op times, as messages of zb-opportunistic take compute from emulated ops"
        yield mismatch("emulation.accelerator", None, expected)
    if emulation.message_bytes is None:
        expected = "a number of bytes, which zb-opportunistic needs for its messages"
        yield mismatch("emulation.message_bytes", None, expected)


def _waiting_problems(config: Config) -> Iterator[Problem]:
    if (config.timeouts.direct_s or 0.0) > config.timeouts.step_s:
        expected = f"null, or at most timeouts.step_s, which is {config.timeouts.step_s:g}"
        yield mismatch("timeouts.direct_s", config.timeouts.direct_s, expected)
    elif config.fails_over and config.direct_timeout_s < config.longest_backlog_s:
        key = "step_s" if config.timeouts.direct_s is None else "direct_s"
        least = f"at least {config.longest_backlog_s:g}"
        expected = f"{least}, as a transfer may wait behind all ops of a step on its stage's queue"
        yield mismatch(f"timeouts.{key}", getattr(config.timeouts, key), expected)
    policy = config.restart_policy
    if policy.longest_backoff_s < policy.backoff_s:
        expected = f"at least restart_policy.backoff_s, which is {policy.backoff_s:g}"
        yield mismatch("restart_policy.longest_backoff_s", policy.longest_backoff_s, expected)


def _link_problems(config: Config) -> Iterator[Problem]:
    stages = config.parallelism.stages
    replicas = config.parallelism.data
    own = range(replicas if replicas > 1 else 0)
    of_replicas = [link.in_replica(index) for index in own for link in possible_links(stages)]
    others = ("default", "reduction", *of_replicas)
    yield from unknown_links("routes", config.routes.by_link, stages, others)
    yield from unknown_links("schedule.link_ms", config.schedule.link_ms or (), stages, of_replicas)
    yield from emulated_link_problems("emulation.links", config.emulation.links, stages, replicas)
    num_hosts = len(config.layout.hosts)
    yield from emulated_host_problems("emulation.hosts", config.emulation.hosts, num_hosts)
    yield from link_trace_problems("emulation.trace", config.emulation.trace)
    if config.emulation.wire_mbps is not None and config.emulation.message_bytes is None:
        given = "preset" if config.emulation.preset else "wire_mbps"
        expected = f"a number of bytes, as emulation.{given} is given"
        yield mismatch("emulation.message_bytes", None, expected)


def _data_problems(config: Config) -> Iterator[Problem]:
    if config.data.factory is not None:
        if config.data.is_packed:
            expected = "none, as data.factory is given: only text is packed"
            yield mismatch("data.packing", config.data.packing, expected)
    elif config.evaluation.every_steps is not None and not config.data.held_out_fraction:
        expected = "a number above 0, as evaluation.every_steps is given"
        yield mismatch("data.held_out_fraction", config.data.held_out_fraction, expected)


def _shape_problems(config: Config) -> Iterator[Problem]:
    cut, schedule = config.parallelism, config.schedule.name
    if config.batch.microbatches % cut.data:
        expected = f"a multiple of parallelism.data, which is {cut.data}"
        yield mismatch("batch.microbatches", config.batch.microbatches, expected)
    if config.microbatches % (group := config.schedule.weight_group):
        expected = f"a divisor of a replica's {config.microbatches} microbatches"
        yield mismatch("schedule.weight_group", group, expected)
    own = config.placement.num_chunks
    if cut.chunks != own:
        other = "" if own > 1 else ", or schedule.name interleaved"
        chunks = "one chunk" if own == 1 else f"{own} chunks"
        expected = f"{own}{other}: {schedule} runs {chunks} on each stage"
        yield mismatch("parallelism.chunks", cut.chunks, expected)
    if isinstance(cut.layers, tuple) and len(cut.layers) != cut.virtual_stages:
        chunks = f" times the {cut.chunks} of parallelism.chunks" if cut.chunks > 1 else ""
        expected = f"a list of {cut.virtual_stages}, one for each of parallelism.stages{chunks}"
        yield mismatch("parallelism.layers", list(cut.layers), expected)


def _placement_problems(config: Config) -> Iterator[Problem]:
    if config.schedule.placement != "auto":
        return
    name = config.schedule.name
    reasons = {
        f"schedule.name is {name}: adaptive alone leaves it open": name != "adaptive",
        "adaptation.enabled is true: zb-v can't adapt": config.adaptation.enabled is True,
        "parallelism.layers is a list": isinstance(config.parallelism.layers, tuple),
        "schedule.max_stash_bytes is given: no sizes are known before stages are compiled": (
            config.schedule.max_stash_bytes is not None
        ),
        "offload.enabled is true: copies are measured later": config.offload.enabled,
    }
    for reason, holds in reasons.items():
        if holds:
            yield mismatch("schedule.placement", "auto", f"default, as {reason}")


def _per_stage_values(config: Config) -> Iterator[tuple[str, Any]]:
    yield "schedule.max_live", config.schedule.max_live
    yield "schedule.max_stash_bytes", config.schedule.max_stash_bytes
    accelerator = config.emulation.accelerator
    for name in type(accelerator).model_fields if accelerator else ():
        yield f"emulation.accelerator.{name}", getattr(accelerator, name)
