package opspage

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
)

// htmx and uPlot are vendored as their npm packages have them, with their licences beside them.
//
//go:embed static templates
var files embed.FS

// assets serves files of the binary. An address that has the hash of its file never changes its content.
type assets struct {
	content map[string][]byte // by path below /static/
	hash    map[string]string
}

func loadAssets() *assets {
	a := &assets{content: map[string][]byte{}, hash: map[string]string{}}
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
		a.content[name], a.hash[name] = text, hex.EncodeToString(sum[:6])
		return nil
	}) // of files in memory: it cannot fail
	return a
}

// link is the address of a file.
func (a *assets) link(name string) string { return "/static/" + name + "?v=" + a.hash[name] }

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
	t := mime.TypeByExtension(path.Ext(name))
	switch path.Ext(name) { // not left to what the machine knows of types
	case ".js":
		t = "text/javascript; charset=utf-8"
	case ".css":
		t = "text/css; charset=utf-8"
	case ".svg":
		t = "image/svg+xml"
	case "":
		t = "text/plain; charset=utf-8"
	}
	w.Header().Set("Content-Type", t)
	_, _ = w.Write(text)
}
