package main

import (
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"net/url"
	"runtime/debug"
	"strings"
)

// bill is a software bill of materials in the CycloneDX 1.6 format. It lists the modules that the
// linker has recorded in this program. It holds no time, so that the same build gives the same bill.
type bill struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   billMeta    `json:"metadata"`
	Components []component `json:"components"`
}

type billMeta struct {
	Component component `json:"component"`
}

type component struct {
	Ref     string `json:"bom-ref"`
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version"`
	PURL    string `json:"purl"`
	Hashes  []hash `json:"hashes,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

// newBill returns the bill of the program that build and info describe. The Go standard library is its
// first component.
func newBill(build build, info *debug.BuildInfo) bill {
	main := moduleComponent("application", info.Main.Path, build.Version, "")
	out := bill{Format: "CycloneDX", Spec: "1.6", Version: 1, Metadata: billMeta{main}, Components: []component{
		moduleComponent("library", "std", strings.TrimPrefix(cmp.Or(info.GoVersion, build.Go), "go"), ""),
	}}

	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		out.Components = append(out.Components, moduleComponent("library", d.Path, d.Version, d.Sum))
	}
	return out
}

// moduleComponent returns the component of a Go module. sum has the format of go.sum: "h1:" and the
// base64 of a SHA-256 over the files of the module.
func moduleComponent(kind, path, version, sum string) component {
	parts := strings.Split(path, "/")
	for i := range parts {
		parts[i] = url.PathEscape(parts[i])
	}

	purl := "pkg:golang/" + strings.Join(parts, "/") + "@" + url.PathEscape(version)
	component := component{Ref: purl, Type: kind, Name: path, Version: version, PURL: purl}
	if raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:")); err == nil && len(raw) == 32 {
		component.Hashes = []hash{{"SHA-256", hex.EncodeToString(raw)}}
	}
	return component
}
