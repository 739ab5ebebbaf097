package pages

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/test/generated"
)

// property is a part of the JSON Schema of the configuration.
type property struct {
	Description          string              `json:"description"`
	Default              any                 `json:"default"`
	Type                 any                 `json:"type"`
	Enum                 []string            `json:"enum"`
	Pattern              string              `json:"pattern"`
	AnyOf                []property          `json:"anyOf"`
	Items                *property           `json:"items"`
	AdditionalProperties any                 `json:"additionalProperties"`
	Properties           map[string]property `json:"properties"`
}

// The page lists exactly the keys of this version.
func TestConfigurationPageIsGenerated(t *testing.T) {
	t.Parallel()
	var root property
	if err := json.Unmarshal(config.Schema(), &root); err != nil {
		t.Fatal(err)
	}

	want := formatConfigurationPage(root)
	generated.Check(t, "docs/configuration.md", string(want))

	for _, key := range config.Keys() {
		if !bytes.Contains(want, []byte("| `"+key+"` |")) && !bytes.Contains(want, []byte("\n## "+key+"\n")) {
			t.Errorf("no row for %s", key)
		}
	}
}

func formatConfigurationPage(root property) []byte {
	var b bytes.Buffer
	b.WriteString("<!-- Generated from outrelay.schema.json by go run ./test/regenerate -->\n" + configurationIntro)

	// First the keys without a section, then the sections.
	b.WriteString("\n## Keys without a section\n\n" + tableHead)
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
			b.WriteString(tableHead)
			writeRows(&b, name+".", p)
		}
	}
	return b.Bytes()
}

const configurationIntro = `# Configuration

The smallest file that delivers:

` + "```yaml" + `
mongodb: { uri: "${env:MONGODB_URI}" }
kafka:   { brokers: [kafka-1:9092, kafka-2:9092] }
watch:   [shop.outbox]
topics:
  allow: ["outbox.event.*"] # an envelope that names another topic becomes a dead letter
  create: {}                # create missing topics with the brokers' defaults; without this line their events wait for you to create them
` + "```" + `

Each key can be set in the file, in the environment (` + "`lease.ttl` is `OUTRELAY_LEASE_TTL`" + `) or by a flag (` + "`--set lease.ttl=2s`" + `); the later of these wins. An unknown key is an error that suggests the nearest key. Write secrets as ` + "`${env:NAME}` or `${file:/path}`" + `: outrelay never prints them. A duration is a number with a unit, such as ` + "`250ms`, `90m` or `7d`" + `; a size such as ` + "`900KiB`" + `. A list can also be a comma-separated string. After SIGHUP, ` + "`log.level`" + ` and the tokens of ` + "`http.admin`" + ` apply at once, and changed TLS files even without it; all other keys wait for the next start.

` + "`outrelay validate`" + ` reports all problems at once and connects to nothing. [outrelay.example.yaml](../outrelay.example.yaml) has the same keys as a file, and with [outrelay.schema.json](../outrelay.schema.json) an editor completes and checks them.
`

const tableHead = "| key | value | default | meaning |\n|---|---|---|---|\n"

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
	value := ""
	if p.Default != nil {
		text, _ := json.Marshal(p.Default)
		value = "`" + strings.Trim(string(text), `"`) + "`"
	}
	// The column before has the default.
	meaning := p.Description
	if before, after, found := strings.Cut(meaning, " Defaults to "); found && value != "" && !strings.Contains(after, ". ") {
		meaning = before
	}
	fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", key, describeValue(p), value, strings.ReplaceAll(meaning, "|", `\|`))
}

// describeValue returns the allowed values in words.
func describeValue(p property) string {
	for _, c := range append([]property{p}, p.AnyOf...) {
		switch {
		case len(c.Enum) > 0:
			return "`" + strings.Join(c.Enum, "`, `") + "`"
		case c.Properties != nil:
			return "section"
		case c.Items != nil && c.Items.Properties != nil:
			return "list of sections"
		case c.Type == "array":
			return "list"
		case strings.Contains(c.Pattern, "KiB"):
			return "size"
		case strings.Contains(c.Pattern, "ms|s"):
			return "duration"
		case c.Type == "integer", c.Type == "boolean", c.Type == "string" && c.Pattern == "":
			return c.Type.(string)
		case c.Type == "object":
			return "map"
		}
	}
	return ""
}
