package main

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// platforms are those of the binaries that a release offers.
var platforms = []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64"}

// buildArtifacts writes what a release on GitHub offers into a new folder: the command for each
// platform, a bill of materials for each binary, and the checksums of all. env installs from the
// packed modules, so the binaries are those of "go install" with the version.
func buildArtifacts(ctx context.Context, dir string, env []string, version string, at time.Time, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	path := filepath.Join(dir, "gopath")
	// go install refuses GOBIN for other platforms.
	env = slices.DeleteFunc(slices.Clone(env), func(v string) bool { return strings.HasPrefix(v, "GOBIN=") })
	env = append(env, "GOBIN=", "GOPATH="+path, "CGO_ENABLED=0")
	for _, platform := range platforms {
		goos, goarch, _ := strings.Cut(platform, "/")
		if _, err := output(ctx, dir, append(env, "GOOS="+goos, "GOARCH="+goarch), "go", "install", "-trimpath", "-ldflags=-s -w", modulePath("cmd/hopback")+"@"+version); err != nil {
			return err
		}
		suffix := ""
		if goos == "windows" {
			suffix = ".exe"
		}
		built := filepath.Join(path, "bin", goos+"_"+goarch, "hopback"+suffix)
		if _, err := os.Stat(built); err != nil { // this machine's own platform
			built = filepath.Join(path, "bin", "hopback"+suffix)
		}
		name := filepath.Join(to, fmt.Sprintf("hopback_%s_%s_%s", version, goos, goarch))
		if err := os.Rename(built, name+suffix); err != nil {
			return err
		}
		if err := writeSBOM(name+suffix, name+".cdx.json", at); err != nil {
			return err
		}
		fmt.Printf("built      %s\n", name+suffix)
	}
	return writeChecksums(to, fmt.Sprintf("hopback_%s_SHA256SUMS", version))
}

// writeSBOM writes the bill of materials of a Go binary, in CycloneDX: the modules that are linked into
// it, by what the linker has noted. at is the time in it: with that of the commit, the same commit makes
// the same file.
func writeSBOM(binary, to string, at time.Time) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	bom, err := bomOf(info, at)
	if err != nil {
		return fmt.Errorf("%s: %w", binary, err)
	}
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	encoder := cdx.NewBOMEncoder(f, cdx.BOMFileFormatJSON).SetPretty(true)
	if err := encoder.EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return err
	}
	return f.Close()
}

func bomOf(info *debug.BuildInfo, at time.Time) (*cdx.BOM, error) {
	program, err := componentOf(cdx.ComponentTypeApplication, &info.Main)
	if err != nil {
		return nil, err
	}
	var properties []cdx.Property
	for _, s := range info.Settings {
		if slices.Contains([]string{"GOOS", "GOARCH", "CGO_ENABLED", "-trimpath", "-ldflags"}, s.Key) {
			properties = append(properties, cdx.Property{Name: "build:" + s.Key, Value: s.Value})
		}
	}
	program.Properties = &properties
	library := strings.TrimPrefix(info.GoVersion, "go")
	components := []cdx.Component{{
		BOMRef: purl("std", library), Type: cdx.ComponentTypeLibrary, Name: "std", Version: library, PackageURL: purl("std", library),
		Description: "Go's standard library",
	}}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c, err := componentOf(cdx.ComponentTypeLibrary, m)
		if err != nil {
			return nil, err
		}
		components = append(components, c)
	}
	// Go doesn't note which module requires which.
	var all []string
	for _, c := range components {
		all = append(all, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: at.UTC().Format(time.RFC3339), Component: &program}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: program.BOMRef, Dependencies: &all}}
	return bom, nil
}

func componentOf(kind cdx.ComponentType, m *debug.Module) (cdx.Component, error) {
	c := cdx.Component{BOMRef: purl(m.Path, m.Version), Type: kind, Name: m.Path, Version: m.Version, PackageURL: purl(m.Path, m.Version)}
	if m.Sum != "" {
		// The checksum of go.sum: of a module's files, not of its archive.
		sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
		if err != nil || !strings.HasPrefix(m.Sum, "h1:") || len(sum) != sha256.Size {
			return c, fmt.Errorf("%s has the checksum %q, which isn't one of go.sum", m.Path, m.Sum)
		}
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}}
	}
	return c, nil
}

// purl is the package URL of a Go module, which has its path in lower case.
func purl(path, version string) string {
	return "pkg:golang/" + strings.ToLower(path) + "@" + strings.ReplaceAll(version, "+", "%2B")
}

// writeChecksums writes the SHA-256 of each file in a folder, as sha256sum -c reads them.
func writeChecksums(dir, name string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&lines, "%x  %s\n", sha256.Sum256(content), e.Name())
	}
	return os.WriteFile(filepath.Join(dir, name), []byte(lines.String()), 0o644)
}
