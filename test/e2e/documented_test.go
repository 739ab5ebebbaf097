package e2e

import (
	"bytes"
	"flag"
	"image"
	"image/color/palette"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
)

var writeDocs = flag.Bool("e2e.docs", false, "write the screenshots that the documentation shows to docs/img")

// documented are the screenshots that the documentation shows, with their names in docs/img.
var documented = map[string]string{"overview-light": "overview", "lookup": "lookup"}

// writeSmall writes a PNG with at most 256 colors, which is a third of the size.
func writeSmall(path string, full []byte) error {
	from, err := png.Decode(bytes.NewReader(full))
	if err != nil {
		return err
	}
	small := image.NewPaletted(from.Bounds(), palette.Plan9)
	draw.Draw(small, from.Bounds(), from, from.Bounds().Min, draw.Src)

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
