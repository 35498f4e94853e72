package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"
)

// mergeReports joins what several runs on the same broker have written: a contest's
// rounds come one after the other, and ratios are worked out anew.
func mergeReports(files []string) (*report, error) {
	var all *report
	var took time.Duration
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		var r report
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		d, err := time.ParseDuration(r.Took)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		took += d
		results := r.Results
		if all == nil {
			all = &r
			all.Rounds, all.Results = 0, nil
		} else if r.Broker != all.Broker {
			return nil, fmt.Errorf("%s is of another broker than %s", name, files[0])
		} else if !slices.Equal(r.Reached, all.Reached) {
			return nil, fmt.Errorf("%s reached the broker in another way than %s", name, files[0])
		}
		all.Machine.LoadAtEnd = r.Machine.LoadAtEnd
		for _, n := range r.Notes {
			if !slices.Contains(all.Notes, n) {
				all.Notes = append(all.Notes, n)
			}
		}
		for _, res := range results {
			all.add(res)
		}
	}
	all.Took = took.String()
	for _, c := range contests() {
		for _, res := range all.Results {
			if res.Name != c.name && res.Name != c.name+behindProxy {
				continue
			}
			res.drawn = c.drawn && res.Name == c.name
			for _, p := range c.contestants {
				if res.Runs[p.name] != nil {
					res.order = append(res.order, p.name)
					all.Rounds = max(all.Rounds, len(res.Runs[p.name]))
				}
			}
			res.compare(c)
		}
	}
	return all, nil
}

// add appends res's rounds to those of the same contest. A contestant that wasn't in
// the earlier ones has none there, so that rounds stay side by side.
func (r *report) add(res *result) {
	i := slices.IndexFunc(r.Results, func(have *result) bool { return have.Name == res.Name })
	if i < 0 {
		r.Results = append(r.Results, &result{Name: res.Name, Title: res.Title, Runs: map[string][]metrics{}})
		i = len(r.Results) - 1
	}
	have := r.Results[i]
	done := 0
	for _, runs := range have.Runs {
		done = max(done, len(runs))
	}
	for name, runs := range res.Runs {
		padded := append(have.Runs[name], make([]metrics, done-len(have.Runs[name]))...)
		have.Runs[name] = append(padded, runs...)
	}
	have.Errors = append(have.Errors, res.Errors...)
	for _, name := range res.Left {
		if !slices.Contains(have.Left, name) {
			have.Left = append(have.Left, name)
		}
	}
}
