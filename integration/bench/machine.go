package main

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// machine is where it ran. Load is the average number of running processes in the
// minute before; zero where the system doesn't tell.
type machine struct {
	Model       string  `json:"model"`
	Cores       int     `json:"cores"`
	OS          string  `json:"os"`
	LoadAtStart float64 `json:"load_at_start"`
	LoadAtEnd   float64 `json:"load_at_end"`
}

func peekAround() machine {
	return machine{Model: cpuModel(), Cores: runtime.NumCPU(), OS: runtime.GOOS + "/" + runtime.GOARCH, LoadAtStart: loadAverage()}
}

func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown CPU"
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}

func loadAverage() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(b), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}
