package browser

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// maxPicture bounds a picture, in bytes.
const maxPicture = 160_000

// keep writes a picture for the documents, in at most 256 colors.
func keep(t *testing.T, name string, screenshot []byte) {
	t.Helper()
	decoded, err := png.Decode(bytes.NewReader(screenshot))
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, paletted(decoded)))
	assert.Less(t, out.Len(), maxPicture, name)
	require.NoError(t, os.WriteFile(filepath.Join(docs, name), out.Bytes(), 0o644))
}

// paletted is the picture in its 256 most frequent colors.
func paletted(m image.Image) *image.Paletted {
	counts := map[color.RGBA]int{}
	bounds := m.Bounds()
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(m.At(x, y)).(color.RGBA) }
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	all := make([]color.RGBA, 0, len(counts))
	for c := range counts {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b color.RGBA) int { return counts[b] - counts[a] })
	var palette color.Palette
	for _, c := range all[:min(len(all), 256)] {
		palette = append(palette, c)
	}
	out := image.NewPaletted(bounds, palette)
	known := map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			i, ok := known[c]
			if !ok {
				i = uint8(palette.Index(c))
				known[c] = i
			}
			out.SetColorIndex(x, y, i)
		}
	}
	return out
}
