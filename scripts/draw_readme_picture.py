"""Draw the picture of the README, `docs/results/streams_against_blocks.svg`, from the recorded rows of `stride-sweep`.

python scripts/draw_readme_picture.py
"""

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PICTURE = RESULTS / "streams_against_blocks.svg"

# Label of a row → colour, dashes, label in the picture, and how far that is moved down, in pixels.
LINES = {
    "Memora, IID": ("#1f77b4", "5 4", "Memora, shuffled blocks", 11),
    "Llama, IID": ("#6b7280", "5 4", "Llama, shuffled blocks", 0),
    "Hawk, IID": ("#d9480f", "5 4", "Hawk, shuffled blocks", 9),
    "Memora, streams": ("#1f77b4", "", "Memora, streams", -2),
    "Hawk, streams": ("#d9480f", "", "Hawk, streams", -3),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 62, 200, 46, 56
LOWEST, HIGHEST = 2.0, 3.4


def bits_per_byte(rows: list[Mapping]) -> dict[str, dict[int, float]]:
    """Label → T → held-out bits per byte, of IID training the better of its two evaluations."""
    found: dict[str, dict[int, float]] = {}
    most = max(row["bytes"] for row in rows)  # smaller sizes may be recorded too
    for row in (row for row in rows if row["bytes"] == most):
        value = row["value"]
        found.setdefault(row["label"], {})[row["stride"]] = min(value.values()) if isinstance(value, dict) else value
    return {label: dict(sorted(line.items())) for label, line in found.items()}


def draw(lines: Mapping[str, Mapping[int, float]], title: str) -> str:
    """An SVG with one line per label, T on a logarithmic axis."""
    strides = sorted({stride for line in lines.values() for stride in line})
    low, high = math.log2(strides[0]), math.log2(strides[-1])

    def x(stride: float) -> float:
        return round(LEFT + (math.log2(stride) - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(bits: float) -> float:
        return round(HEIGHT - BOTTOM - (bits - LOWEST) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in range(round(LOWEST * 5), round(HIGHEST * 5) + 1, 2):
        height = y(tick / 5)
        parts.append(f'<path d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4}" text-anchor="end">{tick / 5:.1f}</text>')
    for stride in strides:
        parts.append(f'<text x="{x(stride)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{stride}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">T, bytes between two updates</text>')
    parts.append(
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        "held-out bits per byte</text>"
    )
    for label, (colour, dashes, shown, moved) in LINES.items():
        points = [(x(stride), y(bits)) for stride, bits in lines[label].items()]
        path = "M" + "L".join(f"{across} {down}" for across, down in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dashed}/>')
        parts += [f'<circle cx="{across}" cy="{down}" r="3.5" fill="{colour}"/>' for across, down in points]
        across, down = points[-1]
        parts.append(f'<text x="{across + 12}" y="{down + 4 + moved}" fill="{colour}">{escape(shown)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = json.loads((RESULTS / "stride_sweep_small.json").read_text(encoding="utf-8"))
    PICTURE.write_text(draw(bits_per_byte(rows), "On streams, short blocks are enough"), "utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
