import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxmorph.config import Config, dump_config
from jaxmorph.report.draw.trace import chrome_trace
from jaxmorph.report.page.files import read_run_files
from jaxmorph.report.page.run_page import run_page
from jaxmorph.report.run_directory import plain_json
from jaxmorph.schedule.costs import StageCosts, chain_links
from jaxmorph.schedule.fixed import zb_h2
from jaxmorph.schedule.simulate import simulate

HEALTHY = {"step_s": 0.1, "predicted_step_s": 0.1, "link_ms": {"0>1": 0.5, "1>0": 0.6}}
SLOW = HEALTHY | {"step_s": 0.3, "link_ms": {"0>1": 30.0, "1>0": 31.0}}
MORPHED = SLOW | {
    "step_s": 0.12, "predicted_step_s": 0.12, "warmup_forwards": [6, 1],
    "routes": {"0-1": "delegated"},
}  # fmt: skip
EVIDENCE = {"samples_ms": [30.5, 31.0], "baseline_ms": 0.5, "spread_ms": 0.1, "threshold_ms": 1.5}
EVENTS = (
    {"time_s": 0.1, "step": 0, "kind": "plan_adopted", "detail": "zb-h2 was asked for"},
    {
        "time_s": 2.2, "step": 20, "kind": "straggler_detected", "link": "0-1",
        "detail": "0 to 1: 31 ms, <b>healthy</b> 0.5", "evidence": EVIDENCE,
    },
    {
        "time_s": 2.8, "step": 22, "kind": "plan_changed", "link": None,
        "detail": "100 ms less a step & no memory",
    },
    {"time_s": 4.0, "step": 39, "kind": "checkpoint_saved", "detail": "/somewhere/step_40"},
)  # fmt: skip


UNKNOWN = {
    "loss": None, "grad_norm": None, "tokens_per_s": None, "schedule": "", "warmup_forwards": [],
    "routes": {}, "predicted_step_s": None, "bubble_rate": None, "peak_live": [], "compilations": 0,
}  # fmt: skip


def line(step: int, **fields) -> dict:
    """A line of metrics.jsonl."""
    return {
        "step": step, "loss": 5.0 - 0.01 * step, "grad_norm": 1.0, "step_s": 0.1,
        "tokens_per_s": 10.0, "schedule": "zb-h2", "warmup_forwards": [3, 1],
        "routes": {"0-1": "direct"}, "predicted_step_s": 0.1, "bubble_rate": 0.2,
        "peak_live": [3, 1], "compilations": 0,
    } | fields  # fmt: skip


def morphing_steps(count: int = 40) -> list[dict]:
    """A link turns slow at step 20, and a new plan runs from step 22."""
    return [
        line(step, **(HEALTHY if step < 20 else SLOW if step < 22 else MORPHED))
        for step in range(count)
    ]


def write_run(
    path: Path,
    steps: Sequence[dict],
    events: Sequence[dict] = (),
    traced: Sequence[int] = (),
    num_stages: int = 2,
) -> Path:
    """A run directory of `jaxmorph train`; fields that are not given are unknown."""
    (path / "trace").mkdir(parents=True)
    (path / "config.yaml").write_text(dump_config(Config.model_validate({"run": {"steps": 40}})))
    for name, lines, unknown in (
        ("metrics.jsonl", steps, UNKNOWN), ("events.jsonl", events, {"time_s": None}),
    ):  # fmt: skip
        whole = (unknown | given if isinstance(given, dict) else given for given in lines)
        (path / name).write_text("".join(json.dumps(given) + "\n" for given in whole))
    costs = StageCosts.uniform(num_stages, 4.0, 4.0, 4.0)
    for step in traced:
        timelines = {
            f"{name}, step {step}": simulate(
                zb_h2(num_stages, 6), costs, chain_links([delay_ms] * (num_stages - 1))
            )
            for name, delay_ms in (("planned", 0.0), ("measured", 5.0))
        }
        text = json.dumps(chrome_trace(timelines))
        (path / "trace" / f"step_{step}.json").write_text(text)
    return path


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """Makes a run directory from steps, events and traced steps."""
    return lambda *given, **more: write_run(tmp_path / "made", *given, **more)


MORPHED_RUN = morphing_steps(), EVENTS, (0, 10, 18, 19, 20, 21, 22, 23, 24, 39)


@pytest.fixture
def morphed_run(make_run) -> Path:
    """A run that morphed because of a slow link."""
    return make_run(*MORPHED_RUN)


@pytest.fixture(scope="module")
def morphed_page(tmp_path_factory) -> "PageFacts":
    """The parsed page of such a run: it takes seconds to draw."""
    path = write_run(tmp_path_factory.mktemp("runs") / "made", *MORPHED_RUN)
    return PageFacts(run_page(read_run_files(path)))


@pytest.fixture
def compared(tmp_path, made_up) -> Path:
    """The directory of a comparison with timelines."""
    (path := tmp_path / "compared").mkdir()
    timeline = simulate(zb_h2(2, 3), StageCosts.uniform(2, 10.0, 10.0, 10.0)).to_json()
    timelines = {"healthy": {"zb": timeline | {"step_ms": 125.0}}, "slow": {"zb": timeline}}
    (path / "results.json").write_text(json.dumps(plain_json(made_up.to_json())))
    (path / "timelines.json").write_text(json.dumps(timelines))
    return path


class PageFacts(HTMLParser):
    """A parsed page: its elements as (name, attributes, texts in it), in their order.

    Raises:
        AssertionError: An element ends that isn't open, or never does.
    """

    def __init__(self, source: str):
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {[name for name, *_ in self._open]}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), []))
        if tag != "meta":
            self._open.append(self.tags[-1])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> ends nothing"
        opened = self._open.pop()[0]
        assert opened == tag, f"</{tag}> where </{opened}> was due"

    def handle_data(self, data):
        for *_, texts in self._open:
            texts.append(data)

    def texts(self, name: str, look: str = "") -> list[str]:
        """The texts of elements, by name and class."""
        return [
            "".join(texts).strip()
            for tag, attributes, texts in self.tags
            if tag == name and look in (attributes.get("class") or "")
        ]

    def values(self, attribute: str) -> list[str]:
        """The values of an attribute."""
        return [of[attribute] or "" for _, of, _ in self.tags if attribute in of]

    def rows(self, label: str) -> list[list[str]]:
        """The rows of the table with a label, without its head."""
        rows: list[list[str]] = []
        labels = [attributes.get("aria-label") for _, attributes, _ in self.tags]
        for tag, attributes, texts in self.tags[labels.index(label) + 1 :]:
            if attributes.get("role") == "region":
                break
            if tag == "tr":
                rows.append([])
            elif tag == "td":
                rows[-1].append("".join(texts).strip())
        return [row for row in rows if row]


@pytest.fixture
def parse() -> Callable[[str], PageFacts]:
    """Parses a page."""
    return PageFacts
