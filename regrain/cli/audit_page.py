"""The page of an audit: one HTML file that holds all of it, figures included, and asks for nothing else."""

import html
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import loader
from regrain.cli import order_plot

BESIDE: Final = 4
EPOCH_ROWS: Final = 20
BARS: Final = 200
RED, ORANGE = (
    "#d55e00",
    "#e69f00",
)  # with plot_order's colours, told apart in every colour blindness

#: The page can ask for nothing, whatever stands in it.
POLICY: Final = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)
STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.verdict { display: inline-block; padding: .2rem .7rem; border-radius: .3rem; font-weight: 600; }
.clean { background: #e3f2ea; color: #0b5d36; } .found { background: #fbe6dc; color: #8f3200; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
th { font-weight: 600; color: #555; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.at-fault td { background: #fdf3ee; } tr.at-fault td:first-child { font-weight: 600; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { color: #555; font-size: .9rem; }
ul { margin: .3rem 0; padding-left: 1.2rem; }
"""

EXPLAINED: Final = {
    "membership": "IDs that do not belong: of no record, of an excluded one, or of padding that is counted",
    "multiplicity": "records that came more than once in an epoch",
    "omissions": "records that were due and did not come; final batches against the policy",
    "order": "records that came elsewhere than the order derived again has them; other batch borders",
    "alignment": "records whose fields are not those of their ID in the source, or that the alignment function rejects",
}


def page(title: str, pipeline: loader.Pipeline, report: loader.AuditReport) -> str:
    """The whole page."""
    verdict = "clean" if report.clean else f"found: {', '.join(report.found)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        POLICY,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="data:,"><title>Audit of {text(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>Audit of {text(title)}</h1>",
        f'<p class="verdict {"clean" if report.clean else "found"}">{text(verdict)}</p>',
        f"<p>{text(settings(pipeline.config))}</p>",
        "<h2>Findings</h2>",
        findings(report),
        *offenders(report),
        "<h2>Covered</h2>",
        f"<ul>{''.join(f'<li>{text(line)}</li>' for line in covered(report))}</ul>",
        *figures(pipeline, report),
        "<h2>Counts of each epoch</h2>",
        epochs(report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def covered(report: loader.AuditReport) -> Iterator[str]:
    """What the audit looked at, and what not, in lines."""
    seen = report.coverage
    first = seen.first_epoch
    passed = ("skipped", "dropped")
    count = sum(
        sum(epoch.left_out.get(cause, 0) for cause in passed) < seen.num_records
        for epoch in report.epochs
    )
    last = report.epochs[-1].epoch if report.epochs else first
    which = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    yield (
        f"{which}: {seen.records:,} deliveries of {seen.num_records:,} records, in {seen.batches:,} "
        f"batches, beside {seen.padding:,} slots of padding"
        + (f"; {count} epochs have batches" if count not in (0, last - first + 1) else "")
    )
    for cause, records in report.left_out.items():
        some = ", ".join(map(repr, report.left_out_sample.get(cause, ())[:8]))
        more = ", …" if records > len(report.left_out_sample.get(cause, ())[:8]) else ""
        yield f"left out as configured: {cause}, {records:,} (ID {some}{more})"
    if seen.compared:
        yield f"fields compared with the source, bit for bit: {', '.join(seen.fields)}, of {seen.compared:,} deliveries"
    if seen.judged:
        yield f"the alignment function looked at {seen.judged:,} deliveries"
    yield from seen.notes


def settings(config: loader.PipelineConfig) -> str:
    """The config in a line."""
    return ", ".join(f"{name} {value}" for name, value in config.to_dict().items() if value != [])


def text(value: object) -> str:
    """Safe to stand in HTML."""
    return html.escape(str(value))


def table(headings: Iterable[str], rows: Iterable[tuple[bool, list[Any]]]) -> str:
    """A table; numbers are put to the right, and rows at fault are marked."""
    lines = []
    numeric: set[int] = set()
    for at_fault, cells in rows:
        numeric |= {i for i, cell in enumerate(cells) if isinstance(cell, int)}
        tds = "".join(
            f'<td class="number">{cell:,}</td>'
            if isinstance(cell, int)
            else f"<td>{text(cell)}</td>"
            for cell in cells
        )
        lines.append(f'<tr class="at-fault">{tds}</tr>' if at_fault else f"<tr>{tds}</tr>")
    heads = "".join(
        f'<th class="number">{text(heading)}</th>' if i in numeric else f"<th>{text(heading)}</th>"
        for i, heading in enumerate(headings)
    )
    body = "\n".join(lines)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def findings(report: loader.AuditReport) -> str:
    """The five findings as a table."""
    rows = []
    for finding in report.findings:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in finding.causes.items())
        first = "" if finding.first is None else str(finding.first)
        rows.append(
            (
                finding.count > 0,
                [finding.name, finding.count, causes or EXPLAINED[finding.name], first],
            )
        )
    return table(("finding", "count", "what", "first"), rows)


def offenders(report: loader.AuditReport) -> Iterator[str]:
    """A sample of the places at fault, if there are any."""
    if report.clean:
        return
    yield "<h2>Places at fault, the first of each finding</h2>"
    rows: list[tuple[bool, list[Any]]] = [
        (
            False,
            [
                finding.name,
                place.epoch,
                place.step,
                place.place,
                repr(place.id),
                "" if place.expected is None else repr(place.expected),
                place.field or "",
                place.cause,
            ],
        )
        for finding in report.findings
        for place in finding.sample
    ]
    yield table(("finding", "epoch", "step", "place", "ID", "due", "field", "cause"), rows)


def epochs(report: loader.AuditReport) -> str:
    """The counts of the epochs as a table."""
    chosen = report.epochs
    if len(chosen) > EPOCH_ROWS:
        wrong = [epoch for epoch in chosen if epoch.again or epoch.omitted or epoch.misplaced]
        chosen = tuple(
            sorted(
                {e.epoch: e for e in (*wrong[:EPOCH_ROWS], *chosen[: EPOCH_ROWS // 2])}.values(),
                key=lambda e: e.epoch,
            )
        )
    rows: list[tuple[bool, list[Any]]] = [
        (
            bool(epoch.again or epoch.omitted or epoch.misplaced),
            [
                epoch.epoch,
                epoch.distinct,
                epoch.again,
                epoch.misplaced,
                epoch.omitted,
                sum(epoch.left_out.values()),
                epoch.ahead,
            ],
        )
        for epoch in chosen
    ]
    headings = ("epoch", "records", "again", "elsewhere", "never", "left out", "ahead")
    rest = len(report.epochs) - len(chosen)
    return table(headings, rows) + (
        f"<p>{rest:,} more epochs are in audit.json.</p>" if rest else ""
    )


def figures(pipeline: loader.Pipeline, report: loader.AuditReport) -> Iterator[str]:
    """The figures, each with what it shows."""
    mpl.rcdefaults()  # the user's own style would make another page of the same command
    total = len(pipeline.source)
    some = [epoch.epoch for epoch in report.epochs[:BESIDE]]
    if some:
        at_fault = marks(pipeline, report)
        faulty = [epoch for epoch in at_fault if epoch not in some]
        first = min(at_fault, default=some[0])
        yield "<h2>Order</h2>"
        kind = (
            "each record is a point" if total <= order_plot.POINTS_UP_TO else "density of records"
        )
        yield figure(
            order_figure(pipeline.config, total, [first], at_fault),
            f"Epoch {first}: position against row, as derived from the config; {kind}. Dotted lines "
            "are batch borders, the shaded strip is a final batch that is not full; marks at the upper "
            "edge show where records at fault, the first of each finding, were due.",
            "order",
        )
        if len(some) > 1:
            yield "<h2>Epochs beside each other</h2>"
            shown = sorted({*some[: BESIDE - len(faulty[:1])], *faulty[:1]})
            yield figure(
                order_figure(pipeline.config, total, shown, at_fault),
                "The same records in each epoch, as derived from the config; what is alike across epochs would show.",
                "epochs",
            )
    yield "<h2>Coverage</h2>"
    yield figure(
        coverage_figure(report, total),
        "Records of each epoch: those that came, those left out as configured, and those that "
        "should have come and did not. All of a bar is the source.",
        "coverage",
    )


def marks(pipeline: loader.Pipeline, report: loader.AuditReport) -> dict[int, list[int]]:
    """By epoch, the positions at which the records that are at fault, or did not come, were due."""
    found: dict[int, list[int]] = {}
    total, config = len(pipeline.source), pipeline.config
    if config.shuffle == "permutation" and total > order_plot.PLAIN_NUMBERS_UP_TO:
        return found  # each would take the whole order of an epoch
    provenance = loader.provenance(pipeline)
    for place in (place for finding in report.findings for place in finding.sample):
        try:
            row = provenance.row_of(place.id if place.expected is None else place.expected)
        except (KeyError, ValueError):
            continue
        position = loader.position_of(row, total, config.seed, place.epoch, config.shuffle)
        found.setdefault(place.epoch, []).append(position)
    return found


def order_figure(
    config: loader.PipelineConfig, total: int, which: list[int], at_fault: dict[int, list[int]]
) -> Figure:
    """Epochs beside each other."""
    size = (9, 4.2) if len(which) == 1 else (9, 0.7 + 8.4 / len(which))
    made, panels = plt.subplots(
        1, len(which), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    panel: Axes
    for panel, epoch in zip(panels[0], which, strict=True):
        if len(which) == 1 or total <= order_plot.POINTS_UP_TO:
            order_plot.draw_epoch(panel, config, total, epoch)
        else:
            draw_small_density(panel, config, total, epoch)
        if places := at_fault.get(epoch):
            # Along the upper edge: y counts in heights of the panel.
            panel.plot(
                places,
                [1.0] * len(places),
                "v",
                color=RED,
                clip_on=False,
                markersize=6,
                transform=panel.get_xaxis_transform(),
            )
        panel.set_title(f"epoch {epoch}", loc="left" if len(which) == 1 else "center", fontsize=10)
        panel.set_xlabel("position in epoch")
        if len(which) > 1:
            panel.set_title("", loc="right")
            panel.locator_params(axis="x", nbins=3)
        if total <= order_plot.PLAIN_NUMBERS_UP_TO:
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.yaxis.set_major_formatter("{x:,.0f}")
    panels[0, 0].set_ylabel("row of the record")
    return made


def draw_small_density(panel: Axes, config: loader.PipelineConfig, total: int, epoch: int) -> None:
    """As plot_order's density, in coarser cells and without a scale, for a small panel."""
    order = order_plot.order_of(config, total, epoch)
    counts = order_plot.density(order, total)
    block = math.ceil(len(counts) / 32)
    low = np.arange(0, len(counts), block)
    cells = np.diff(np.append(low, len(counts)))
    counts = np.add.reduceat(np.add.reduceat(counts, low, axis=0), low, axis=1)
    counts = counts / np.outer(cells, cells)
    order_plot.show_density(panel, counts, total)


def coverage_figure(report: loader.AuditReport, total: int) -> Figure:
    """A bar for each epoch, of what became of its records."""
    shown = report.epochs[:BARS]
    made, panel = plt.subplots(figsize=(9, 3.2), layout="constrained")
    base = np.zeros(len(shown))
    parts = (
        ("came", order_plot.BLUE, [epoch.distinct for epoch in shown]),
        ("left out as configured", "#d9c48a", [sum(e.left_out.values()) for e in shown]),
        ("ahead", "#dddddd", [epoch.ahead for epoch in shown]),
        ("never came", RED, [epoch.omitted for epoch in shown]),
    )
    at = np.arange(len(shown))
    for label, colour, counts in parts:
        if any(counts):
            panel.bar(at, counts, bottom=base, color=colour, label=label, width=0.8)
        base += np.array(counts, float)
    again = np.array([epoch.again for epoch in shown], float)
    if again.any():
        panel.bar(at, again, bottom=base, color=ORANGE, label="came again", width=0.8)
    step = max(1, math.ceil(len(shown) / 12))
    panel.set_xticks(at[::step], [str(epoch.epoch) for epoch in shown[::step]])
    more = len(report.epochs) - len(shown)
    panel.set_xlabel(f"epoch (and {more:,} more)" if more else "epoch")
    panel.set_ylabel("records")
    panel.set_ylim(0, total * 1.02 + again.max(initial=0))
    panel.set_xlim(-0.6, max(len(shown), 4) - 0.4)
    if total <= order_plot.PLAIN_NUMBERS_UP_TO:
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.spines[["top", "right"]].set_visible(False)
    if shown:
        panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False)
    return made


def figure(made: Figure, caption: str, name: str) -> str:
    """A figure inlined as SVG, with nothing in it that differs from run to run."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": f"regrain-{name}", "svg.fonttype": "path"}):
        made.savefig(buffer, format="svg", dpi=110, metadata=nothing)
    plt.close(made)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    # One document holds several figures: what they call epoch-0 must differ.
    svg = svg.replace('id="', f'id="{name}-').replace('href="#', f'href="#{name}-')
    svg = svg.replace("url(#", f"url(#{name}-")
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"
