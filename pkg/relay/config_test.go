package relay

import (
	"bytes"
	"flag"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/config"
)

var update = flag.Bool("update", false, "write sections.go")

// sectionFiles are the generated files and their sources.
var sectionFiles = map[string]string{"sections.go": "config.go", "records.go": "records.go"}

// TestSectionsAreCurrent compares sections.go with the configuration of the program.
func TestSectionsAreCurrent(t *testing.T) {
	t.Parallel()
	for generated, source := range sectionFiles {
		want := generateSections(t, source)
		if *update {
			if err := os.WriteFile(generated, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}

		have, err := os.ReadFile(generated)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s differs from %s: run go test ./pkg/relay -run TestSectionsAreCurrent -update", generated, source)
		}
	}
}

// Types of the internal configuration that are plain values here.
var plainTypes = map[string]string{
	"Secret": "string", "URI": "string", "Start": "string", "Size": "int64",
}

// The file writes 0 for "none"; in Go, zero is the default and -1 is none.
var noneInFile = regexp.MustCompile(`\b0 (is no|is none|keeps|exports|creates|turns)\b`)

// goWording returns a comment of the file's keys for the fields of Go.
func goWording(comment string) string {
	comment = strings.ReplaceAll(comment, "Defaults to 0.", "Defaults to none.")
	comment = strings.ReplaceAll(comment, "; -1 uses the brokers' default. Defaults to -1.", ". Defaults to the brokers' default.")
	return noneInFile.ReplaceAllString(comment, "-1 $1")
}

// generateSections returns the Go source of the sections in a file of the package config.
func generateSections(t *testing.T, name string) []byte {
	t.Helper()
	sourceFile := "../../internal/config/" + name
	source, err := os.ReadFile(sourceFile)
	if err != nil {
		t.Fatal(err)
	}
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, sourceFile, source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	text := func(n ast.Node) string {
		return string(source[set.Position(n.Pos()).Offset:set.Position(n.End()).Offset])
	}

	var b strings.Builder
	b.WriteString("// Code generated from internal/config/" + name + " by TestSectionsAreCurrent. DO NOT EDIT.\n\npackage relay\n")
	if strings.Contains(string(source), "time.Duration") {
		b.WriteString("\nimport \"time\"\n")
	}
	for _, d := range file.Decls {
		declaration, ok := d.(*ast.GenDecl)
		if !ok || declaration.Tok != token.TYPE {
			continue
		}
		spec := declaration.Specs[0].(*ast.TypeSpec)
		fields, ok := spec.Type.(*ast.StructType)
		if !ok {
			continue
		}

		doc := goWording(text(declaration.Doc))
		if spec.Name.Name == "Config" {
			doc = configDoc
		}
		b.WriteString("\n" + doc + "\ntype " + spec.Name.Name + " struct {\n")
		for _, f := range fields.Fields.List {
			if f.Doc != nil {
				b.WriteString(goWording(text(f.Doc)) + "\n")
			}
			typ := text(f.Type)
			if plain, ok := plainTypes[typ]; ok {
				typ = plain
			}
			// Zero is the default, so a boolean whose default is true is a pointer.
			if f.Names[0].Name == "Indexes" {
				typ = "*bool"
			}
			tag := reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("yaml")
			b.WriteString(f.Names[0].Name + " " + typ + " `yaml:\"" + tag + "\"`\n")
		}
		b.WriteString("}\n")
	}

	out, err := format.Source([]byte(b.String()))
	if err != nil {
		t.Fatalf("%v in\n%s", err, b.String())
	}
	return out
}

const configDoc = `// Config is the configuration of a relay. It has the keys of outrelay.yaml. A zero field has its default,
// and -1 means none for a limit, a retention or an interval. MongoDB.URI and Kafka.Brokers are required.
// A text is used as it is: ${env:NAME} and ${file:path} have a meaning only in a file, see [Load].`

// TestEveryKeyReachesTheRelay sets each key alone and compares the result with the same key in a file.
func TestEveryKeyReachesTheRelay(t *testing.T) {
	t.Parallel()
	c := Config{
		MongoDB: MongoDB{URI: "mongodb://u:${p}@localhost/shop", Indexes: new(bool), TLS: &TLS{Insecure: true}},
		Kafka:   Kafka{Brokers: []string{"a:1", "b:2"}, SASL: &SASL{Mechanism: "plain", Username: "u", Password: "s3,cret"}},
		Topics: Topics{
			Rules:  []Rule{{Match: Match{Type: "a*"}, To: []string{"x", "y"}}},
			Create: &Create{Partitions: 3, Replication: -1, Configs: map[string]string{"retention.ms": "1000"}},
		},
		Record:    Record{Preset: "cloudevents", Structured: true},
		Retention: -1,
		Purge:     Purge{Rate: -1},
		Lease:     Lease{TTL: 20 * time.Second},
		Limits:    Limits{Memory: 5 << 20},
		OTel:      OTel{SamplePercent: -1, MetricsInterval: -1},
	}

	got, _, err := c.resolve()
	if err != nil {
		t.Fatal(err)
	}
	if uri := got.MongoDB.URI.Reveal(); uri != c.MongoDB.URI {
		t.Errorf("mongodb.uri is %q, want the text as it is", uri)
	}
	if got.MongoDB.Indexes || !got.MongoDB.TLS.Insecure || got.Kafka.SASL.Password.Reveal() != "s3,cret" {
		t.Errorf("mongodb or the login: %+v %+v", got.MongoDB, got.Kafka.SASL)
	}
	if got.Retention != 0 || got.Purge.Rate != 0 || got.OTel.SamplePercent != 0 || got.OTel.MetricsInterval != 0 {
		t.Errorf("-1 is not none: %v %v %+v", got.Retention, got.Purge.Rate, got.OTel)
	}
	if got.Lease.TTL != 20*time.Second || got.Lease.Renew != time.Second || got.Limits.Memory != 5*config.MiB {
		t.Errorf("lease or limits: %+v %+v", got.Lease, got.Limits)
	}
	create := *got.Topics.Create
	if len(got.Topics.Rules) != 1 || create.Partitions != 3 || create.Replication != -1 || create.Configs["retention.ms"] != "1000" {
		t.Errorf("topics: %+v %+v", got.Topics, create)
	}
	if got.HTTP.Listen != "off" {
		t.Errorf("http.listen is %q, want off", got.HTTP.Listen)
	}

	// Load returns the same configuration from what Config prints, except for the secrets.
	back := fromProgram(got)
	again, _, err := back.resolve()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(again, got) {
		t.Errorf("the way back gives\n%+v, want\n%+v", again, got)
	}
}
