"""The page of an audit: one self-contained HTML file with findings, coverage and a picture of the order."""

import contextlib
import html
import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import loader
from regrain.cli import order_plot

RED: Final = "#d55e00"  # distinct from plot_order's colours for every form of colour blindness

#: The page loads nothing from elsewhere, whatever its text contains.
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
    "membership": "IDs of no record or of an excluded record; padding counted as a record",
    "multiplicity": "records delivered more than once in an epoch",
    "omissions": "records that were due and never came; final batches that break the policy",
    "order": "records in another place than the derived order has them; other batch borders",
    "alignment": "records whose fields differ from the source's, or that the alignment function rejects",
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
        findings(pipeline.source, report),
        *offenders(pipeline.source, report),
        "<h2>Covered</h2>",
        f"<ul>{''.join(f'<li>{text(line)}</li>' for line in covered(pipeline.source, report))}</ul>",
        *order_picture(pipeline, report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def shown(source: loader.RecordSource, record_id: int | str) -> str:
    """An ID as text, followed by the record's name if the source has one for it."""
    name = getattr(source, "name", None)
    if callable(name):
        with contextlib.suppress(LookupError, ValueError, TypeError):  # no record has this ID
            return f"{record_id!r} ({name(record_id)})"
    return repr(record_id)


def first_of(source: loader.RecordSource, finding: loader.Finding) -> str:
    """A finding's first offender in a line; empty without one."""
    first = finding.first
    if first is None:
        return ""
    return str(first).replace(f"ID {first.id!r}", f"ID {shown(source, first.id)}", 1)


def covered(source: loader.RecordSource, report: loader.AuditReport) -> Iterator[str]:
    """The audit's coverage in lines."""
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
        sample = report.left_out_sample.get(cause, ())[:8]
        some = ", ".join(shown(source, record_id) for record_id in sample)
        more = ", …" if records > len(sample) else ""
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


def findings(source: loader.RecordSource, report: loader.AuditReport) -> str:
    """The five findings as a table."""
    rows = []
    for finding in report.findings:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in finding.causes.items())
        first = first_of(source, finding)
        rows.append(
            (
                finding.count > 0,
                [finding.name, finding.count, causes or EXPLAINED[finding.name], first],
            )
        )
    return table(("finding", "count", "what", "first"), rows)


def offenders(source: loader.RecordSource, report: loader.AuditReport) -> Iterator[str]:
    """The earliest offenders of each finding, if there are any."""
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
                shown(source, place.id),
                "" if place.expected is None else shown(source, place.expected),
                place.field or "",
                place.cause,
            ],
        )
        for finding in report.findings
        for place in finding.sample
    ]
    yield table(("finding", "epoch", "step", "place", "ID", "due", "field", "cause"), rows)


def order_picture(pipeline: loader.Pipeline, report: loader.AuditReport) -> Iterator[str]:
    """One picture of the order: the first epoch with an offender, or the first epoch."""
    if not report.epochs:
        return
    mpl.rcdefaults()  # the user's own style would change the page's bytes
    total = len(pipeline.source)
    at_fault = marks(pipeline, report)
    epoch = min(at_fault, default=report.epochs[0].epoch)
    made, panel = plt.subplots(figsize=(9, 4.2), layout="constrained")
    drawn = order_plot.draw_epoch(panel, pipeline.config, total, epoch)
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
        drawn.append("marks at the upper edge show where sampled records at fault were due")
    panel.set_title(f"epoch {epoch}", loc="left", fontsize=10)
    panel.set(xlabel="position in epoch", ylabel="row of the record")
    if total <= order_plot.PLAIN_NUMBERS_UP_TO:
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:,.0f}")
    yield "<h2>Order</h2>"
    caption = f"Epoch {epoch}: position against row, derived from the config; {'; '.join(drawn)}."
    yield figure(made, caption)


def marks(pipeline: loader.Pipeline, report: loader.AuditReport) -> dict[int, list[int]]:
    """The positions where the sampled offenders were due, by epoch."""
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


def figure(made: Figure, caption: str) -> str:
    """A figure as inline SVG; its bytes do not change from run to run."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": "regrain-order", "svg.fonttype": "path"}):
        made.savefig(buffer, format="svg", dpi=110, metadata=nothing)
    plt.close(made)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", '<svg role="img" aria-label="order"', 1)
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"
