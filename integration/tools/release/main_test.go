package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"golang.org/x/mod/modfile"
)

// The pages of the repository itself become those of a release, once.
func TestPagesOfARelease(t *testing.T) {
	top := t.TempDir()
	for _, name := range []string{"README.md", "CHANGELOG.md"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(top, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if dated, err := checkChangelog(top, "v9.9.0"); dated || err != nil {
		t.Fatal(dated, err)
	}
	for range 2 { // a second time changes nothing
		if err := writePages(top, "v9.9.0", time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)); err != nil {
			t.Fatal(err)
		}
		if dated, err := checkChangelog(top, "v9.9.0"); !dated || err != nil {
			t.Fatal(dated, err)
		}
		changelog, _ := os.ReadFile(filepath.Join(top, "CHANGELOG.md"))
		readme, _ := os.ReadFile(filepath.Join(top, "README.md"))
		for text, want := range map[string]int{"\n## [9.9.0] - 2026-12-01\n": 1, "\n## [Unreleased]\n": 1, "\n[9.9.0]: https://": 1} {
			if n := strings.Count(string(changelog), text); n != want {
				t.Errorf("CHANGELOG.md has %q %d times", text, n)
			}
		}
		for text, want := range map[string]int{"go get github.com/hopback/hopback@v9.9.0\n": 1, "The newest version is v9.9.0.": 1, "tagged yet": 0, "-replace": 0} {
			if n := strings.Count(string(readme), text); n != want {
				t.Errorf("README.md has %q %d times", text, n)
			}
		}
	}
}

// A bill of materials names the program, Go's standard library, and each module that is linked into the
// binary, with the version and the checksum of go.sum. The same binary makes the same file.
func TestSBOM(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "release")
	build := exec.Command("go", "build", "-trimpath", "-o", binary, ".")
	build.Env = append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	at := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	var texts []string
	for _, name := range []string{"one.json", "two.json"} {
		if err := writeSBOM(binary, filepath.Join(dir, name), at); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	if texts[0] != texts[1] {
		t.Error("two files for one binary")
	}
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(strings.NewReader(texts[0]), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	if bom.BOMFormat != "CycloneDX" || bom.SpecVersion != cdx.SpecVersion1_6 || bom.Metadata.Timestamp != "2026-12-01T12:00:00Z" || bom.Metadata.Component.Name != "github.com/hopback/hopback/integration/tools" {
		t.Errorf("%s", texts[0])
	}
	text, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile("../go.sum")
	if err != nil {
		t.Fatal(err)
	}
	required := map[string]string{"std": strings.TrimPrefix(runtime.Version(), "go")}
	for _, r := range mod.Require {
		required[r.Mod.Path] = r.Mod.Version
	}
	found := map[string]bool{}
	for _, c := range *bom.Components {
		found[c.Name] = true
		if required[c.Name] != c.Version || c.PackageURL != "pkg:golang/"+strings.ToLower(c.Name)+"@"+c.Version || c.BOMRef != c.PackageURL {
			t.Errorf("%+v, and go.mod requires %s", c, required[c.Name])
		}
		if c.Name != "std" && (c.Hashes == nil || len((*c.Hashes)[0].Value) != 64 || !strings.Contains(string(sums), c.Name+" "+c.Version+" h1:")) {
			t.Errorf("%s has no checksum", c.Name)
		}
	}
	if !found["std"] || !found["golang.org/x/mod"] || !found["github.com/CycloneDX/cyclonedx-go"] || found["honnef.co/go/tools"] {
		t.Error(found, "isn't what is linked into the binary")
	}
	if err := writeSBOM(filepath.Join(dir, "one.json"), filepath.Join(dir, "none"), at); err == nil {
		t.Error("a file that isn't a Go binary has no bill of materials")
	}
}

// The checksums are those of sha256sum, of all files in the folder.
func TestChecksums(t *testing.T) {
	dir := t.TempDir()
	want := ""
	for _, name := range []string{"a", "b.exe"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		want += fmt.Sprintf("%x  %s\n", sha256.Sum256([]byte(name)), name)
	}
	if err := writeChecksums(dir, "SHA256SUMS"); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if err != nil || string(got) != want {
		t.Fatalf("%v\n%s", err, got)
	}
	if _, err := exec.LookPath("sha256sum"); err == nil {
		check := exec.Command("sha256sum", "-c", "SHA256SUMS")
		check.Dir = dir
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}
