"""A run or a comparison as one HTML page that needs nothing else: no network, no script."""

from jaxmorph.reporting.page.report import REPORT, write_report

__all__ = ["REPORT", "write_report"]
