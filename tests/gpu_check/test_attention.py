"""The part on attention, with JAX's other implementation in cuDNN's place."""

import math

import jax
import pytest

from jaxmorph.gpu_check import attention as part
from jaxmorph.gpu_check.attention import AttentionReport, Found, measure_attention
from jaxmorph.gpu_check.settings import ON_CPU
from models import attention

USUAL = {"loss": 1e-4, "kernel": 0.01, "bias": 0.02}


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: None)


def asked_of(report):
    return {row.name: row.holds for row in report.rows() if row.holds is not None}


def test_cudnns_gradients_are_held_against_float32s(cudnn, monkeypatch):
    library = jax.nn.dot_product_attention

    def stand_in(*heads, implementation, **settings):
        assert implementation == "cudnn"
        return library(*heads, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(part, "_plain_ms", lambda by, settings: 1.0)  # times say nothing here
    report = measure_attention(ON_CPU)
    assert asked_of(report) == {"cuDNN's worst error to float32": True}
    for found in report.found.values():
        assert found.repeats
        assert len(found.errors) == 18
        assert 0 < max(found.errors.values()) < 0.1
    assert report.found["xla"].errors != report.found["cudnn"].errors


def report_of(errors, *, why_not="", failed=False):
    found = {"xla": Found(USUAL, repeats=True, time_ms=2.0)}
    if errors is not None:
        found["cudnn"] = Found(errors, repeats=False, time_ms=1.0)
    return AttentionReport("sizes", "layers", found, why_not, failed)


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"kernel": 0.0239}, True),
        ({"kernel": 0.0240}, False),
        ({"loss": 0.0045}, False),
        ({"bias": math.nan}, False),
    ],
)
def test_an_error_may_be_twice_the_usual_one_and_a_rounding(changed, holds):
    report = report_of(USUAL | changed)
    assert asked_of(report) == {"cuDNN's worst error to float32": holds}


def test_the_error_that_is_told_is_the_one_that_is_too_large():
    (row,) = [row for row in report_of(USUAL | {"loss": 0.01}).rows() if row.holds is False]
    assert row.note.endswith("of 3: loss")


def test_where_there_is_no_cudnn_nothing_is_asked_of_it():
    report = report_of(None, why_not="JAX computes on cpu")
    assert asked_of(report) == {}
    assert any("JAX computes on cpu" in str(row) for row in report.rows())


def test_cudnn_that_fails_in_a_stage_is_a_failure_and_xlas_is_told(cudnn, monkeypatch):
    def look_at(by, *arguments):
        if by == "cudnn":
            raise RuntimeError("no\nengine")
        return Found(USUAL, repeats=True, time_ms=2.0)

    monkeypatch.setattr(part, "_look_at", look_at)
    monkeypatch.setattr(part, "_reference", lambda sizes: {})
    report = measure_attention(ON_CPU)
    assert asked_of(report) == {"cuDNN's": False}
    assert report.why_not == "RuntimeError: no engine"
    assert "XLA's: forward, backward" in [row.name for row in report.rows()]
