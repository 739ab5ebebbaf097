package routing

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/test/generated"
)

// goldenEnvelope is a file of docs/envelopes: a document in Extended JSON, and its record or the reason why there is none.
type goldenEnvelope struct {
	Configuration *goldenConfiguration `json:"configuration,omitempty"`
	Document      json.RawMessage      `json:"document"`
	Record        *goldenRecord        `json:"record,omitempty"`
	Rejected      *goldenRejection     `json:"rejected,omitempty"`
}

// goldenConfiguration has keys of the configuration that differ from their defaults.
type goldenConfiguration struct {
	Mapping map[string]string `json:"mapping,omitempty"`
	Topics  struct {
		Template string `json:"template,omitempty"`
	} `json:"topics,omitzero"`
	Record struct {
		Preset    string            `json:"preset,omitempty"`
		Headers   map[string]string `json:"headers,omitempty"`
		Placement []string          `json:"placement,omitempty"`
		JSON      string            `json:"json,omitempty"`
	} `json:"record,omitzero"`
}

// names returns the mapping.
func (c *goldenConfiguration) names() (n envelope.Names) {
	fields := reflect.ValueOf(&n).Elem()
	for key, name := range c.Mapping {
		fields.FieldByNameFunc(func(field string) bool {
			return strings.EqualFold(field, strings.ReplaceAll(key, "_", ""))
		}).SetString(name)
	}
	return n
}

type goldenRecord struct {
	Topic     string   `json:"topic"`
	Partition int32    `json:"partition"` // -1: by the key
	Key       any      `json:"key"`
	Value     any      `json:"value"`
	Headers   [][2]any `json:"headers"`
}

type goldenRejection struct {
	Class  string `json:"class"`
	Reason string `json:"reason"`
}

// toReadable returns text as a string, other bytes as {"base64": …}, and a missing value as null.
func toReadable(b []byte) any {
	if b == nil {
		return nil
	}
	if utf8.Valid(b) && !strings.ContainsRune(string(b), 0) {
		return string(b)
	}
	return map[string]any{"base64": base64.StdEncoding.EncodeToString(b)}
}

// docs/envelopes shows the record of each kind of document with the default configuration, and the reason why others become
// dead letters.
func TestEnvelopesOfTheDocumentation(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../docs/envelopes/*.json")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var want goldenEnvelope
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatalf("%s: %v", file, err)
		}

		got := goldenEnvelope{Configuration: want.Configuration, Document: want.Document}
		got.Record, got.Rejected = recordOf(t, want.Document, want.Configuration)
		now, err := json.MarshalIndent(got, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		generated.Check(t, "docs/envelopes/"+filepath.Base(file), string(now)+"\n")
	}
}

// recordOf returns the record of a document in Extended JSON, or the reason why there is none.
func recordOf(t *testing.T, document []byte, c *goldenConfiguration) (*goldenRecord, *goldenRejection) {
	t.Helper()
	var doc bson.D
	if err := bson.UnmarshalExtJSON(document, false, &doc); err != nil {
		t.Fatal(err)
	}
	raw, err := bson.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}

	var v envelope.View
	var rec record.Record
	if c == nil {
		c = &goldenConfiguration{}
	}
	m, problems := envelope.NewMapping(FieldNames(c.Record.Preset, c.names()))
	if problems != nil {
		t.Fatal(problems)
	}
	err = m.Parse(raw, &v)
	var targets []Target
	if err == nil {
		router, newErr := New(Config{Mapping: m, Template: c.Topics.Template})
		if newErr != nil {
			t.Fatal(newErr)
		}
		targets, err = router.Route(&v, &meta, nil)
	}
	if err == nil {
		preset := PresetConfig{
			Name: c.Record.Preset, Watcher: "shop", Headers: c.Record.Headers, Placement: c.Record.Placement, JSON: c.Record.JSON, Mapping: m,
		}
		err = newFiller(t, preset).Fill(&v, &meta, targets[0], &rec)
	}
	if rejection := (*record.Rejection)(nil); errors.As(err, &rejection) {
		return nil, &goldenRejection{string(rejection.Class), rejection.Reason}
	}
	if err != nil {
		t.Fatal(err)
	}

	out := &goldenRecord{Topic: rec.Topic, Partition: rec.Partition, Key: toReadable(rec.Key), Value: toReadable(rec.Value)}
	for _, h := range rec.Headers {
		if string(h.Key) == "__debezium.context.runId" { // another one each time
			h.Value = []byte("00000000-0000-4000-8000-000000000000")
		}
		out.Headers = append(out.Headers, [2]any{string(h.Key), toReadable(h.Value)})
	}
	return out, nil
}
