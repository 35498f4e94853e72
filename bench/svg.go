package main

import (
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"strings"
)

// writeSVG draws how many times as fast hopback is as its peers: a bar for the
// median of each ratio, with a whisker from the least to the most, on a logarithmic
// scale.
func (r *report) writeSVG(path string) error {
	type group struct {
		title string
		bars  []ratio
	}
	var groups []group
	rows, most, least := 0, 2.0, 0.7
	for _, res := range r.Results {
		if !res.drawn {
			continue
		}
		g := group{title: res.Title}
		for _, q := range res.Ratios {
			g.bars = append(g.bars, q)
			most, least = max(most, q.Times.Max), min(least, q.Times.Min)
		}
		if len(g.bars) > 0 {
			groups = append(groups, g)
			rows += len(g.bars)
		}
	}
	const width, left, right, row, head = 860.0, 330.0, 90.0, 20.0, 30.0
	height := 74 + float64(rows)*row + float64(len(groups))*head
	lo, hi := math.Log(least/1.1), math.Log(most*1.1)
	x := func(v float64) float64 { return left + (math.Log(v)-lo)/(hi-lo)*(width-left-right) }
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-label="how many times as fast hopback is as its peers">`, width, height, width, height)
	p(`<style>
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .group { font-weight: 600 }
  .small { font-size: 11px; fill: #59636e }
  .grid { stroke: #d1d9e0 }
  .one { stroke: #59636e; stroke-dasharray: 3 3 }
  .ahead { fill: #2f7ed8 }
  .behind { fill: #d97706 }
  .whisker { stroke: #1f2328; stroke-width: 1.2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .small { fill: #9198a1 }
    .grid { stroke: #3d444d }
    .one { stroke: #9198a1 }
    .ahead { fill: #4c9be8 }
    .behind { fill: #e8a04c }
    .whisker { stroke: #f0f6fc }
  }
</style>`)
	p(`<text class="title" x="12" y="22">How many times as fast hopback is</text>`)
	p(`<text class="small" x="12" y="40">%s, %d cores shared with the broker, which was reached %s; medians of ratios in one run, whiskers: least and most; logarithmic</text>`, escape(r.Broker), r.Machine.Cores, escape(strings.Join(r.Reached[:min(1, len(r.Reached))], "")))
	for _, v := range []float64{0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200} {
		if math.Log(v) < lo || math.Log(v) > hi {
			continue
		}
		class := "grid"
		if v == 1 {
			class = "one"
		}
		p(`<line class="%s" x1="%.1f" y1="52" x2="%.1f" y2="%.1f"/>`, class, x(v), x(v), height-18)
		p(`<text class="small" x="%.1f" y="%.1f" text-anchor="middle">x%g</text>`, x(v), height-5, v)
	}
	y := 52.0
	for _, g := range groups {
		p(`<text class="group" x="12" y="%.1f">%s</text>`, y+19, escape(g.title))
		y += head
		for _, q := range g.bars {
			s, mid := q.Times, y+row/2
			class, from, to := "ahead", x(1), x(s.Median)
			if s.Median < 1 {
				class, from, to = "behind", to, from
			}
			p(`<text x="%.1f" y="%.1f" text-anchor="end">%s</text>`, left-10, mid+4, escape(strings.TrimPrefix(q.Ours, "hopback ")+" / "+q.Peer))
			p(`<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="12" rx="2"/>`, class, from, mid-6, max(to-from, 1))
			p(`<path class="whisker" fill="none" d="M%.1f %.1fH%.1fM%.1f %.1fv8M%.1f %.1fv8"/>`, x(s.Min), mid, x(s.Max), x(s.Min), mid-4, x(s.Max), mid-4)
			p(`<text x="%.1f" y="%.1f">x%s</text>`, x(max(s.Max, 1))+8, mid+4, short(s.Median))
			y += row
		}
	}
	p(`</svg>`)
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}
