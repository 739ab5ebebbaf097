package pages

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/test/generated"
)

// property is a part of the JSON Schema of the configuration.
type property struct {
	Description string              `json:"description"`
	Default     any                 `json:"default"`
	Enum        []string            `json:"enum"`
	AnyOf       []property          `json:"anyOf"`
	Examples    []string            `json:"examples"`
	Items       *property           `json:"items"`
	Properties  map[string]property `json:"properties"`
}

// The page lists exactly the keys of this version.
func TestConfigurationPageIsGenerated(t *testing.T) {
	t.Parallel()
	root := readSchema(t)
	want := formatConfigurationPage(root)
	generated.Check(t, "docs/configuration.md", string(want))

	for _, key := range config.Keys() {
		if !bytes.Contains(want, []byte("| `"+key+"` |")) && !bytes.Contains(want, []byte("\n## "+key+"\n")) {
			t.Errorf("no row for %s", key)
		}
	}
}

func readSchema(t *testing.T) (root property) {
	t.Helper()
	if err := json.Unmarshal(config.Schema(), &root); err != nil {
		t.Fatal(err)
	}
	return root
}

// Each section has an example, and outrelay accepts it together with the three keys that every file needs.
func TestExamplesOfTheConfigurationPageAreValid(t *testing.T) {
	t.Parallel()
	root := readSchema(t)
	for name, section := range root.Properties {
		if section.Properties != nil && sectionExamples[name] == "" {
			t.Errorf("the section %s has no example", name)
		}
	}

	env := []string{"MONGODB_URI=mongodb://m1/shop", "KAFKA_PASSWORD=a-long-password", "ADMIN_TOKEN=a-long-token-of-operators", "COLLECTOR_TOKEN=a-token"}
	needed := map[string]string{"mongodb": "mongodb.uri=mongodb://m1/shop", "kafka": "kafka.brokers=k1:9092", "watch": "watch=shop.outbox"}
	for name, text := range sectionExamples {
		if _, ok := root.Properties[name]; !ok && name != "" {
			t.Errorf("there is no section %s", name)
		}

		set := []string{}
		for key, value := range needed {
			if !strings.HasPrefix("\n"+text, "\n"+key+":") && !strings.Contains(text, "\n"+key+":") {
				set = append(set, value)
			}
		}
		checkExample(t, text, env, set)
	}
	checkExample(t, firstFile, env, nil)
}

func checkExample(t *testing.T, text string, env, set []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, warnings, err := config.Load(file, env, set); err != nil || len(warnings) > 0 {
		t.Errorf("%v %q in the example\n%s", err, warnings, text)
	}
}

// Each key that the first table names exists.
func TestFirstKeysExist(t *testing.T) {
	t.Parallel()
	rows := regexp.MustCompile(`(?m)^\| [0-9]+ \| (.*?) \|`).FindAllStringSubmatch(configurationIntro, -1)
	if len(rows) != 8 {
		t.Errorf("%d rows, want 8", len(rows))
	}
	for _, row := range rows {
		for _, name := range regexp.MustCompile("`([a-z_.]+)`").FindAllStringSubmatch(row[1], -1) {
			if !slices.ContainsFunc(config.Keys(), func(key string) bool { return key == name[1] || strings.HasPrefix(key, name[1]+".") }) {
				t.Errorf("there is no key %s", name[1])
			}
		}
	}
}

func formatConfigurationPage(root property) []byte {
	var b bytes.Buffer
	b.WriteString("<!-- Generated from outrelay.schema.json by go run ./test/regenerate -->\n" + configurationIntro)

	// First the keys without a section, then the sections.
	b.WriteString("\n## Keys without a section\n\n")
	writeExample(&b, "")
	b.WriteString(tableHead)
	for _, name := range slices.Sorted(maps.Keys(root.Properties)) {
		if p := root.Properties[name]; p.Properties == nil {
			writeRow(&b, name, p)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(root.Properties)) {
		if p := root.Properties[name]; p.Properties != nil {
			fmt.Fprintf(&b, "\n## %s\n\n", name)
			if p.Description != "" {
				fmt.Fprintf(&b, "%s\n\n", p.Description)
			}
			writeExample(&b, name)
			b.WriteString(tableHead)
			writeRows(&b, name+".", p)
		}
	}
	return b.Bytes()
}

func writeExample(b *bytes.Buffer, section string) {
	fmt.Fprintf(b, "```yaml\n%s```\n\n", sectionExamples[section])
}

const tableHead = "| key | default | reload | meaning |\n|---|---|---|---|\n"

func writeRows(b *bytes.Buffer, prefix string, p property) {
	for _, name := range slices.Sorted(maps.Keys(p.Properties)) {
		q := p.Properties[name]
		if q.Properties == nil {
			writeRow(b, prefix+name, q)
			if q.Items != nil {
				writeRows(b, prefix+name+"[].", *q.Items)
			}
			continue
		}

		if q.Description != "" {
			writeRow(b, prefix+name, q)
		}
		writeRows(b, prefix+name+".", q)
	}
}

func writeRow(b *bytes.Buffer, key string, p property) {
	value, meaning := splitDefault(p)

	if values := listValues(p); len(values) > 1 {
		last := len(values) - 1
		meaning = "`" + strings.Join(values[:last], "`, `") + "` or `" + values[last] + "`. " + meaning
		// The sentences about the values begin with them.
		for _, v := range values {
			meaning = strings.ReplaceAll(meaning, ". "+v+" ", ". `"+v+"` ")
		}
	}
	fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", key, escapeText(value), config.AppliesWhen(key), escapeText(meaning))
}

// escapeText escapes characters that would change the form of the text outside of code.
func escapeText(text string) string {
	escape := strings.NewReplacer("|", `\|`, "*", `\*`, "<", "&lt;")
	parts := strings.Split(text, "`")
	for i := 0; i < len(parts); i += 2 {
		parts[i] = escape.Replace(parts[i])
	}
	return strings.Join(parts, "`")
}

// splitDefault returns the default of a key, and its description without it.
func splitDefault(p property) (value, meaning string) {
	meaning = p.Description
	before, stated, found := strings.Cut(meaning, " Defaults to ")
	if found {
		meaning = before
	}

	switch {
	case p.Default != nil:
		text, _ := json.Marshal(p.Default)
		return "`" + strings.Trim(string(text), `"`) + "`", meaning
	case p.Properties != nil:
		return "unset", meaning
	case strings.HasSuffix(meaning, " Required."):
		return "required", strings.TrimSuffix(meaning, " Required.")
	case !found:
		// Such a key may stay empty.
		return "", meaning
	}

	stated, rest, more := strings.Cut(strings.TrimSuffix(stated, "."), "; ")
	if more {
		meaning += " " + strings.ToUpper(rest[:1]) + rest[1:] + "."
	}
	if literal := !strings.ContainsAny(stated, " :") && stated != "none" && stated != "empty"; literal {
		stated = "`" + stated + "`"
	}
	return stated, meaning
}

// listValues returns the values that a key may have, if only certain ones are allowed.
func listValues(p property) []string {
	for _, c := range append([]property{p}, p.AnyOf...) {
		if len(c.Enum) > 0 {
			return c.Enum
		}
	}
	return p.Examples
}
