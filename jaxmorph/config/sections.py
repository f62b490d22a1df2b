"""The sections of a run's configuration: keys, types, defaults, and below each key its meaning.

Types are strict: `"12"` and `true` are no numbers, and `.nan` and `.inf` are refused; a number may
be a whole one. `Expected` is the text of an error after "expected".
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class Expected:
    """What a field expects, in an error's words."""

    text: str


STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
LARGEST = 2**31 - 1  # every count becomes an int32 somewhere
MOST_BYTES = 2**63 - 1  # except bytes, which a device has more of

Text = Annotated[str, Field(min_length=1), Expected("text")]
Count = Annotated[int, Field(ge=1, le=LARGEST), Expected("a whole number of at least 1")]
Bytes = Annotated[int, Field(ge=1, le=MOST_BYTES), Expected("a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST), Expected("a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0), Expected("a number above 0")]
NotNegative = Annotated[float, Field(ge=0), Expected("a number of at least 0")]
Fraction = Annotated[float, Field(ge=0, le=1), Expected("a number from 0 to 1")]
Momentum = Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")]
# Only lists are not strict, because YAML has no tuples.
Counts = Annotated[tuple[Count, ...], Field(strict=False)]
ByteCounts = Annotated[tuple[Bytes, ...], Field(strict=False)]
Positives = Annotated[tuple[Positive, ...], Field(strict=False)]
PerStageMs = Annotated[
    Positive | Positives,
    Expected("milliseconds above 0: one number, or a list with one for each stage"),
]
Option = int | float | str | bool | None  # of a model's factory
ScheduleName = Literal[
    "gpipe", "1f1b", "1f1b-eager", "zb-h1", "zb-h2", "interleaved", "zb-v", "dualpipe-v",
    "paper", "adaptive", "initial",
]  # fmt: skip


class Section(BaseModel):
    """A frozen group of keys; a section left empty in the file has all its defaults.

    Attributes:
        expected_of_other_keys: what an error expects of keys that the class does not name.
    """

    model_config = STRICT
    expected_of_other_keys: ClassVar[str] = "another value"

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, section: Any) -> Any:
        return {} if section is None else section


class Run(Section):
    """Where a run writes, its random seed and its length."""

    dir: Text = "runs/run"
    """The run directory. Without a value it is `runs/` and the configuration file's name; if that
    is taken, a number is appended."""

    seed: CountOrZero = 0
    """Seeds the initial parameters, the order of the data, and the keys of random models."""

    steps: Count = 100
    """Optimizer steps. The learning rate's cosine ends here too."""


SHIPPED_MODELS = ("gpt2", "llama")
"""The short names of the models that come with jaxmorph, such as `jaxmorph.models.gpt2`."""
_SHIPPED_MODEL = re.compile(rf"(?:(?:jaxmorph\.)?models\.)?({'|'.join(SHIPPED_MODELS)})")


def short_factory_name(factory: str) -> str:
    """`gpt2` for `jaxmorph.models.gpt2` and for `models.gpt2`, its name in earlier versions."""
    shipped = _SHIPPED_MODEL.fullmatch(factory)
    return factory if shipped is None else shipped[1]


class Model(Section):
    """Which model, and its initial weights; other keys are passed to the model's factory."""

    model_config = ConfigDict(extra="allow")
    expected_of_other_keys = "a number, text, true, false or null"
    __pydantic_extra__: dict[str, Option] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    factory: Annotated[
        str,
        Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
        AfterValidator(short_factory_name),
        Expected("a Python module's name"),
    ] = "gpt2"
    """`gpt2`, `llama`, or a Python module with a function `build`: an installed one, or one in
    `folder` or in the current directory."""

    folder: Annotated[
        str | None, Field(min_length=1), Expected("null, or the folder of the factory's module")
    ] = None
    """The folder of a factory that does not come with jaxmorph; null: the configuration file's."""

    preset: Text = "tiny"
    """A named set of sizes of the factory; `jaxmorph model` lists them."""

    weights: Annotated[
        str | None, Field(min_length=1), Expected("null, or where the model finds its weights")
    ] = None
    """Where the model reads its initial parameters; null draws them from `run.seed`."""

    @property
    def options(self) -> dict[str, Option]:
        """The keys for the factory."""
        return dict(self.__pydantic_extra__)


class Data(Section):
    """The text to train on, and how it becomes tokens; or data of your own."""

    factory: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
        Expected("null, or a Python module's name"),
    ] = None
    """Null: text. Or a Python module, an installed one, or one in `folder` or in the current
    directory. Its function `build_data` is called with `batch_size` (`batch.microbatches` times
    `batch.microbatch_size`), `sequence_length`, `seed` and `path`. It returns an object with
    `inputs(step)` and `targets(step)`, and maybe `extras(step)`: each a tree of arrays [batch_size,
    ...], which follow from the step's number alone. The object's `held_out`, which has the same
    methods, is what `evaluation` uses. Its `digest`, a text, shows whether a resumed run has the
    same data; without one the module's source does."""

    folder: Annotated[
        str | None, Field(min_length=1), Expected("null, or the folder of the factory's module")
    ] = None
    """The folder of `factory`'s module; null: the configuration file's."""

    path: Annotated[
        str | None, Field(min_length=1), Expected("a file, a folder, or null for the default text")
    ] = None
    """A text file, a folder of text files, or a `.bin` array of token ids as nanoGPT and Megatron
    write them. Null is the source of Python's standard library, which every machine has."""

    tokenizer: Annotated[
        str, Field(min_length=1), Expected("bytes, or the path of a tokenizer.json")
    ] = "bytes"
    """`bytes`, which needs no file, or the path of a Hugging Face `tokenizer.json`."""

    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """The type of the ids in a `.bin` array; uint32 for a vocabulary above 65,536."""

    vocab_size: Annotated[Count | None, Expected("null, or a whole number of at least 1")] = None
    """The model's vocabulary. Null is the tokenizer's, or for a `.bin` array without a tokenizer
    its largest id plus one, if the array has at most 256 MiB and no id of a million or more. Set it
    for other arrays, or to pad the vocabulary."""

    sequence_length: Count = 128
    """Tokens in a sequence."""

    packing: Literal["none", "segments"] = "none"
    """With `none` a token sees all tokens before it in its sequence; with `segments` only those of
    its own document, in training and in evaluations. A document ends with the tokenizer's
    separator, which has no target. Positions begin again at 0 in each document. The model's layers
    must take `extras`, as those of GPT-2 and Llama do."""

    held_out_fraction: Annotated[
        float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")
    ] = 0.0
    """The share of the text, at its end, that no step trains on; `evaluation` uses it."""

    @property
    def is_packed(self) -> bool:
        """Whether tokens see only those of their own document."""
        return self.packing == "segments"


class Evaluation(Section):
    """The loss on held-out text (`data.held_out_fraction`)."""

    every_steps: Annotated[Count | None, Expected("null, or a whole number of at least 1")] = None
    """Evaluate after every N-th step and the last one; null: never."""

    batches: Count = 1
    """Batches in an evaluation, each as large as a step's; more reduce the noise of the loss."""


class Parallelism(Section):
    """How the model is cut into pipeline stages."""

    stages: Count = 1
    """Pipeline stages; each is one process of a replica."""

    chunks: Count = 1
    """Virtual stages on each stage; above 1 only with `schedule.name: interleaved`, where chunk c
    of stage s is virtual stage c * stages + s, or with `zb-v` and `dualpipe-v`, which have 2: down
    the stages and back."""

    data: Count = 1
    """Replicas of the pipeline, which divide the microbatches of a step among them and add up their
    gradients at its end. Each has processes of its own, and plans for its own links."""

    tensor: Count = 1
    """Devices of a stage, over which its parameters are split. They must be in one host. On CPUs a
    process gets that many JAX devices."""

    layers: Annotated[
        Literal["auto", "even"] | Counts,
        Expected("auto, even, or a list with the number of layers of each stage (at least 1)"),
    ] = "even"
    """`even`, or the number of layers of each virtual stage. `auto` measures embedding, layer and
    head at the start and minimises the time of the slowest stage, which pays off when a large
    vocabulary makes the ends slow; with chunks, several devices for a stage, or emulated ops it is
    the same as `even`."""

    @property
    def num_ranks(self) -> int:
        """Processes of a run: the stages of all replicas."""
        return self.stages * self.data

    @property
    def virtual_stages(self) -> int:
        """How many parts the layers are cut into."""
        return self.stages * self.chunks


class Batch(Section):
    """The sequences of one optimizer step: `microbatches` times `microbatch_size`."""

    microbatches: Count = 8
    """Microbatches in a step, of all replicas together. More of them make the bubble a smaller
    share of the step; take at least twice the number of stages for each replica."""

    microbatch_size: Count = 4
    """Sequences in a microbatch."""


class Schedule(Section):
    """The order of work on the stages, and how many microbatches a stage may hold.

    A run plans with the links that it measures, never with the settings of emulated ones.
    """

    name: ScheduleName = "adaptive"
    """`adaptive` plans for measured ops and links; its step is never longer than that of `paper`,
    the paper's own algorithm. `initial` tolerates any link that turns slow later. The others have a
    fixed order, as baselines."""

    placement: Literal["default", "auto"] = "default"
    """Which stage runs which layers. `default`: that of `name`. `auto`, with `name: adaptive`,
    measures embedding, layer and head before the first step, and trains with `zb-v` where it
    predicts a step at least 2 % shorter on healthy links. That order is fixed: the run then does
    not adapt. The run's `config.yaml` has the schedule that was chosen."""

    max_live: Annotated[
        Count | Counts | None,
        Expected("null, a whole number of at least 1, or a list with one for each stage"),
    ] = None
    """The most microbatches that a stage may hold: a number, or a list with one per stage. Null:
    no cap except the device's free memory, where the device reports it (CPUs don't)."""

    live_until: Literal["B", "W"] = "B"
    """Whether a microbatch counts as held until its B, as in the paper, or until its W, which is
    what memory sees."""

    max_stash_bytes: Annotated[
        Bytes | ByteCounts | None,
        Expected("null, a whole number of at least 1, or a list with one for each stage"),
    ] = None
    """The same cap in bytes of stash, counted until W, by the sizes of the compiled stages; to use
    instead of `max_live`."""

    weight_group: Count = 1
    """How many microbatches in a row one W computes; a divisor of a replica's microbatches. Their
    gradients are then added to the sums together, which is faster where microbatches are small and
    weights large. But stashes wait longer, and fewer W fill bubbles."""

    link_ms: Annotated[
        dict[str, NotNegative] | None,
        Expected("null, or milliseconds of at least 0 by link, such as {2-3: 30}"),
    ] = None
    """Latencies in milliseconds, both directions, to plan with instead of the measured ones, such
    as `{2-3: 30}`; with replicas, `r1:2-3` is only replica 1's link. Links that are not named
    are planned for as measured."""

    @property
    def is_capped(self) -> bool:
        """Whether the configuration limits what a stage may hold."""
        return self.max_live is not None or self.max_stash_bytes is not None

    def max_live_per_stage(self, num_stages: int) -> tuple[int, ...] | None:
        """Each stage's cap on live microbatches, or None without one."""
        return None if self.max_live is None else per_stage(self.max_live, num_stages)

    def max_stash_bytes_per_stage(self, num_stages: int) -> tuple[int, ...] | None:
        """Each stage's cap on the bytes of its stash, or None without one."""
        caps = self.max_stash_bytes
        return None if caps is None else per_stage(caps, num_stages)


class Optimizer(Section):
    """AdamW with a linear warm-up, then a cosine decay; the defaults are GPT-3's."""

    learning_rate: Positive = 6e-4
    """The peak, at the end of the warm-up; small models take more, 2e-3 for example."""

    warmup_steps: CountOrZero = 0
    """Steps in which the rate rises from 0. If the file lacks this key, it is a tenth of
    `run.steps`."""

    weight_decay: NotNegative = 0.1
    """Applies only to matrices, not to biases and norms."""

    clip_norm: Annotated[float | None, Field(gt=0), Expected("a number above 0, or null")] = 1.0
    """The largest norm of the gradients of all stages together; null: no clipping."""

    beta1: Momentum = 0.9
    """Decay of the first moment."""

    beta2: Momentum = 0.95
    """Decay of the second moment."""

    final_learning_rate_fraction: Fraction = 0.1
    """Where the cosine ends, as a share of the peak."""

    shard: Literal["none", "data"] = "none"
    """`data`: each replica (`parallelism.data`) keeps the optimizer's state of only its share of
    the parameters, updates that share, and gets the other shares from the other replicas (ZeRO,
    stage 1). Results are the same except for the rounding of the norm. With one replica it has no
    effect."""

    stop_after_skipped: Annotated[
        Count | None, Expected("null, or a whole number of at least 1")
    ] = 10
    """A step whose loss or gradient norm is not finite updates nothing; this many in a row end the
    run. Null: never."""


class Precision(Section):
    """The type to compute in."""

    compute: Literal["float32", "bfloat16"] = "float32"
    """The type of activations and of matrix products; parameters, gradient sums and the optimizer's
    state are float32 either way. bfloat16 halves stashes and messages."""


PLANNED_SCHEDULES = ("adaptive", "initial", "paper")
"""Schedules that a run plans; the others have a fixed order."""

REPLACEABLE_SCHEDULES = (*PLANNED_SCHEDULES, "zb-h1", "zb-h2")
"""Schedules that can be replaced while a run lasts: split ones of one chunk."""

SPLIT_SCHEDULES = (*REPLACEABLE_SCHEDULES, "zb-v", "dualpipe-v")
"""Schedules that run a backward as B and W."""


class Adaptation(Section):
    """Whether a run changes its schedule and routes when links turn slow or recover."""

    enabled: Annotated[Literal["auto"] | bool, Expected("auto, true or false")] = "auto"
    """Detect slow links from the run's own timings, and change the plan between two steps. `auto`
    is true for a schedule that is planned: `adaptive`, `initial` and `paper`."""

    intra_step: Annotated[
        Literal["off"],
        Expected(
            "'off': changing the order inside a step was removed because it gained nothing in real "
            "runs, see docs/explanation/adaptation.md"
        ),
    ] = "off"
    """Only `off`; kept so that older configurations load."""

    delegates: Literal["slow", "any"] = "slow"
    """`slow` delegates only links that have turned slow. `any` also delegates healthy links where
    that shortens the predicted step; the prediction ignores the processor time and host memory
    that delegation takes."""

    remaps: Literal["auto", "never", "any", "pipeline"] = "auto"
    """With `parallelism.data` above 1: ranks change places in the mesh where a slow pair of hosts
    sums gradients. `any` takes the layout with the shortest predicted step; `pipeline` makes the
    pair a link of the pipeline, as Falcon does. `auto` is `any` if the run adapts, else
    `never`."""

    recheck_steps: Count = 1000
    """How many steps pass between two timings of a pair of hosts that ranks avoid. Once all such
    pairs are as fast as before, ranks go back to their first places."""

    worth: Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")] = 0.02
    """The share by which a new plan must shorten the predicted step. Raise it if plans change too
    often."""

    dwell_steps: Count = 4
    """The least number of steps between two changes of plan (a link whose direct path has failed
    doesn't wait), and the least that a link stays delegated, counted from the step in which it was
    delegated. The latter doubles each time the link turns slow again soon after."""

    longest_dwell_steps: Count = 256
    """The upper limit of `dwell_steps` and `failback_steps` after doubling."""

    failback_steps: Count = 20
    """How many steps in a row both ends must find a failed direct path up before the link returns
    to it. The number doubles with each further failure of the path."""


class Offload(Section):
    """Whether a plan may hold more microbatches than fit on the devices, in pinned host memory."""

    enabled: Annotated[bool, Expected("true or false")] = False
    """Move stashes beyond the cap to host memory. The cap of a device is `schedule.max_live` or
    `schedule.max_stash_bytes`, or else `device_memory_fraction`."""

    device_memory_fraction: Annotated[
        float, Field(gt=0, le=1), Expected("a number above 0, at most 1")
    ] = 0.8
    """The share of a device's free memory, once its stage is loaded, that stashes may take where no
    cap is configured. The rest is for temporary buffers, messages and fragmentation. Planned
    schedules obey it without offload too; a device that reports no memory has no cap."""


class Limits(Section):
    """What a run may take of its hosts."""

    host_gib: Annotated[float | None, Field(gt=0), Expected("null, or a number above 0")] = None
    """The GiB of host memory that one rank may take for slots of delegated messages, offloaded
    stashes and a checkpoint's copy; null: no limit. With fewer slots, sends may wait for
    one, which predictions include. A limit that no plan fits is refused. What replicas' delegated
    sums take is not counted."""

    @property
    def host_bytes(self) -> int | None:
        """The same in bytes."""
        return None if self.host_gib is None else int(self.host_gib * 2**30)


class Trace(Section):
    """Which steps leave a Chrome trace, planned beside measured."""

    every_steps: CountOrZero = 20
    """Every N-th step and the last one leave a trace; 0: only the last. The steps around a change
    of a plan, a route or a link's state always do."""

    keep: Count = 50
    """The latest traces to keep; at most half of them are of steps around changes."""


class Metrics(Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: Annotated[bool, Expected("true or false")] = False
    """Also write TensorBoard events (`pip install tensorboardX`)."""


class Timeouts(Section):
    """How long ranks wait for one another, in seconds."""

    start_s: Positive = 120.0
    """For all ranks to start, and for what they then do that has no limit of its own. Raise it if
    importing JAX takes longer."""

    compile_s: Positive = 600.0
    """For compiling one program, and for loading model and data. Raise it if a GPU's kernels take
    longer to choose."""

    restore_s: Positive = 300.0
    """For each part of a checkpoint that is read. Reading a large one may take longer in all, while
    it makes progress."""

    save_s: Positive = 1800.0
    """For writing one checkpoint, beside training. A save that takes longer has failed."""

    step_s: Positive = 60.0
    """For any one message within a step; must exceed the longest time that a stage may keep
    another one waiting. Beyond it the run ends. A rank that made no progress for 5 s longer has
    stalled: it ends with the stacks of its threads in its log."""

    direct_s: Annotated[Positive | None, Expected("null, or a number above 0")] = None
    """With failover: how long a direct transfer may take once both ends have reached it, before the
    link continues delegated. Other ranks wait meanwhile, so it must be well below `step_s`, but at
    least what a stage's ops take in a step: a transfer may wait behind them on its queue. Null is a
    quarter of `step_s`, and more where emulated ops take longer."""


_Number = TypeVar("_Number", int, float)


def per_stage(value: _Number | tuple[_Number, ...], num_stages: int) -> tuple[_Number, ...]:
    """Repeats one number for each stage; a tuple stays as it is."""
    return value if isinstance(value, tuple) else (value,) * num_stages
