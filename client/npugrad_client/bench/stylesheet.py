"""The style sheet of the report's page: light, dark and on paper."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #fff; --ink: #1b1f24; --faint: #5b6571; --rule: #dbe0e6; --shade: #eef1f4;
  --good: #1a6e3c; --bad: #b3261e;
  --c0: #2b6cb0; --c1: #dd7a1f; --c2: #35946f; --c3: #8a5fb5; --c4: #97a1ad; --c5: #c0392b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e5e8ec; --faint: #9ba5b1; --rule: #343b44; --shade: #1f242a;
    --good: #62c98a; --bad: #ff8a80;
    --c0: #6ea8ec; --c1: #f0a35e; --c2: #6cc4a1; --c3: #b694e0; --c4: #6d7783; --c5: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 1000px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 17px; margin: 32px 0 8px; padding-top: 14px; border-top: 1px solid var(--rule); }
p { margin: 6px 0; max-width: 80ch; }
.faint { color: var(--faint); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.verdict { font-size: 24px; font-weight: 700; margin: 10px 0 4px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.tile { background: var(--shade); border-radius: 6px; padding: 8px 16px; min-width: 118px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: 13px; }
table {
  border-collapse: collapse; width: 100%; margin: 8px 0;
  font-variant-numeric: tabular-nums; font-size: 14px;
}
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); }
th { color: var(--faint); font-weight: 600; font-size: 13px; }
.n { text-align: right; white-space: nowrap; }
svg { width: 100%; height: auto; margin: 10px 0; }
svg text { font-size: 12px; fill: var(--faint); }
svg .title { font-size: 14px; font-weight: 600; fill: var(--ink); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .figure { fill: var(--ink); }
svg .grid { stroke: var(--rule); }
svg .shade { fill: var(--shade); }
svg .limit { stroke: var(--bad); stroke-dasharray: 6 4; }
svg text.limit { stroke: none; fill: var(--bad); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .dashed { stroke-dasharray: 5 4; }
svg .spot { opacity: 0; }
svg .spot:hover { opacity: 1; }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c1); } .line.s2 { stroke: var(--c2); }
.line.s3 { stroke: var(--c3); } .line.s4 { stroke: var(--c4); } .line.s5 { stroke: var(--c5); }
.fill.s0, .spot.s0 { fill: var(--c0); } .fill.s1, .spot.s1 { fill: var(--c1); }
.fill.s2, .spot.s2 { fill: var(--c2); } .fill.s3, .spot.s3 { fill: var(--c3); }
.fill.s4, .spot.s4 { fill: var(--c4); } .fill.s5, .spot.s5 { fill: var(--c5); }
@media print { main { max-width: none; padding: 0; } svg { break-inside: avoid; } }
"""
