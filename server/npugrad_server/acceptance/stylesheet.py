"""The style sheet of the HTML report: light, dark and print."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1a1d21; --faint: #5d6672; --rule: #d9dee4; --shade: #f4f6f8;
  --good: #1a6e3c; --bad: #b3261e; --bad-shade: #fdecea; --warn: #7a4d00; --warn-shade: #ffd34d;
  --s0: #2f6db5; --s1: #d9822b; --s2: #4a9d7c; --s3: #8a63b8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --ink: #e4e7eb; --faint: #9aa4b0; --rule: #343b44; --shade: #1e2329;
    --good: #62c98a; --bad: #ff8a80; --bad-shade: #3a1f1e; --warn: #1a1300; --warn-shade: #e0b23a;
    --s0: #6ea8ec; --s1: #f0a35e; --s2: #6cc4a1; --s3: #b694e0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 1140px; margin: 0 auto; padding: 24px 24px 64px; }
h1 { font-size: 22px; font-weight: 600; margin: 0; }
h2 { font-size: 19px; margin: 40px 0 8px; padding-top: 16px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 6px 0; max-width: 75ch; }
a { color: inherit; }
.simulated {
  background: var(--warn-shade); color: var(--warn); text-align: center; padding: 14px 24px;
  border-bottom: 4px solid var(--warn);
}
.simulated strong { display: block; font-size: 52px; line-height: 1.1; letter-spacing: 0.12em; }
.verdict { font-size: 34px; font-weight: 700; margin: 4px 0; }
.faint, caption { color: var(--faint); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.none { color: var(--faint); }
.outcome { font-weight: 600; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; margin: 8px 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td {
  text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
}
th { font-weight: 600; color: var(--faint); font-size: 13px; }
td.number, th.number { text-align: right; white-space: nowrap; }
td { overflow-wrap: break-word; }
table.figures { font-size: 13px; }
table.figures th, table.figures td { padding-right: 10px; }
table.checks { table-layout: fixed; }
table.checks td { overflow-wrap: anywhere; }
td.sign, th.sign { width: 1.8em; padding-right: 0; }
th.what { width: 32%; }
th.expected { width: 26%; }
tr.failed td { background: var(--bad-shade); }
.wide { overflow-x: auto; }
.failures { border-left: 4px solid var(--bad); padding-left: 16px; margin: 16px 0; }
pre {
  background: var(--shade); border: 1px solid var(--rule); padding: 10px; overflow-x: auto;
  font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
}
details > summary { cursor: pointer; color: var(--faint); margin: 8px 0; }
svg { display: block; width: 100%; max-width: 900px; height: auto; margin: 12px 0; }
svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--faint); }
svg text.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg text.figure { fill: var(--ink); }
svg text.end { text-anchor: end; }
svg text.middle { text-anchor: middle; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .mark { stroke: var(--ink); stroke-width: 2; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg polyline.s0 { stroke: var(--s0); } svg rect.s0 { fill: var(--s0); }
svg polyline.s1 { stroke: var(--s1); } svg rect.s1 { fill: var(--s1); }
svg polyline.s2 { stroke: var(--s2); } svg rect.s2 { fill: var(--s2); }
svg polyline.s3 { stroke: var(--s3); } svg rect.s3 { fill: var(--s3); }
@media print {
  :root {
    color-scheme: light;
    --page: #ffffff; --ink: #000000; --faint: #444444; --rule: #bbbbbb; --shade: #f4f4f4;
    --good: #1a6e3c; --bad: #b3261e; --bad-shade: #fdecea; --warn: #7a4d00; --warn-shade: #ffd34d;
    --s0: #2f6db5; --s1: #d9822b; --s2: #4a9d7c; --s3: #8a63b8;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  tr, svg, .failures { break-inside: avoid; }
  h2, h3, caption { break-after: avoid; }
  .wide { overflow: visible; }
  table.figures, table.figures th { font-size: 7.5pt; }
  table.figures th.number { white-space: normal; }
  details::details-content { content-visibility: visible; block-size: auto; }
  details > summary { list-style: none; }
}
"""
"""The whole style of the page; it refers to nothing outside the page."""
