"""The sections about links: routes, emulation, failover and the data plane."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, ip_address
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from jaxmorph.config.sections import (
    STRICT,
    Bytes,
    Count,
    CountOrZero,
    Expected,
    NotNegative,
    PerStageMs,
    Positive,
    Section,
)
from jaxmorph.records import AffectedRoute, Link, Regime, Route

_Value = TypeVar("_Value")


def of_replica(by_name: Mapping[str, _Value], index: int) -> dict[str, _Value]:
    """The values of one replica's links, by their names within it; `r1:2-3` overrides `2-3`."""
    split = [(name.rpartition(":"), value) for name, value in by_name.items()]
    of_all = {link: value for (replica, _, link), value in split if not replica}
    own = {link: value for (replica, _, link), value in split if replica == f"r{index}"}
    return of_all | own


class Routes(Section):
    """How transfers travel: a link's route by its name (`2-3: delegated`), others by `default`.

    With replicas, `r1:2-3` is only replica 1's link.
    """

    model_config = ConfigDict(extra="allow")
    expected_of_other_keys = f"one of {', '.join(get_args(Route))}"
    __pydantic_extra__: dict[str, Route] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    default: Route = "direct"
    """The route of links that are not named. `direct` is the fastest for a single message on a
    healthy link; `delegated` keeps a slow link from blocking the accelerator's queue."""

    reduction: Route = "direct"
    """With `parallelism.data` above 1: the route by which replicas sum their gradients. Where
    links fail over (`failover.enabled`), a sum whose direct route fails continues delegated."""

    @property
    def by_link(self) -> dict[str, Route]:
        """The routes of the named links."""
        return dict(self.__pydantic_extra__)

    def of_replica(self, index: int) -> "Routes":
        """The routes of one replica's links, by their names within it."""
        return self.with_links(of_replica(self.by_link, index))

    def with_links(self, named: Mapping[str, Route]) -> "Routes":
        """The same defaults with other named links."""
        return Routes(default=self.default, reduction=self.reduction, **named)

    def of_links(self, links: Iterable[Link]) -> dict[Link, Route]:
        """The route of each of the links."""
        return {link: self.by_link.get(str(link), self.default) for link in links}


class Accelerator(BaseModel):
    """Emulated op durations in milliseconds: one number, or a list with one per stage."""

    model_config = STRICT

    forward_ms: PerStageMs
    """F."""

    backward_input_ms: PerStageMs
    """B."""

    backward_weight_ms: PerStageMs
    """W; a BW takes as long as B and W together."""


class EmulatedPath(Section):
    """An emulated condition of the path between two ends.

    If a path has several entries, latencies and jitters add up, and the smallest bandwidth counts.
    """

    between: Annotated[tuple[CountOrZero, CountOrZero], Field(strict=False)]

    latency_ms: NotNegative = 0.0
    """Added to each message, in milliseconds; latencies of several messages overlap."""

    bandwidth_mbps: Annotated[
        float | None, Field(gt=0), Expected("megabits per second above 0, or null")
    ] = None
    """Megabits per second, shared by all messages of a direction; null: no limit."""

    jitter_ms: NotNegative = 0.0
    """Standard deviation of the latency, in milliseconds."""

    cut: Annotated[bool, Expected("true or false")] = False
    """Deliver nothing. With `route: direct` the accelerator's network card is dead, and delegated
    messages still arrive."""

    from_step: Annotated[CountOrZero | None, Expected("null, or a whole number of at least 0")] = (
        None
    )
    """The first step of the condition; null: the run's first."""

    to_step: Annotated[CountOrZero | None, Expected("null, or a whole number of at least 0")] = None
    """The first step after the condition; null: it lasts until the end."""

    route: AffectedRoute = "both"
    """The route whose messages the condition applies to."""


class EmulatedLink(EmulatedPath):
    """The emulated condition of one link.

    If a link has several entries, latencies and jitters add up, and the smallest bandwidth counts.
    """

    between: Annotated[
        tuple[CountOrZero, CountOrZero],
        Field(strict=False),
        Expected("two neighbouring stages, the lower one first, such as [2, 3]"),
    ]
    """The link's two stages."""

    source: Annotated[
        CountOrZero | None, Expected("null, or the sending one of the link's two stages")
    ] = None
    """The sending stage, for a condition of one direction; null: both directions."""

    replica: Annotated[CountOrZero | None, Expected("null, or the number of a replica")] = None
    """The replica whose link it is, with `parallelism.data` above 1; null: every replica's."""


class EmulatedHosts(EmulatedPath):
    """The emulated condition of everything two hosts send each other.

    Messages between stages take its latency and bandwidth. A direct sum of gradients takes the
    bandwidth for all its bytes, and the latency, without jitter, in each of its rounds: 2 (D - 1)
    for each bucket of gradients, with D replicas.
    """

    between: Annotated[
        tuple[CountOrZero, CountOrZero],
        Field(strict=False),
        Expected("two hosts, the lower one first, such as [1, 5]"),
    ]
    """The two hosts; `emulation.ranks_per_host` says which ranks they have."""


class LinkTrace(Section):
    """How links change while the run lasts: a CSV file, or a random regime.

    Text in place of the section is the path of a file. See docs/how-to/emulate.md.
    """

    file: Annotated[
        str | None, Field(min_length=1), Expected("null, or the path of a CSV file")
    ] = None
    """A CSV file whose rows apply from a time, in seconds since the first step, or from a step."""

    regime: Annotated[Regime | None, Expected("null, or one of A, B, C, bursty")] = None
    """Random delays of all links between neighbours; A, B and C are those of the paper's Figure 18.
    Instead of `file`."""

    seed: CountOrZero = 0
    """The seed of the regime; each replica draws its own delays."""

    duration_s: Annotated[
        float, Field(gt=0, le=3600), Expected("a number above 0, at most 3600")
    ] = 120.0
    """Seconds that the regime is drawn for; afterwards its last delays stay."""

    time_scale: Positive = 1.0
    """Multiplies the times, or steps."""

    latency_scale: Positive = 1.0
    """Multiplies latencies and jitters."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_path(cls, section: Any) -> Any:
        return {"file": section} if isinstance(section, str) and section else section


TRACE_EXPECTED = Expected("null, the path of a CSV file, or keys such as {regime: A, seed: 1}")
EmulatedLinks = Annotated[
    tuple[EmulatedLink, ...],
    Field(strict=False),
    Expected("a list of links, such as [{between: [2, 3], latency_ms: 30}]"),
]


EmulatedHostPairs = Annotated[
    tuple[EmulatedHosts, ...],
    Field(strict=False),
    Expected("a list of pairs of hosts, such as [{between: [1, 5], latency_ms: 30}]"),
]


HARDWARE: Mapping[str, Mapping[str, float]] = {
    "h800": {
        # PCIe 5.0 x16, each way: 16 lanes of 32 GT/s, 128 bits in 130, by the PCI Express Base
        # Specification 5.0. NVIDIA's data sheet of the H100 has 128 GB/s for both ways together.
        "host_copy_gbps": 63.0,
        # 400 Gb/s InfiniBand (NDR): PipeMorph (NSDI 2026), section 7.1, "Cluster setup".
        "wire_mbps": 400_000.0,
    },
}
"""The values of presets: published ones of the hardware, none measured or fitted."""


class Emulation(Section):
    """Op durations and links to emulate; planning never reads them, only measurements."""

    preset: Annotated[Literal["h800"] | None, Expected("null or h800")] = None
    """Sets `host_copy_gbps` and `wire_mbps`, where they are not given, to published values of
    hardware. `h800`: an H800 on PCIe 5.0 x16 (63 GB/s), with a 400 Gb/s card."""

    accelerator: Annotated[
        Accelerator | None,
        Expected("null, or forward_ms, backward_input_ms and backward_weight_ms"),
    ] = None
    """Make ops last as long as on this accelerator. Without it, stages on a few shared cores
    compute in one another's bubbles, and all schedules look alike. Null: as fast as they run."""

    links: EmulatedLinks = ()
    """Slow, narrow, jittery or cut links."""

    hosts: EmulatedHostPairs = ()
    """Slow, narrow, jittery or cut connections of two hosts, on top of `links`."""

    ranks_per_host: Count = 1
    """Ranks of a host, for `hosts`: with R, ranks 0 to R - 1 are on host 0, and so on."""

    gradient_bytes: Annotated[Bytes | None, Expected("null, or a whole number of at least 1")] = (
        None
    )
    """How many bytes a stage's gradients count as when replicas sum them; null: their own size."""

    bucket_bytes: Bytes = 64 * 2**20
    """Bytes of gradients that replicas sum at once, for the rounds of `hosts`; Megatron-LM's
    buckets are 40 million numbers or more. The default is that of jaxmorph's own sums."""

    trace: Annotated[LinkTrace | None, TRACE_EXPECTED] = None
    """Links that change over time, on top of `links`."""

    message_bytes: Annotated[Bytes | None, Expected("null, or a whole number of at least 1")] = None
    """How many bytes each message between stages counts as, for `wire_mbps`, `host_copy_gbps` and
    the bandwidth of links. Null: its own size, which is small, and its copies take no time."""

    host_copy_gbps: Positive = 25.0
    """Gigabytes (8 gigabits) per second of a copy between an emulated accelerator and host memory,
    in each direction; 25 is about what PCIe 4.0 x16 reaches. It applies to stashes and,
    with `message_bytes`, to delegated messages."""

    wire_mbps: Annotated[
        float | None, Field(gt=0), Expected("megabits per second above 0, or null")
    ] = None
    """Megabits per second of each direction of each link, on either route; 400000 is a card of 400
    Gb/s. It needs `message_bytes`. Null: no limit."""

    def of_replica(self, index: int) -> "Emulation":
        """What is emulated in one replica."""
        own = (link for link in self.links if link.replica in (None, index))
        links = tuple(link.model_copy(update={"replica": None}) for link in own)
        return self.model_copy(update={"links": links})

    @model_validator(mode="before")
    @classmethod
    def _preset_is_for_what_is_not_given(cls, section: Any) -> Any:
        preset = section.get("preset") if isinstance(section, Mapping) else None
        return {**HARDWARE.get(str(preset), {}), **section} if preset else section


class Failover(Section):
    """Whether a direct link whose path fails continues delegated, in the same step."""

    enabled: Annotated[Literal["auto"] | bool, Expected("auto, true or false")] = "auto"
    """`auto`: if `adaptation.enabled` is true. Failover needs a data plane for every link, which
    adaptation has anyway, and a message between both ends before each direct transfer; therefore it
    is not on by default."""


_MAX_LANES = 64
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 4096, 16 * 2**20  # the largest that a frame may announce


def _checked_address(text: str) -> str:
    found = IPv4Network(text, strict=False) if "/" in text else ip_address(text)
    if found.is_unspecified or found.is_multicast:  # peers can't call it
        raise ValueError(text)
    return str(found)


class Transport(Section):
    """How delegated transfers travel from host to host."""

    addresses: Annotated[
        Literal["auto"]
        | Annotated[
            tuple[Annotated[str, AfterValidator(_checked_address)], ...],
            Field(strict=False, min_length=1),
        ],
        Expected(
            "auto, or a list of IP addresses, one for each of this host's network cards, or of "
            "IPv4 subnets that they are in"
        ),
    ] = "auto"
    """This host's addresses, one per network card, or subnets such as 10.1.0.0/16, which stand for
    the host's own address in each, so that one file fits all hosts. `auto` is 127.0.0.1 if all
    ranks share one loopback, else the addresses of the cards that are up, without link-local ones
    where there are others."""

    lanes: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=_MAX_LANES)],
        Expected(f"auto, or a whole number from 1 to {_MAX_LANES}"),
    ] = "auto"
    """Connections to each peer. `auto` is one per card, and over TCP at least two; set more where
    one connection is slower than the card."""

    sidecars: Annotated[Literal["auto", 1, 2, 4, 8], Expected("auto, 1, 2, 4 or 8")] = "auto"
    """Sidecars of each rank; a channel's messages go through them in turn. `auto` measures the
    processor time that a step's messages take in one sidecar, and gives each rank as many sidecars
    as that needs, within the cores that ranks leave free; with RDMA or emulated links it is 1."""

    chunk_bytes: Annotated[
        int,
        Field(ge=_MIN_CHUNK_BYTES, le=_MAX_CHUNK_BYTES),
        Expected(f"a whole number from {_MIN_CHUNK_BYTES} to {_MAX_CHUNK_BYTES}"),
    ] = 512 * 1024
    """Bytes of a chunk, which is acknowledged, and sent again, as a whole. Larger chunks cost less
    processor time; smaller ones spread a message over more lanes."""

    checksum: Annotated[bool | Literal["mac"], Expected("true, false or mac")] = True
    """Compare a CRC-32C (or CRC-32) of each chunk before acknowledging it. `mac` also detects
    changes by someone on the network, for more processor time: docs/explanation/security.md."""

    backend: Literal["tcp", "nixl"] = "tcp"
    """`nixl` is RDMA by NVIDIA's NIXL, see docs/how-to/rdma.md."""

    copies: Literal[
        "auto", "copy_engine", "pallas", "buffer_callback", "pinned_host", "io_callback"
    ] = "auto"
    """How payloads are copied between device and host memory, see docs/how-to/gpus.md. `auto` takes
    the first backend that works; a named one must work, or the run ends. `pallas` also copies back
    to the device."""
