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
	base    base
	content map[string][]byte // by path below /static/
	hash    map[string]string
}

func loadAssets(base base) *assets {
	assets := &assets{base: base, content: map[string][]byte{}, hash: map[string]string{}}

	// Walking embedded files cannot fail.
	_ = fs.WalkDir(files, "static", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := files.ReadFile(path)
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, "static/")
		sum := sha256.Sum256(text)
		assets.content[name] = text
		assets.hash[name] = hex.EncodeToString(sum[:6])
		return nil
	})
	return assets
}

// link returns the address of a file.
func (a *assets) link(name string) string {
	return a.base.address("/static/" + name + "?v=" + a.hash[name])
}

// mediaTypes are the types of the files. They do not depend on the configuration of the machine.
var mediaTypes = map[string]string{
	".js":  "text/javascript; charset=utf-8",
	".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml",
	"":     "text/plain; charset=utf-8",
}

func (a *assets) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	name := strings.TrimPrefix(request.URL.Path, "/static/")
	text, ok := a.content[name]
	if !ok {
		http.NotFound(response, request)
		return
	}

	if request.URL.Query().Get("v") == a.hash[name] {
		response.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	}
	response.Header().Set("Content-Type", mediaTypes[path.Ext(name)])
	_, _ = response.Write(text)
}
