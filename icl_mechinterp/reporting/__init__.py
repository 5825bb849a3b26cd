"""Records made readable: one self-contained page. Reads what was measured and computes nothing of its own."""

from .html import render_report as render_report
