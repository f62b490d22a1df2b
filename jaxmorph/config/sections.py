"""The sections of a run's configuration: their keys, types, defaults and units.

Values are taken strictly: `"12"` or `true` is no number, `.nan` and `.inf` are refused, and a whole
number is welcome where any number is. Each field says in words what it expects, for errors.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class Expected:
    """What a field expects, in the words an error uses after "expected"."""

    text: str


STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
LARGEST = 2**31 - 1  # everything counted here ends up in an int32 somewhere
MOST_BYTES = 2**63 - 1  # but for bytes, of which a device has more

Text = Annotated[str, Field(min_length=1), Expected("text")]
Count = Annotated[int, Field(ge=1, le=LARGEST), Expected("a whole number of at least 1")]
Bytes = Annotated[int, Field(ge=1, le=MOST_BYTES), Expected("a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST), Expected("a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0), Expected("a number above 0")]
NotNegative = Annotated[float, Field(ge=0), Expected("a number of at least 0")]
Fraction = Annotated[float, Field(ge=0, le=1), Expected("a number from 0 to 1")]
Momentum = Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
# Lists are the only leniently typed values: YAML has no tuples.
Counts = Annotated[tuple[Count, ...], Field(strict=False)]
ByteCounts = Annotated[tuple[Bytes, ...], Field(strict=False)]
Positives = Annotated[tuple[Positive, ...], Field(strict=False)]
PerStageMs = Annotated[
    Positive | Positives,
    Expected("milliseconds above 0: one number, or a list with one for each stage"),
]
Option = int | float | str | bool | None  # of a model's factory
ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "1f1b-eager",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "paper",
    "adaptive",
    "initial",
]


class Section(BaseModel):
    """A frozen group of keys; a section left empty in the file has all its defaults.

    Attributes:
        expected_of_others: What keys beyond those that are named expect, where there may be any.
    """

    model_config = STRICT
    expected_of_others: ClassVar[str] = "another value"

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, section: Any) -> Any:
        return {} if section is None else section


class Run(Section):
    """Where the run writes, its random seed and its length in optimizer steps."""

    dir: Text = "runs/run"
    seed: CountOrZero = 0
    steps: Count = 100


SHIPPED_MODELS = ("gpt2", "llama")
"""The models that come with jaxmorph, `jaxmorph.models.gpt2` for one, by their short names."""
_SHIPPED_MODEL = re.compile(rf"(?:(?:jaxmorph\.)?models\.)?({'|'.join(SHIPPED_MODELS)})")


def short_factory_name(factory: str) -> str:
    """`gpt2` for `jaxmorph.models.gpt2` and for `models.gpt2`, its name in earlier versions."""
    shipped = _SHIPPED_MODEL.fullmatch(factory)
    return factory if shipped is None else shipped[1]


class Model(Section):
    """Which model, and from which weights; every other key is passed to the factory.

    A factory that does not come with jaxmorph is looked for among the installed packages, then in
    `folder`, by default the configuration's, then in the current directory. No `weights`: the
    parameters start from the run's seed.
    """

    model_config = ConfigDict(extra="allow")
    expected_of_others = "a number, text, true, false or null"
    __pydantic_extra__: dict[str, Option] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    factory: Annotated[
        str,
        Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
        AfterValidator(short_factory_name),
        Expected("a Python module's name"),
    ] = "gpt2"
    folder: Annotated[
        str | None, Field(min_length=1), Expected("null, or the folder of the factory's module")
    ] = None
    preset: Text = "tiny"
    weights: Annotated[
        str | None, Field(min_length=1), Expected("null, or where the model finds its weights")
    ] = None

    @property
    def options(self) -> dict[str, Option]:
        """The keys for the factory, as they stand in the configuration."""
        return dict(self.__pydantic_extra__)


class Data(Section):
    """What the model reads; no path: the sources of Python's standard library.

    No `vocab_size` is the tokenizer's own, or for a token array that names none what its largest id
    needs. Of the text's end a fraction is held out: no step trains on it.
    """

    path: Annotated[
        str | None, Field(min_length=1), Expected("a file, a folder, or null for the default text")
    ] = None
    tokenizer: Annotated[
        str, Field(min_length=1), Expected("bytes, or the path of a tokenizer.json")
    ] = "bytes"
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    vocab_size: Annotated[Count | None, Expected("null, or a whole number of at least 1")] = None
    sequence_length: Count = 128
    held_out_fraction: Annotated[
        float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")
    ] = 0.0


class Evaluation(Section):
    """After which steps the loss on held-out text is computed, and on how many batches of it.

    Every N-th step and the last one; null: never. A batch is as large as a step's.
    """

    every_steps: Annotated[Count | None, Expected("null, or a whole number of at least 1")] = None
    batches: Count = 1


class Parallelism(Section):
    """How many stages the model is cut into, and how many layers each one gets.

    With chunks, each stage runs so many virtual stages of the pipeline: chunk c of stage r is
    number c * stages + r, and the list of layers has one number for each, in this order.

    `auto` measures the model and makes the slowest stage as fast as can be. The cut is then even
    with chunks, with paced ops, and where no other is faster.
    """

    stages: Count = 1
    chunks: Count = 1
    data: Annotated[
        int, Field(ge=1, le=1), Expected("1 (data parallelism is not supported yet)")
    ] = 1
    tensor: Annotated[
        int, Field(ge=1, le=1), Expected("1 (tensor parallelism is not supported yet)")
    ] = 1
    layers: Annotated[
        Literal["auto", "even"] | Counts,
        Expected("auto, even, or a list with the number of layers of each stage (at least 1)"),
    ] = "even"

    @property
    def virtual_stages(self) -> int:
        """How many parts the layers are cut into."""
        return self.stages * self.chunks


class Batch(Section):
    """The sequences of one optimizer step: microbatches times sequences in each."""

    microbatches: Count = 8
    microbatch_size: Count = 4


class Schedule(Section):
    """The order of work on the stages, and how many microbatches a stage may hold.

    `link_ms` is what planning is told of links, such as `{2-3: 30}`, latency in both directions, in
    place of what was measured; a link that it doesn't name, and with null every link, is planned
    for as measured. Whatever is emulated shows in measurements alone: planning never reads it.
    """

    name: ScheduleName = "adaptive"
    max_live: Annotated[
        Count | Counts | None,
        Expected("null, a whole number of at least 1, or a list with one for each stage"),
    ] = None
    live_until: Literal["B", "W"] = "B"
    max_stash_bytes: Annotated[
        Bytes | ByteCounts | None,
        Expected("null, a whole number of at least 1, or a list with one for each stage"),
    ] = None

    link_ms: Annotated[
        dict[str, NotNegative] | None,
        Expected("null, or milliseconds of at least 0 by link, such as {2-3: 30}"),
    ] = None

    @property
    def is_capped(self) -> bool:
        """Whether it says what a stage may hold."""
        return self.max_live is not None or self.max_stash_bytes is not None

    def max_live_per_stage(self, num_stages: int) -> tuple[int, ...] | None:
        """Each stage's cap on live microbatches, or None when there is none."""
        return _cap_per_stage(self.max_live, num_stages)

    def max_stash_bytes_per_stage(self, num_stages: int) -> tuple[int, ...] | None:
        """Each stage's cap on the bytes of its stash, or None when there is none."""
        return _cap_per_stage(self.max_stash_bytes, num_stages)


class Optimizer(Section):
    """AdamW after a linear warm-up, on a cosine down to a fraction of the peak rate.

    A step whose loss or gradient is not finite updates nothing; so many in a row end the run.
    """

    learning_rate: Positive = 6e-4
    warmup_steps: CountOrZero = 0
    weight_decay: NotNegative = 0.1
    clip_norm: Annotated[float | None, Field(gt=0), Expected("a number above 0, or null")] = 1.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    final_learning_rate_fraction: Fraction = 0.1
    stop_after_skipped: Annotated[
        Count | None, Expected("null, or a whole number of at least 1")
    ] = 10


class Precision(Section):
    """The type of activations and of the weights in use; parameters stay float32."""

    compute: Literal["float32", "bfloat16"] = "float32"


SPLIT_SCHEDULES = ("adaptive", "initial", "paper", "zb-h1", "zb-h2")
"""Schedules that run a backward as B and W, which those that replace them do too."""


class Adaptation(Section):
    """Whether schedule and routes follow what links turn out to be, and when that is worth it.

    A new plan must shorten the predicted step by `worth` of it. With `delegates: slow` only links
    that have turned slow are ever taken off their routes, with `any` healthy ones too where a
    prediction finds that worth it, which doesn't count what delegation takes of host memory and
    processors. A delegated link that is healthy again stays so for at least `dwell_steps`, and for
    longer, up to `longest_dwell_steps`, if it keeps coming and going. One whose direct path failed
    goes back once both ends have found that path up for `failback_steps` in a row, and for twice as
    many after each further failure, up to `longest_dwell_steps`.

    `intra_step` can't be anything but `off`: ranks could once take another op in place of a late
    one, inside a step, and that gained nothing in real runs.
    """

    enabled: Annotated[bool, Expected("true or false")] = False
    intra_step: Annotated[
        Literal["off"],
        Expected(
            "'off': changing the order inside a step was removed because it gained nothing in real "
            "runs, see docs/explanation/adaptation.md"
        ),
    ] = "off"
    delegates: Literal["slow", "any"] = "slow"
    worth: Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")] = 0.02
    dwell_steps: Count = 4
    longest_dwell_steps: Count = 256
    failback_steps: Count = 20


class Offload(Section):
    """Whether a plan may hold more microbatches than fit on the devices, the rest in host memory.

    What a device may hold is `schedule.max_live` or `schedule.max_stash_bytes`; with neither, of
    what is free on it once the stage is there, a fraction of `device_memory_fraction`, which
    schedules that are planned keep to without offload too, as do plans that replace a fixed one. A
    device that doesn't tell has no limit.
    """

    enabled: Annotated[bool, Expected("true or false")] = False
    device_memory_fraction: Annotated[
        float, Field(gt=0, le=1), Expected("a number above 0, at most 1")
    ] = 0.8


class Trace(Section):
    """Which steps leave a Chrome trace: every N-th and always the last; for 0 only the last.

    So do the steps around a change of plan or route, or of what is known of a link. Of many the
    latest `keep` stay; half of them may be those around changes.
    """

    every_steps: CountOrZero = 20
    keep: Count = 50


class Metrics(Section):
    """Where steps are written to, beside `metrics.jsonl`: as events for TensorBoard."""

    tensorboard: Annotated[bool, Expected("true or false")] = False


class Timeouts(Section):
    """How long, in seconds, ranks wait for one another: to start, and within a step.

    Where links fail over, a direct transfer is given up `direct_s` after both its ends have come to
    it; null: `step_s` divided by the number of stages, or by 4 if there are fewer. Elsewhere it
    ends the run after `step_s`.
    """

    start_s: Positive = 120.0
    step_s: Positive = 60.0
    direct_s: Annotated[Positive | None, Expected("null, or a number above 0")] = None


def _cap_per_stage(cap: int | tuple[int, ...] | None, num_stages: int) -> tuple[int, ...] | None:
    return (cap,) * num_stages if isinstance(cap, int) else cap


def per_stage(value: float | tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    """Spreads one number over all stages; a tuple with one for each stage stays as it is.

    Args:
        num_stages: how many stages there are.

    Returns:
        `num_stages` numbers.

    Raises:
        ValueError: the tuple has another length.
    """
    numbers = value if isinstance(value, tuple) else (value,) * num_stages
    if len(numbers) != num_stages:
        raise ValueError(f"got {len(numbers)} numbers, expected one for each of {num_stages}")
    return numbers
