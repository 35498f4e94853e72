package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// leastWatch keeps a short --watch from loading the broker.
const leastWatch = 100 * time.Millisecond

// watchFlag adds --watch. 0 means that the command prints its result once.
func watchFlag(cmd *cobra.Command, interval *time.Duration) {
	durationVar(cmd.Flags(), interval, "watch", 0, "repeat until ^C, with this pause in between; 2s if you leave the `duration` out")
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
}

// checkWatch refuses an interval that is too short, or that the shell has passed as an argument.
func checkWatch(cmd *cobra.Command, interval time.Duration, args []string) error {
	if !cmd.Flags().Changed("watch") {
		return nil
	}
	if interval < leastWatch {
		return usage("--watch=%v is too short; use at least %v", interval, leastWatch)
	}
	for _, a := range args {
		if _, err := parseDuration(a); err == nil {
			return usage("%.80q is an argument, not the duration of --watch; write it as --watch=%s", a, a)
		}
	}
	// Without a limit that the user has set, it continues until ^C.
	if limit := cmd.Flag("timeout"); !limit.Changed {
		return limit.Value.Set("0")
	}
	return nil
}

// snapshot is one result of a command that can be repeated.
type snapshot struct {
	value any // nil if there is only an error
	text  func(*strings.Builder)
	err   error
}

// watch prints what take returns, again and again, until ctx ends. That is no error, unless it ends
// before the first snapshot is complete. If the first one has only an error, watch returns it; later
// errors are printed, since the broker may come back.
func (c *command) watch(ctx context.Context, interval time.Duration, take func(context.Context) snapshot) error {
	for first := true; ; first = false {
		s := take(ctx)
		switch {
		case ctx.Err() != nil && !first:
			return nil
		case first && s.value == nil:
			return s.err
		}
		if err := c.printSnapshot(s, interval, first); err != nil {
			return err
		}
		if first && ctx.Err() != nil {
			return s.err
		}
		timer := time.NewTimer(interval)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

func (c *command) printSnapshot(s snapshot, interval time.Duration, first bool) error {
	if c.structured() {
		if s.value == nil {
			s.value = map[string]any{"error": plainText(s.err)}
		}
		return c.printStructured(s.value)
	}
	var b strings.Builder
	if c.redraws {
		fmt.Fprintf(&b, "%s, every %v until ^C\n\n", when(time.Now()), interval)
	} else {
		if !first {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%s\n", when(time.Now()))
	}
	if s.value != nil {
		var own strings.Builder
		s.text(&own)
		b.WriteString(own.String())
	}
	if s.err != nil {
		fmt.Fprintf(&b, "hopback: %s\n", plainText(s.err))
	}
	text := b.String()
	if c.redraws {
		width, height := c.io.size()
		text = "\x1b[H\x1b[2J" + fitted(text, width, height)
	}
	_, err := fmt.Fprint(c.stdout.w, text)
	return err
}

// fitted cuts text to a terminal, so that its head stays visible: what needs attention is there.
func fitted(text string, width, height int) string {
	lines := strings.SplitAfter(text, "\n")
	lines = lines[:len(lines)-1] // what is behind the last line end
	if most := height - 2; most > 0 && len(lines) > most {
		lines = append(lines[:most:most], fmt.Sprintf("%s more; use a larger terminal, or name the queues\n", count(len(lines)-most, "line")))
	}
	for i, line := range lines {
		if r := []rune(line); width > 0 && len(r) > width+1 {
			lines[i] = string(r[:width-1]) + "…\n"
		}
	}
	return strings.Join(lines, "")
}
