"""Comparison as one HTML file without scripts or requests; images are embedded."""

import base64
import html
from collections.abc import Iterable, Sequence

from embedder.media.contact_sheet import encode_webp
from embedder.plugins.evaluate.comparison_report import (
    ComparedAnswer,
    ComparedQuery,
    ComparedSide,
    Comparison,
    FigureDifference,
)
from embedder.quantities import money, percent, rate, size_text
from embedder.retrieval.hit import Hit
from embedder.retrieval.hits import Hits
from embedder.storage.printable import printable

MAX_TEXT = 200
WEBP_QUALITY = 75
PLOT_PX, ROW_PX, NAME_PX, FOOT_PX = 320, 26, 170, 40
MAX_GROUPS_DRAWN = 60

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --pale: #5f5f5f; --line: #d8d8d8; --paper: #fff; --good: #1a7f37;
  --bad: #c62828; --field: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --pale: #a8a8a8; --line: #444; --paper: #181818;
  --good: #57c46f; --bad: #ff7a70; --field: #242424; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; max-width: 100%; } .wide:focus-visible { outline: 2px solid var(--pale); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--pale); padding-bottom: .4rem; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-weight: normal; }
th[scope=row] { text-align: left; white-space: normal; min-width: 7rem; max-width: 16rem; overflow-wrap: anywhere; }
th[scope=col] { color: var(--pale); vertical-align: bottom; } th[scope=col]:first-child, .words { text-align: left; }
.side-table td { text-align: left; white-space: normal; min-width: 8rem; overflow-wrap: anywhere; }
.side-table th[scope=col] { text-align: left; }
.verdict { border-left: .4rem solid; padding: .6rem .9rem; background: var(--field); overflow-wrap: anywhere; }
.passed, .better { color: var(--good); } .refused, .worse { color: var(--bad); } .pale { color: var(--pale); }
.verdict span { color: var(--ink); }
.figures { display: flex; flex-wrap: wrap; gap: .8rem 2.2rem; margin: 1.2rem 0; }
.figures div { display: flex; flex-direction: column-reverse; } .figures dt { color: var(--pale); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; display: block; margin-bottom: 1rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .pale { fill: var(--pale); }
.query { border-top: 1px solid var(--line); padding: .8rem 0; }
.sides { display: flex; flex-wrap: wrap; gap: .8rem 1.6rem; }
.sides > div > p { margin: 0 0 .2rem; color: var(--pale); font-size: .85rem; }
.images { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 84px)); gap: .4rem; }
figure { margin: 0; font-size: 11px; line-height: 1.3; overflow-wrap: anywhere; }
figure img, figure .none { box-sizing: border-box; width: 100%; aspect-ratio: 1; object-fit: contain; display: block;
  border: 3px solid transparent; border-radius: 4px; background: #fff; }
figure .none { background: var(--line); } figure.right img, figure.right .none { border-color: var(--good); }
figcaption span { display: block; color: var(--pale); }
@media (max-width: 40rem) { body { margin: 1rem auto; } .sides > div { flex-basis: 100%; } }
"""


def page_content(found: Comparison) -> bytes:
    """Report as a file's content; images that can't be read any more are grey."""
    return page(found, thumbnails([*found.wins, *found.losses, *found.hard])).encode("utf-8", "replace")


def thumbnails(queries: Iterable[ComparedQuery]) -> dict[str, str]:
    """Image of each item that the queries show, as a data URL; none for one that can't be read."""
    answers = [each for query in queries for each in (*query.right, *query.before, *query.after)]
    shown = {each.item_id: each for each in answers if each.uri}
    hits = Hits(
        Hit(0.0, item_id, 0, "image", each.uri, each.at_s, each.at_s, None, {}) for item_id, each in shown.items()
    )
    found = zip(shown, hits.thumbnails(), strict=True)
    return {
        item_id: "data:image/webp;base64," + base64.b64encode(encode_webp(pixels, WEBP_QUALITY)).decode()
        for item_id, pixels in found
        if pixels is not None
    }


def page(found: Comparison, images: dict[str, str]) -> str:
    """Whole report as HTML."""
    before, after = _text(found.before.name), _text(found.after.name)
    verdict = "passed" if found.passed else "refused"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        "'unsafe-inline'\">",
        f"<title>{before} against {after}</title><style>{STYLE}</style></head><body>",
        f"<main><h1>{before} <span class=pale>against</span> {after}</h1>",
        f'<p class="verdict {verdict}"><b>{verdict}</b><span>: {_text(found.verdict, 2000)}</span></p>',
        _figures(found),
        f"<p class=pale>{found.num_queries:,} queries ({_text(found.queries)}) with {found.num_answers:,} right items, "
        f"over {found.num_items:,} items that both have. Intervals of {found.confidence:.0%} confidence: paired "
        f"bootstrap over queries. Power: the probability that a true loss of {found.max_drop:g} would be shown. "
        f"Compared at {_text(found.compared_at)}.</p>",
        *(f"<p class=pale>{_text(note, 500)}</p>" for note in found.notes),
        "<h2>All queries</h2>",
        _differences(found.metrics, "metric", "Each interval holds for itself."),
        *_group_parts(found),
        "<h2>What they are</h2>",
        _sides(found.before, found.after),
        *_queries("Losses", found.losses, images),
        *_queries("Wins", found.wins, images),
        *_queries("Hard for both", found.hard, images),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _text(value: object, max_characters: int = MAX_TEXT) -> str:
    return html.escape(printable(str(value), max_characters))


def _figures(found: Comparison) -> str:
    """The main figures, in large type."""
    (judged,) = (row for row in found.metrics if row.name == found.metric)
    rows = (
        (f"{found.metric} of the first", f"{judged.before:.3f}"),
        (f"{found.metric} of the second", f"{judged.after:.3f}"),
        ("of the best ten stay", f"{found.kept_of_top_ten:.1%}"),
        ("have the same best one", f"{found.same_first:.1%}"),
        ("queries", f"{found.num_queries:,}"),
    )
    return (
        "<dl class=figures>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows) + "</dl>"
    )


def _group_parts(found: Comparison) -> list[str]:
    if len(found.groups) < 2:
        return []
    note = f"The intervals hold together; each is wider for the {len(found.groups)} comparisons."
    return [
        f"<h2>By group: {found.metric}</h2>",
        _plot(found.groups[:MAX_GROUPS_DRAWN], found.max_drop),
        _differences(found.groups, "group", note),
    ]


def _table(name: str, note: str, heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Table whose first column names the rows; on a narrow page it scrolls by itself."""
    head = "".join(f"<th scope=col>{each}</th>" for each in heads)
    rows = "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in body
    )
    return (
        f'<div class=wide role=region tabindex=0 aria-label="table of {name}s"><table class={name}-table>'
        f"<caption>{note}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _differences(rows: Sequence[FigureDifference], what: str, note: str) -> str:
    heads = (what, "queries", "first", "second", "difference", "interval", "finding", "power", "loss seen at 80 %")
    body = []
    for row in rows:
        mark = ", breaks the rule" if row.fails else ""
        interval = "" if row.verdict == "too few" else f"{row.low:+.3f} to {row.high:+.3f}"
        body.append(
            (
                _text(row.name),
                f"{row.num_queries:,}",
                f"{row.before:.3f}",
                f"{row.after:.3f}",
                f"{row.difference:+.3f}",
                interval,
                f"<span class={row.verdict.split(maxsplit=1)[0]}>{row.verdict}{mark}</span>",
                f"{row.power:.0%}",
                f"{row.detectable:.3f}",
            )
        )
    return _table(what, note, heads, body)


def _plot(rows: Sequence[FigureDifference], max_drop: float) -> str:
    """Interval of each group on one axis, as SVG, with the allowed loss."""
    judged = [row for row in rows if row.verdict != "too few"]
    reach = max([max_drop, *(abs(end) for row in judged for end in (row.low, row.high))]) * 1.05 or 1.0
    height, width = ROW_PX * len(rows) + FOOT_PX, NAME_PX + PLOT_PX + 30

    def place(value: float) -> float:
        return round(NAME_PX + PLOT_PX * (min(reach, max(-reach, value)) + reach) / (2 * reach), 1)

    foot = ROW_PX * len(rows)
    lines = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'aria-label="interval of each group; the table below has the figures">'
    ]
    for value, dash, name in ((0.0, "", "0"), (-max_drop, ' stroke-dasharray="4 3"', f"-{max_drop:g} allowed")):
        x, y = place(value), foot + (16 if not value else 32)
        lines.append(
            f'<line x1="{x}" x2="{x}" y1="0" y2="{foot}" stroke="var(--pale)"{dash}/>'
            f'<text x="{x}" y="{y}" text-anchor="middle">{name}</text>'
        )
    lines += [
        f'<text class=pale x="{place(end)}" y="{foot + 16}" text-anchor="middle">{end:+.2f}</text>'
        for end in (-reach, reach)
    ]
    for number, row in enumerate(rows):
        y = ROW_PX * number + ROW_PX // 2
        lines.append(f'<text x="0" y="{y + 4}">{_text(row.name, 26)}</text>')
        if row.verdict == "too few":
            lines.append(f'<text class=pale x="{place(0) + 8}" y="{y + 4}">too few queries</text>')
            continue
        colour = {"worse": "var(--bad)", "better": "var(--good)"}.get(row.verdict, "var(--ink)")
        lines.append(
            f'<line x1="{place(row.low)}" x2="{place(row.high)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            f'<circle cx="{place(row.difference)}" cy="{y}" r="4" fill="{colour}"/>'
        )
    return f"{''.join(lines)}</svg>"


def _sides(before: ComparedSide, after: ComparedSide) -> str:
    rows = [
        (name, *(_text(_figure(value)) for value in values))
        for name, *values in zip(
            (
                "store",
                "publication",
                "model",
                "fingerprint",
                "items",
                "vector width",
                "items a second, in its run",
                "cost of a million items",
                "memory of its run",
                "index",
                "recall@10 of the index",
                "memory of the index",
            ),
            _side(before),
            _side(after),
            strict=True,
        )
    ]
    note = "Of the run that computed the vectors, by its report, and of the index that is published."
    return _table("side", note, ("what", "first", "second"), rows)


def _figure(value: str | None) -> str:
    return "not known" if value is None else value


def _side(side: ComparedSide) -> list[str | None]:
    return [
        side.store,
        side.run_id,
        side.model,
        side.model_fingerprint,
        f"{side.num_items:,}",
        f"{side.vector_width:,}",
        None if side.items_per_s is None else f"{rate(side.items_per_s)} ({side.num_embedded or 0:,} items)",
        None if side.cost_per_million is None else money(side.cost_per_million, side.currency),
        None if side.peak_memory_bytes is None else size_text(side.peak_memory_bytes),
        "none: exact search" if side.index is None else f"{side.index}: {side.index_design}",
        None if side.index_recall_at_10 is None else percent(side.index_recall_at_10),
        None if side.index_memory_bytes is None else size_text(side.index_memory_bytes),
    ]


def _queries(title: str, queries: Sequence[ComparedQuery], images: dict[str, str]) -> list[str]:
    if not queries:
        return []
    parts = [f"<h2>{title}</h2>"]
    for query in queries:
        sides = (
            ("right", query.right),
            (f"first: place {query.rank_before:,}", query.before),
            (f"second: place {query.rank_after:,}", query.after),
        )
        shown = "".join(
            f'<div><p>{name}</p><div class=images style="--columns: {max(1, len(answers))}">'
            f"{''.join(_image(each, images) for each in answers)}</div></div>"
            for name, answers in sides
        )
        parts.append(f"<div class=query><h3>{_text(query.query, 500)}</h3><div class=sides>{shown}</div></div>")
    return parts


def _image(answer: ComparedAnswer, images: dict[str, str]) -> str:
    data = images.get(answer.item_id)
    name = _text(answer.item_id, 60)
    image = "<div class=none></div>" if data is None else f'<img alt="{name}" src="{data}">'
    score = "" if answer.score is None else f"<span>{answer.score:.3f}</span>"
    return f"<figure{' class=right' if answer.is_right else ''}>{image}<figcaption>{name}{score}</figcaption></figure>"
