"""A plan as an SVG picture: nodes and devices as boxes coloured by stage, and the timeline of one round below."""

from __future__ import annotations

from html import escape

from flexspec.compiler.pages.plan_view import PlanView
from flexspec.compiler.prices.memory import RankBytes

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
_IDLE, _OTHER = "#dddddd", "#bbbbbb"
_BOX, _HEIGHT, _GAP, _LEFT, _WIDTH = 98, 54, 8, 20, 900


def plan_svg(view: PlanView) -> str:
    """The picture as an SVG document."""
    problem, plan = view.problem, view.plan
    y = 30
    title = f"{problem.llm.name} on {problem.machine.name}: {plan.per_token_us / 1e3:.2f} ms a token, "
    title += f"{plan.tokens_per_s:.1f} tokens/s"
    parts = [_text(_LEFT, y, title, 16)]
    y += 20
    parts.append(_text(_LEFT, y, f"SSM: {plan.place.words}; {plan.entry.draft}", 12))
    devices, y = _devices(view, y + 16)
    rows, y = _timeline(view, y + 30)
    body = "\n".join([*parts, *devices, *rows])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 10}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _devices(view: PlanView, y: int) -> tuple[list[str], int]:
    """Boxes of all devices, one row per node; memory fills a box from the bottom."""
    drafting, stage_of = view.drafting_bytes, view.stage_of_device
    parts, device = [], 0
    for node, kind in enumerate(view.problem.machine.node_kinds()):
        x = _LEFT
        parts.append(_text(x, y + 12, f"node {node}: {kind.devices} x {kind.device.name}, {kind.link.name}", 12))
        y += 18
        for _ in range(kind.devices):
            if x + _BOX > _WIDTH - _LEFT:
                x, y = _LEFT, y + 62
            if device in stage_of:
                stage = stage_of[device]
                lines = [f"{device}: stage {stage}", *(["and SSM"] if device in drafting else [])]
                parts += _box(x, y, lines, view.stage_bytes[stage], _COLOURS[stage % len(_COLOURS)])
            elif device in drafting:
                parts += _box(x, y, [f"{device}: SSM"], drafting[device], _OTHER)
            else:
                parts += [_rect(x, y, _BOX, _HEIGHT, _IDLE), _text(x + 5, y + 16, f"{device}: idle", 11)]
            x, device = x + _BOX + _GAP, device + 1
        y += 66
    return parts, y


def _box(x: int, y: int, lines: list[str], memory: RankBytes, fill: str) -> list[str]:
    """A device with its memory."""
    full = round(_HEIGHT * memory.total / memory.limit)
    lines = [*lines, f"{memory.total / 1e9:.1f} of {memory.limit / 1e9:.0f} GB"]
    return [
        _rect(x, y, _BOX, _HEIGHT, "#f4f4f4"),
        _rect(x, y + _HEIGHT - full, _BOX, full, fill),
        *(_text(x + 5, y + 15 + 16 * i, line, 11) for i, line in enumerate(lines)),
    ]


def _timeline(view: PlanView, y: int) -> tuple[list[str], int]:
    rows = view.timeline
    total, start, stage = sum(us for _, us in rows), 0.0, 0
    left, width = _LEFT + 170, _WIDTH - 2 * _LEFT - 260
    parts = [_text(_LEFT, y, f"one round of a micro-batch of {view.plan.micro}: {total / 1e3:.2f} ms", 13)]
    for name, us in rows:
        y += 20
        fill = _OTHER
        if name.startswith("verify"):
            fill, stage = _COLOURS[stage % len(_COLOURS)], stage + 1
        x = left + start / total * width
        parts += [
            _text(_LEFT, y + 12, name, 11),
            _rect(round(x, 1), y, round(max(1.0, us / total * width), 1), 15, fill),
            _text(round(x + us / total * width + 4, 1), y + 12, f"{us / 1e3:.2f} ms", 11),
        ]
        start += us
    return parts, y + 20


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#555555" stroke-width="0.5"/>'
    )


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
