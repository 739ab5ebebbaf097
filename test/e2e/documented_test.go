package e2e

import (
	"bytes"
	"cmp"
	"flag"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

var writeDocs = flag.Bool("e2e.docs", false, "save screenshots of the pages, and write the ones in the documentation to docs/img")

// documented are the screenshots that the documentation shows, with their names in docs/img.
var documented = map[string]string{
	"overview-light": "overview", "dead-1280": "dead-letters", "dead-requeue-confirm": "confirmation", "lookup": "lookup",
}

// tallest bounds the height of a picture in the documentation, in pixels. The rest of the page is cut off.
const tallest = 1000

// writeSmall writes the top of a picture with at most 256 colors, which is a third of the size.
func writeSmall(path string, full []byte) error {
	from, err := png.Decode(bytes.NewReader(full))
	if err != nil {
		return err
	}
	bounds := from.Bounds()
	bounds.Max.Y = min(bounds.Max.Y, bounds.Min.Y+tallest)
	small := image.NewPaletted(bounds, frequentColors(from, bounds))
	draw.Draw(small, bounds, from, bounds.Min, draw.Src)

	var b bytes.Buffer
	e := png.Encoder{CompressionLevel: png.BestCompression}
	if err := e.Encode(&b, small); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// frequentColors returns the 256 most frequent colors of a part of a picture. A page has few colors,
// and the shades at the edges of its letters.
func frequentColors(from image.Image, part image.Rectangle) color.Palette {
	count := map[color.RGBA]int{}
	for y := part.Min.Y; y < part.Max.Y; y++ {
		for x := part.Min.X; x < part.Max.X; x++ {
			count[color.RGBAModel.Convert(from.At(x, y)).(color.RGBA)]++
		}
	}

	colors := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B))
	})
	var palette color.Palette
	for _, c := range colors[:min(len(colors), 256)] {
		palette = append(palette, c)
	}
	return palette
}
