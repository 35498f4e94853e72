//go:build !js

package doctor

import (
	"bytes"
	_ "embed"
	"html/template"

	"github.com/hopback/hopback/declare/check"
)

//go:embed report.html
var page string

// pageTemplate escapes everything that comes from a broker, according to its place.
var pageTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"clean":     clean,
	"odd":       func(i int) bool { return i%2 == 1 },
	"place":     func(f check.Finding) string { return clean(place(f)) },
	"framework": func(f Framework) string { return clean(frameworkLine(f)) },
	"offer":     func() string { return centralOffer },
	"count":     count,
}).Parse(page))

// HTML returns the report as a single page that needs no other file and no network: no script, no
// font, no picture. A program for js/wasm doesn't have this method: templates would make it larger by a third.
func (r Report) HTML() []byte {
	var b bytes.Buffer
	// The template was parsed, and a buffer accepts everything.
	_ = pageTemplate.Execute(&b, map[string]any{"Report": r, "Headline": r.headline(), "Total": r.total(), "Time": r.Time.UTC().Format("2006-01-02 15:04 MST")})
	return b.Bytes()
}
