package pages

import (
	"bytes"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
)

var (
	fencedBlock = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	// inlineKey is a key of the configuration with its value in the text of a page, such as `retention: 7d`. A value of capital letters
	// only is a placeholder, such as that of `slots: N`.
	inlineKey   = regexp.MustCompile("`([a-z_]+(?:\\.[a-z_]+)*): ([^`\n]+)`")
	placeholder = regexp.MustCompile(`^[A-Z]+$`)
)

// Each setting in the text of a page has a value that the key accepts.
func TestSettingsInPagesAreValid(t *testing.T) {
	t.Parallel()
	schema, root := compileSchema(t), readSchema(t)
	count := 0
	for file, text := range readPages(t) {
		for _, setting := range inlineKey.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
			names := strings.Split(setting[1], ".")
			if !root.hasKey(names) || placeholder.MatchString(setting[2]) {
				continue
			}

			count++
			if err := schema.Validate(parseSetting(t, names, setting[2])); err != nil {
				t.Errorf("%s: `%s: %s`: %v", filepath.Base(file), setting[1], setting[2], err)
			}
		}
	}
	if count < 20 {
		t.Errorf("only %d settings were found", count)
	}
}

// hasKey reports whether the configuration has the key, or the section, of these names.
func (p property) hasKey(names []string) bool {
	for _, name := range names {
		child, found := p.Properties[name]
		if !found {
			return false
		}
		p = child
	}
	return true
}

// parseSetting returns the configuration that has only this key.
func parseSetting(t *testing.T, names []string, value string) any {
	t.Helper()
	var parsed any
	if err := yaml.Unmarshal([]byte(value), &parsed); err != nil {
		t.Fatalf("%s: %s: %v", strings.Join(names, "."), value, err)
	}
	for i := len(names) - 1; i >= 0; i-- {
		parsed = map[string]any{names[i]: parsed}
	}
	return parsed
}

func compileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(config.Schema()))
	if err != nil {
		t.Fatal(err)
	}
	const id = "outrelay.schema.json"
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	if err := compiler.AddResource(id, document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile(id)
	if err != nil {
		t.Fatal(err)
	}
	return schema
}
