"""The little SVG that charts need. Colours are CSS variables of the page, so dark mode reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]


class Canvas:
    """Collects shapes in user units; scales to the width it is given."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, style: str = "") -> None:
        """A straight line."""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"{_style(style)}/>'
        )

    def polyline(self, points: Sequence[tuple[float, float]], css: str, style: str = "") -> None:
        """Connected points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{css}"{_style(style)}/>')

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, tip: str = "", radius: float = 2
    ) -> None:
        """A filled box with a tooltip."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius}"'
            f"{_style(style)}>{_tip(tip)}</rect>"
        )

    def dot(self, x: float, y: float, style: str, tip: str = "", radius: float = 4) -> None:
        """A filled circle with a tooltip."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"{_style(style)}>{_tip(tip)}</circle>')

    def text(self, x: float, y: float, content: str, css: str = "tick", anchor: Anchor = "start") -> None:
        """Text on a baseline at y."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'
        )

    def render(self, description: str) -> str:
        """The SVG element; `description` is what a screen reader says."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(description, quote=True)}">{"".join(self.parts)}</svg>'
        )


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to just above `top`, about `count` of them."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    magnitude = 1.0
    while magnitude > raw:
        magnitude /= 10
    while magnitude * 10 <= raw:
        magnitude *= 10
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    values = [0.0]
    while values[-1] < top - 1e-9 * step:
        values.append(len(values) * step)
    return values


def short(value: float) -> str:
    """A tick label without needless zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _style(style: str) -> str:
    return f' style="{style}"' if style else ""


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""
