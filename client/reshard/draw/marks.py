"""The marks of our SVG pictures: colours, fonts, texts that fit, and parts that name themselves.

Every mark carries its light colours as attributes, so that viewers without style sheets show it right. The style sheet
only adds dark colours, and names on hover and on focus. Names come from checkpoints, so all text is escaped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from reshard.errors import printable

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""The colours of Okabe and Ito, which people with any colour vision tell apart. The eighth, black, is that of text."""
REST_COLOUR = "#A6ADB5"
_STATE_COLOURS = {"fp32": 0, "exp_avg": 1, "exp_avg_sq": 2, "weight": 4, "buffer": 3, "value": 5}
"""States that nearly every checkpoint has look the same in every picture."""
_LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "muted": "#57606a", "line": "#d0d7de", "edge": "#1f2328"}
_DARK = {"paper": "#14181d", "ink": "#e6edf3", "muted": "#a0aab4", "line": "#3d444d", "edge": "#e6edf3"}
_STROKED = ("line", "edge")
_MAX_NAME_CHARS = 1_024
_MONO_EM, _SANS_EM = 0.61, 0.53
"""Widths of a character in units of the font's size: that of wide fonts of either kind."""
_DARK_PAGES = (
    '[data-theme="dark"]', '[data-jp-theme-light="false"]', '[data-md-color-scheme="slate"]', ".vscode-dark",
)  # fmt: skip
"""Pages that say themselves that they are dark: ours, JupyterLab, Material for MkDocs, VS Code."""
_LIGHT_PAGES = (
    '[data-theme="light"]', '[data-jp-theme-light="true"]', '[data-md-color-scheme="default"]', ".vscode-light",
)  # fmt: skip


def _theme(colours: dict[str, str], above: str = "") -> str:
    rules = [
        f"{above} .rl .rl-{name}{{{'stroke' if name in _STROKED else 'fill'}:{colour}}}"
        for name, colour in colours.items()
    ]
    rules.append(f"{above} .rl .rl-tip{{stroke:{colours['paper']}}}")
    return "".join(rules)


STYLE = (
    ".rl{max-width:100%;height:auto}"
    ".rl .rl-tip{visibility:hidden}"
    ".rl .rl-part:hover .rl-tip,.rl .rl-part:focus .rl-tip{visibility:visible}"
    ".rl .rl-part:focus{outline:none}"
    ".rl .rl-part:focus .rl-edge{stroke-width:2.5;stroke-opacity:1}"
    ".rl .rl-part:hover .rl-flow,.rl .rl-part:focus .rl-flow{fill-opacity:.85}"
    f"@media (prefers-color-scheme:dark){{{_theme(_DARK)}}}"
    + "".join(_theme(_LIGHT, page) for page in _LIGHT_PAGES)
    + "".join(_theme(_DARK, page) for page in _DARK_PAGES)
)
"""The style sheet of all pictures. A page that forbids styles inside of it serves this text as a file of its own."""


def markup(text: str) -> str:
    """A text as one line that neither XML nor a terminal can take for anything else."""
    return escape(printable(text, max_chars=_MAX_NAME_CHARS))


def state_colours(states: list[str], rest: str) -> dict[str, str]:
    """A colour for each tensor state; the bytes of no tensor are grey."""
    others = [s for s in states if s not in _STATE_COLOURS and s != rest]
    numbers = {s: n for s, n in _STATE_COLOURS.items() if s in states}
    free = [n for n in range(len(COLOURS)) if n not in numbers.values()] or list(range(len(COLOURS)))
    numbers |= {s: free[at % len(free)] for at, s in enumerate(others)}
    return {s: REST_COLOUR if s == rest else COLOURS[numbers[s]] for s in states}


def group_colour(number: int) -> str:
    """The colour of a rank or of a range of ranks; neighbours differ."""
    # Yellow is left to states: large areas of it cannot be told from paper.
    return COLOURS[number % (len(COLOURS) - 1)]


def fitted(text: str, width: float, size: float = 12, *, mono: bool = False, end: bool = False) -> str:
    """The text cut to a width in pixels, at its start or at its end; paths differ at their ends."""
    plain = printable(text, max_chars=_MAX_NAME_CHARS)
    most = max(4, int(width / (size * (_MONO_EM if mono else _SANS_EM))))
    if len(plain) <= most:
        return plain
    return f"…{plain[len(plain) - most + 1 :]}" if end else f"{plain[: most - 1]}…"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    ink: str = "ink",
    anchor: str = "",
    weight: str = "",
    mono: bool = False,
) -> str:
    """A line of text, escaped."""
    more = f' text-anchor="{anchor}"' if anchor else ""
    more += f' font-weight="{weight}"' if weight else ""
    more += f' font-family="{MONO}"' if mono else ""
    return (
        f'<text class="rl-{ink}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{_LIGHT[ink]}"{more}>'
        f"{markup(words)}</text>"
    )


def box(x: float, y: float, size: tuple[float, float], fill: str, *, edge: float = 0.75) -> str:
    """A filled rectangle with an outline, which tells its colour from the paper."""
    return (
        f'<rect class="rl-edge" x="{x:.2f}" y="{y:.2f}" width="{max(size[0], 0.01):.2f}" '
        f'height="{max(size[1], 0.01):.2f}" fill="{fill}" stroke="{_LIGHT["edge"]}" stroke-opacity=".55" '
        f'stroke-width="{edge:g}"/>'
    )


def outline(x: float, y: float, size: tuple[float, float], *, edge: float = 1.25) -> str:
    """A rectangle of lines only; it can be pointed at."""
    return (
        f'<rect class="rl-edge" x="{x:.2f}" y="{y:.2f}" width="{size[0]:.2f}" height="{size[1]:.2f}" '
        f'fill="none" pointer-events="all" stroke="{_LIGHT["edge"]}" stroke-width="{edge:g}"/>'
    )


def ribbon(left: tuple[float, float, float], right: tuple[float, float, float], fill: str) -> str:
    """A band from (x, top, bottom) to (x, top, bottom)."""
    (x0, top0, end0), (x1, top1, end1) = left, right
    middle = (x0 + x1) / 2
    path = (
        f"M{x0:.1f} {top0:.2f}C{middle:.1f} {top0:.2f} {middle:.1f} {top1:.2f} {x1:.1f} {top1:.2f}"
        f"V{end1:.2f}C{middle:.1f} {end1:.2f} {middle:.1f} {end0:.2f} {x0:.1f} {end0:.2f}Z"
    )
    return f'<path class="rl-flow" d="{path}" fill="{fill}" fill-opacity=".5"/>'


def line(x0: float, y0: float, x1: float, y1: float) -> str:
    """A thin rule."""
    return (
        f'<path class="rl-line" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{_LIGHT["line"]}" fill="none" '
        'stroke-width="1"/>'
    )


def arrow(x: float, y: float, length: float) -> str:
    """An arrow to the right."""
    tip = x + length
    path = f"M{x:.1f} {y:.1f}H{tip:.1f}M{tip - 6:.1f} {y - 5:.1f}L{tip:.1f} {y:.1f}L{tip - 6:.1f} {y + 5:.1f}"
    return f'<path class="rl-edge" d="{path}" stroke="{_LIGHT["edge"]}" fill="none" stroke-width="1.5"/>'


def part(marks: str, name: str, tip: tuple[float, float, float], *, focus: bool = True) -> str:
    """Marks that name themselves: to a screen reader, on hover, and on focus by keyboard.

    Args:
        marks: The drawing.
        name: Its name, not escaped.
        tip: Where the name appears: x, y and the width that it may take.
        focus: False for a part among too many, which the keyboard passes by.
    """
    x, y, width = tip
    shown = markup(fitted(name, width, 11))
    stop = f' tabindex="0" role="img" aria-label="{markup(name)}"' if focus else ""
    return (
        f'<g class="rl-part"{stop}><title>{markup(name)}</title>{marks}'
        f'<text class="rl-tip rl-ink" x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{_LIGHT["ink"]}" '
        f'stroke="{_LIGHT["paper"]}" stroke-width="5" paint-order="stroke" visibility="hidden" '
        f'pointer-events="none" aria-hidden="true">{shown}</text></g>'
    )


def picture(width: float, height: float, marks: str, *, title: str, told: str, styled: bool) -> str:
    """The whole SVG, with its title and its description."""
    style = f"<style>{STYLE}</style>" if styled else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rl" role="group" aria-label="{markup(title)}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" font-family="{SANS}">'
        f"<title>{markup(title)}</title><desc>{markup(told)}</desc>{style}"
        f'<rect class="rl-paper" width="{width:g}" height="{height:g}" rx="6" fill="{_LIGHT["paper"]}"/>\n'
        f"{marks}\n</svg>\n"
    )


# A picture that grows downwards: its marks so far, and the same in words.

MARGIN = 24.0
STACKED_BELOW = 760
"""Widths in pixels below which the target is drawn below the source."""


@dataclass
class Sheet:
    """The marks of a picture, from top to bottom."""

    width: float
    y: float = MARGIN
    """The place of the next line."""
    marks: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])
    """The picture in words, for those who do not see it."""

    @property
    def stacked(self) -> bool:
        """True if source and target do not fit beside one another."""
        return self.width < STACKED_BELOW

    @property
    def inner(self) -> float:
        """The width between the margins."""
        return self.width - 2 * MARGIN

    def add(self, *marks: str) -> None:
        """Put marks on the sheet."""
        self.marks.extend(marks)
