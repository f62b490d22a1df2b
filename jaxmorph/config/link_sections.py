"""The sections about links: routes, failing over, the data plane, and what is emulated."""

from collections.abc import Iterable
from ipaddress import IPv4Network, ip_address
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from jaxmorph.config.sections import (
    STRICT,
    CountOrZero,
    Expected,
    NotNegative,
    PerStageMs,
    Positive,
    Section,
)
from jaxmorph.records import Link, Route


class Routes(Section):
    """How transfers travel: each link by its own name (`2-3`), all others by `default`."""

    model_config = ConfigDict(extra="allow")
    expected_of_others = f"one of {', '.join(get_args(Route))}"
    __pydantic_extra__: dict[str, Route] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    default: Route = "direct"

    @property
    def by_link(self) -> dict[str, Route]:
        """The routes of the links that are named."""
        return dict(self.__pydantic_extra__)

    def of_links(self, links: Iterable[Link]) -> dict[Link, Route]:
        """The route of each of some links."""
        return {link: self.by_link.get(str(link), self.default) for link in links}


class Accelerator(BaseModel):
    """Op durations in milliseconds to which the runtime paces each stage."""

    model_config = STRICT

    forward_ms: PerStageMs
    backward_input_ms: PerStageMs
    backward_weight_ms: PerStageMs


class EmulatedLink(Section):
    """How one link behaves, always or from one step until before another.

    It holds for both directions, or for that of one sending stage, and for messages of both routes,
    or of one: with `cut: true, route: direct` a network card of the accelerators is dead, and what
    is delegated goes on. Of several entries for a link latencies and jitters add up, and the
    smallest bandwidth holds.
    """

    between: Annotated[
        tuple[CountOrZero, CountOrZero],
        Field(strict=False),
        Expected("two neighbouring stages, the lower one first, such as [2, 3]"),
    ]
    latency_ms: NotNegative = 0.0
    bandwidth_mbps: Annotated[
        float | None, Field(gt=0), Expected("megabits per second above 0, or null")
    ] = None
    jitter_ms: NotNegative = 0.0
    cut: Annotated[bool, Expected("true or false")] = False
    from_step: Annotated[CountOrZero | None, Expected("null, or a whole number of at least 0")] = (
        None
    )
    to_step: Annotated[CountOrZero | None, Expected("null, or a whole number of at least 0")] = None
    source: Annotated[
        CountOrZero | None, Expected("null, or the sending one of the link's two stages")
    ] = None
    route: Literal["both", "direct", "delegated"] = "both"


class LinkTrace(Section):
    """How links behaved, or how a random regime has them behave; `file` or `regime` is given.

    A file (`link_trace`) goes by seconds since the first step or by steps. A regime
    (`delay_traces`) is drawn for all links between neighbours, for `duration_s`; its last delays
    stay. Times or steps are multiplied by `time_scale`, latencies and jitters by `latency_scale`.
    Text in place of the section is the path of a file.
    """

    file: Annotated[
        str | None, Field(min_length=1), Expected("null, or the path of a CSV file")
    ] = None
    regime: Annotated[
        Literal["A", "B", "C", "bursty"] | None, Expected("null, or one of A, B, C, bursty")
    ] = None
    seed: CountOrZero = 0
    duration_s: Annotated[
        float, Field(gt=0, le=3600), Expected("a number above 0, at most 3600")
    ] = 120.0
    time_scale: Positive = 1.0
    latency_scale: Positive = 1.0

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_path(cls, section: Any) -> Any:
        return {"file": section} if isinstance(section, str) and section else section


TRACE_EXPECTED = Expected("null, the path of a CSV file, or keys such as {regime: A, seed: 1}")


class Emulation(Section):
    """What is emulated; with no accelerator, ops run as fast as this machine computes them.

    What `trace` says of links and what `links` says add up. On an emulated accelerator a copy
    between it and host memory takes its bytes divided by `host_copy_gbps`, gigabytes per second in
    each direction.
    """

    accelerator: Annotated[
        Accelerator | None,
        Expected("null, or forward_ms, backward_input_ms and backward_weight_ms"),
    ] = None
    links: Annotated[
        tuple[EmulatedLink, ...],
        Field(strict=False),
        Expected("a list of links, such as [{between: [2, 3], latency_ms: 30}]"),
    ] = ()
    trace: Annotated[LinkTrace | None, TRACE_EXPECTED] = None
    host_copy_gbps: Positive = 25.0


class Failover(Section):
    """Whether transfers of a direct link whose path fails go on delegated, in the same step.

    It takes a data plane for every link, whatever its route, and a word between both ends before
    each direct transfer. `auto`: where the run adapts, which has the data plane anyway.
    """

    enabled: Annotated[Literal["auto"] | bool, Expected("auto, true or false")] = "auto"


_MOST_LANES = 64
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 4096, 16 * 2**20  # what a frame may announce


def _checked_address(text: str) -> str:
    return str(IPv4Network(text, strict=False) if "/" in text else ip_address(text))


class Transport(Section):
    """How delegated transfers travel from host to host.

    Addresses are this host's own, one for each network card; a subnet stands for those that a host
    has in it, so that one file does for all hosts. `auto` is 127.0.0.1 where all ranks share one
    loopback, and else those of the cards that are found. `lanes` is the number of
    connections to each peer; `auto` follows what messages turn out to need. Each chunk is
    acknowledged, and sent again where need be, as a whole. `copies` is how payloads get from the
    device into the slots that the transfers leave from; `auto` is the first way that works. Who
    names `pallas` has that tried first for the way back to the device too.
    """

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
    lanes: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST_LANES)],
        Expected(f"auto, or a whole number from 1 to {_MOST_LANES}"),
    ] = "auto"
    chunk_bytes: Annotated[
        int,
        Field(ge=_LEAST_CHUNK_BYTES, le=_MOST_CHUNK_BYTES),
        Expected(f"a whole number from {_LEAST_CHUNK_BYTES} to {_MOST_CHUNK_BYTES}"),
    ] = 512 * 1024
    checksum: Annotated[bool, Expected("true or false")] = True
    backend: Literal["tcp", "nixl"] = "tcp"
    copies: Literal[
        "auto", "copy_engine", "pallas", "buffer_callback", "pinned_host", "io_callback"
    ] = "auto"
