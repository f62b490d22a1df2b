"""Numbers, headers and summaries in words, for the terminal, tables and pages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean, median

from jaxmorph.config.link_sections import Emulation, LinkTrace
from jaxmorph.records import Goodput, ReplicaStep, RunHeader, RunSummary, StepRecord, in_bytes

_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "-"
_MOST_MORPHS = 12  # listed in a summary


def header_rows(header: RunHeader) -> list[tuple[str, str]]:
    """A header as (label, text) pairs, in reading order."""
    layers = numbers(header.layers_per_stage)
    mesh = header.num_replicas, header.devices_per_stage
    stages = f"{len(header.layers_per_stage)}{mesh_text(*mesh)}"
    reason = f" ({header.cut_reason})" if header.cut_reason else ""
    warmup = numbers(header.warmup_forwards)
    batch = (
        f"{header.microbatches} microbatches of {header.microbatch_size} sequences "
        f"of {header.sequence_length}: {header.tokens_per_step:,} tokens a step"
    )
    return [
        ("model", f"{header.model}, {short_count(header.num_parameters)} parameters"),
        ("stages", f"{stages}, layers {layers}{reason}"),
        ("schedule", f"{header.schedule}, warm-up forwards {warmup}"),
        ("batch", batch),
        ("data", header.data),
        ("regime", header.regime),
        ("writes", str(header.run_directory)),
    ]


def mesh_text(num_replicas: int, devices_per_stage: int) -> str:
    """The mesh's other axes, such as ` of 2 devices, in each of 2 replicas`; empty without any."""
    devices = f" of {devices_per_stage} devices" if devices_per_stage > 1 else ""
    return devices + (f", in each of {num_replicas} replicas" if num_replicas > 1 else "")


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """A summary as (label, text) pairs, in reading order."""
    losses = summary.losses
    rows = [
        ("steps", f"{len(losses)} in {duration(summary.elapsed_s)}{_skipped(summary)}"),
        ("speed", ", ".join([f"{summary.tokens_per_s:,.0f} tokens/s", *_computed(summary)])),
        ("loss", _course(losses)),
        *([("held out", _course(summary.held_out_losses))] if summary.held_out_losses else []),
        ("step time", _step_against_plan(summary)),
    ]
    if summary.bubble_rate is not None:
        planned = f", {percent(summary.planned_bubble_rate)} planned"
        known = summary.planned_bubble_rate is not None
        rows.append(
            ("bubble", f"{percent(summary.bubble_rate)} measured{planned if known else ''}")
        )
    if summary.peak_device_bytes is not None:
        rows.append(("memory", _memory(summary.peak_device_bytes)))
    if summary.goodput is not None:
        rows.append(("goodput", _goodput(summary.goodput)))
    if summary.morph_steps:
        rows.append(("morphs", _morphs(summary.morph_steps)))
    rows.append(("metrics", str(summary.run_directory / "metrics.jsonl")))
    if summary.picture:
        rows.append(("picture", str(summary.picture)))
    if summary.traces:
        rows.append(("traces", f"{_span_of(summary.traces)} (open in ui.perfetto.dev)"))
    return rows


def _computed(summary: RunSummary) -> Iterator[str]:
    if summary.tflops_per_device is not None:
        yield f"{summary.tflops_per_device:.3g} TFLOP/s a device"
    if summary.mfu is not None:
        yield f"MFU {percent(summary.mfu)}"


def _memory(peaks: Sequence[int]) -> str:
    most = max(peaks)
    return f"at most {in_bytes(most)} in use on a device (stage {peaks.index(most)})"


def describe_regime(emulation: Emulation) -> str:
    """Whether ops are paced, and what messages cost; every table of results must say so."""
    accelerator = emulation.accelerator
    if accelerator is None:
        return f"unpaced: ops run as fast as this machine computes them{_hardware(emulation)}"
    return (
        f"paced: F {numbers(accelerator.forward_ms)} ms, "
        f"B {numbers(accelerator.backward_input_ms)} ms, "
        f"W {numbers(accelerator.backward_weight_ms)} ms{_hardware(emulation)}"
    )


def _hardware(emulation: Emulation) -> str:
    if emulation.message_bytes is None:
        return ""
    wire = "" if emulation.wire_mbps is None else f", a wire of {emulation.wire_mbps / 1e3:g} Gb/s"
    copies = f"copied at {emulation.host_copy_gbps:g} GB/s where delegated"
    return f"; messages of {in_bytes(emulation.message_bytes)}, {copies}{wire}"


def describe_trace(trace: LinkTrace) -> str:
    """Where a trace of links comes from, and how it is scaled."""
    source = trace.file or f"regime {trace.regime}, seed {trace.seed}"
    scales = {"times or steps": trace.time_scale, "delays": trace.latency_scale}
    scaled = [f"{what} times {scale:g}" for what, scale in scales.items() if scale != 1.0]
    return ", ".join([source, *scaled])


def describe_routes(routes: Mapping[str, str]) -> str:
    """The links' routes, such as `direct` or `2-3 delegated, else direct`."""
    if not routes:
        return _UNKNOWN
    # If both routes have equally many links, direct is the usual one.
    usual = Counter(sorted(routes.values(), reverse=True)).most_common(1)[0][0]
    others = [f"{link} {route}" for link, route in routes.items() if route != usual]
    return f"{', '.join(others)}, else {usual}" if others else usual


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of bars; values that are not finite leave a gap.

    Args:
        width: The most characters; if there are more values, neighbours are averaged.
    """
    columns = min(width, len(values))
    cuts = [len(values) * column // max(columns, 1) for column in range(columns + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(cuts)]
    finite = [mean for mean in means if isfinite(mean)]
    lowest = min(finite, default=0.0)
    span = max(finite, default=0.0) - lowest
    scale = (len(_BARS) - 1) / span if span else 0.0
    return "".join(
        _BARS[round((mean - lowest) * scale)] if isfinite(mean) else " " for mean in means
    )


def longer_than_planned(steps: Iterable[tuple[float, float | None]]) -> float | None:
    """The median over steps of measured / planned - 1; None without plans.

    A run that morphs has several plans, so medians of steps and of plans must not be compared.

    Args:
        steps: The measured and the planned length of each; None or 0 without a plan.
    """
    ratios = [took / planned for took, planned in steps if planned]
    return median(ratios) - 1.0 if ratios else None


def numbers(values: float | Sequence[float]) -> str:
    """Numbers separated by spaces; many equal ones become one, such as `2 each`."""
    if isinstance(values, int | float):
        return f"{values:g}"
    if len(values) > 8 and len(set(values)) == 1:
        return f"{values[0]:g} each"
    return " ".join(f"{value:g}" for value in values)


def loss_text(value: float | None) -> str:
    """A loss to four places; a dash for None."""
    return _UNKNOWN if value is None else f"{value:.4f}"


def short_count(number: int) -> str:
    """A count to two or three digits: `842`, `1.24 M`, `6.7 B`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:  # 999,700 rounds to 1 M, not to 1000 k
            return f"{number / size:.3g} {letter}"
    return str(number)


def seconds_as_ms(seconds: float | None) -> str:
    """Seconds as milliseconds without the unit; a dash for None."""
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.1f}"


def percent(share: float | None) -> str:
    """A share as `12.3 %`; a dash for None."""
    return _UNKNOWN if share is None else f"{share:.1%}".replace("%", " %")


def duration(seconds: float) -> str:
    """Seconds as `42.1 s`, `3:07` or `1:02:07`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _course(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4f} → {losses[-1]:.4f}  {sparkline(losses, 32)}"


def routes_text(record: StepRecord) -> str:
    """The routes of a step, and those of replicas that have others: `direct; r1: delegated`."""
    own = describe_routes(record.routes)
    others = enumerate(describe_routes(each.routes) for each in record.replicas or ())
    return "; ".join([own, *(f"r{index}: {text}" for index, text in others if text != own)])


def describe_plan(record: StepRecord | ReplicaStep) -> str:
    """The plan that a step ran: schedule, warm-ups and routes."""
    warmup_forwards, routes = numbers(record.warmup_forwards), describe_routes(record.routes)
    return f"{record.schedule}, warm-up forwards {warmup_forwards}, {routes}"


def _skipped(summary: RunSummary) -> str:
    number = summary.skipped_steps
    return f", {number} of them skipped: not finite" if number else ""


def _morphs(steps: Sequence[int]) -> str:
    shown = [*map(str, steps[:_MOST_MORPHS]), *(["..."] if len(steps) > _MOST_MORPHS else [])]
    return f"{len(steps)}, in force from step {', '.join(shown)}"


def _goodput(goodput: Goodput) -> str:
    share = f"{percent(goodput.share)}: {duration(goodput.productive_s)} in steps"
    whole = f"{share}, of {duration(goodput.wall_s)} since the launch"
    if not goodput.recoveries:
        return whole
    number = len(goodput.recoveries)
    restarts = "1 restart" if number == 1 else f"{number} restarts"
    return f"{whole}; {restarts} cost {duration(goodput.lost_s)}"


def _step_against_plan(summary: RunSummary) -> str:
    measured = f"{seconds_as_ms(summary.step_s)} ms measured (median)"
    if not summary.predicted_step_s:
        return measured
    planned = f"{measured}, {seconds_as_ms(summary.predicted_step_s)} ms planned"
    if summary.longer_than_planned is None:
        return planned
    return f"{planned} ({summary.longer_than_planned:+.1%})".replace("%", " %")


def _span_of(paths: Sequence[Path]) -> str:
    first, last = paths[0], paths[-1]
    return str(first) if len(paths) == 1 else f"{first} … {last.name}"
