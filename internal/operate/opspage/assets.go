package opspage

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
)

// htmx and uPlot are vendored unchanged from their npm packages, with their licenses.
//
//go:embed static templates
var files embed.FS

// assets serves embedded files. A link contains the hash of its file, so its content never changes.
type assets struct {
	content map[string][]byte // by path below /static/
	hash    map[string]string
}

func loadAssets() *assets {
	a := &assets{content: map[string][]byte{}, hash: map[string]string{}}

	// Walking embedded files cannot fail.
	_ = fs.WalkDir(files, "static", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := files.ReadFile(p)
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(p, "static/")
		sum := sha256.Sum256(text)
		a.content[name] = text
		a.hash[name] = hex.EncodeToString(sum[:6])
		return nil
	})
	return a
}

// link returns the address of a file.
func (a *assets) link(name string) string { return "/static/" + name + "?v=" + a.hash[name] }

// mediaTypes are the types of the files. They do not depend on the configuration of the machine.
var mediaTypes = map[string]string{
	".js":  "text/javascript; charset=utf-8",
	".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml",
	"":     "text/plain; charset=utf-8",
}

func (a *assets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/static/")
	text, ok := a.content[name]
	if !ok {
		http.NotFound(w, r)
		return
	}

	if r.URL.Query().Get("v") == a.hash[name] {
		w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	}
	w.Header().Set("Content-Type", mediaTypes[path.Ext(name)])
	_, _ = w.Write(text)
}
