package routing

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/test/generated"
)

// debeziumCase is a document in Extended JSON, the record that Debezium 3.6.1 with default options made of it, and what
// outrelay does instead, where that differs. test/migrate compares the records with the records of the real Debezium.
type debeziumCase struct {
	Name     string          `json:"name"`
	Document json.RawMessage `json:"document"`
	Debezium debeziumRecord  `json:"debezium"`
	Outrelay string          `json:"outrelay,omitempty"`
}

// debeziumRecord is what differs between the records of Debezium.
type debeziumRecord struct {
	Key   *string `json:"key"`
	Value *string `json:"value"`
	ID    string  `json:"id"`
}

// context are the names of the headers before the id, in Debezium's order, and their values. The run is another one each time.
var context = [][2]string{{"connectorLogicalName", "shop"}, {"taskId", "0"}, {"connectorName", "mongodb"}, {"runId", ""}}

// formatLines returns a record as one text.
func (r debeziumRecord) formatLines() string {
	lines := []string{"key " + orNull(r.Key), "value " + orNull(r.Value)}
	for _, h := range context {
		lines = append(lines, "__debezium.context."+h[0]+"="+h[1])
	}
	return strings.Join(append(lines, "id="+r.ID), "\n")
}

func orNull(s *string) string {
	if s == nil {
		return "null"
	}
	return "'" + *s + "'"
}

// TestRecordsOfDebezium: the preset makes the same bytes as Debezium of every BSON type as id, key, type and payload, and ignores the same fields.
func TestRecordsOfDebezium(t *testing.T) {
	t.Parallel()
	const file = "testdata/debezium.json"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var cases []debeziumCase
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}

	m, _ := envelope.NewMapping(FieldNames(Debezium, envelope.Names{}))
	f := newFiller(t, PresetConfig{Name: Debezium, Watcher: "shop", Mapping: m})
	equal := 0
	for i := range cases {
		c := &cases[i]
		var doc bson.D
		if err := bson.UnmarshalExtJSON(c.Document, true, &doc); err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		raw, err := bson.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		// The file is text, so it has replacement characters for other bytes.
		got := strings.ToValidUTF8(fillOrReject(m, f, raw), "\ufffd")
		if generated.IsWriting() {
			c.Outrelay = ""
			if got != c.Debezium.formatLines() {
				c.Outrelay = got
			}
			continue
		}

		want := c.Outrelay
		if want == "" {
			want = c.Debezium.formatLines()
			equal++
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-Debezium +outrelay):\n%s", c.Name, diff)
		}
	}
	generated.Check(t, "internal/contract/routing/"+file, formatCases(t, cases))
	if !generated.IsWriting() && equal < 80 {
		t.Errorf("only %d of %d documents have equal records", equal, len(cases))
	}
}

// formatCases returns one case a line.
func formatCases(t *testing.T, cases []debeziumCase) string {
	t.Helper()
	var lines []string
	for _, c := range cases {
		line, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(line))
	}
	return "[\n" + strings.Join(lines, ",\n") + "\n]\n"
}

// fillOrReject returns the record of a document as one text, or the reason why there is none.
func fillOrReject(m *envelope.Mapping, f *Filler, raw []byte) string {
	var v envelope.View
	var rec record.Record
	err := m.Parse(raw, &v)
	if err == nil {
		err = f.Fill(&v, &Meta{}, Target{Topic: "order"}, &rec)
	}
	if err != nil {
		return "rejected: " + err.Error()
	}

	lines := []string{"key '" + string(rec.Key) + "'", "value '" + string(rec.Value) + "'"}
	if rec.Value == nil {
		lines[1] = "value null"
	}
	for _, h := range rec.Headers {
		// Debezium has no namespace.
		if bytes.Equal(h.Key, hNS) {
			continue
		}
		value := string(h.Value)
		if string(h.Key) == "__debezium.context.runId" {
			if _, err := uuid.Parse(value); err == nil {
				value = ""
			}
		}
		lines = append(lines, string(h.Key)+"="+value)
	}
	return strings.Join(lines, "\n")
}

// TestHeadersOfDebeziumsContext: the configuration replaces a header of the context in its place, and removes it by an empty text.
func TestHeadersOfDebeziumsContext(t *testing.T) {
	t.Parallel()
	const prefix = "__debezium.context."
	headers := map[string]string{prefix + "connectorLogicalName": "shop", prefix + "taskId": "7", prefix + "runId": "", "own": "x", prefix + "connectorName": "{type}"}
	got := fillRecord(t, PresetConfig{Name: Debezium, Watcher: "orders", Headers: headers}, envelope.Names{}, contractDoc())
	want := prefix + "connectorLogicalName=shop\n" + prefix + "taskId=7\nid=e-1\n" + prefix + "connectorName=OrderPlaced\nown=x\nkey o-1\n"
	if !strings.HasPrefix(got, want) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, got))
	}
}

// TestIDsOfDebezium: a UUID is base64, also from another field, and a text that looks like one is marked.
func TestIDsOfDebezium(t *testing.T) {
	t.Parallel()
	id := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff}}
	const text = "AQIDBAUGBwgJCgsMDQ4P/w=="
	none := map[string]string{}
	for _, name := range []string{"connectorLogicalName", "taskId", "connectorName", "runId"} {
		none["__debezium.context."+name] = ""
	}

	for want, doc := range map[string]bson.D{
		"id=" + text + "\nkey":                          {{Key: "_id", Value: id}},
		"id=" + text + "\noutrelay-id-type=string\nkey": {{Key: "_id", Value: text}},
		// This text is not the base64 of 16 bytes.
		"id=AQIDBAUGBwgJCgsMDQ4P/x==\nkey": {{Key: "_id", Value: "AQIDBAUGBwgJCgsMDQ4P/x=="}},
	} {
		got := fillRecord(t, PresetConfig{Name: Debezium, Headers: none}, envelope.Names{}, append(doc, contractDoc()[1:]...))
		if !strings.HasPrefix(got, want) {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	got := fillRecord(t, PresetConfig{Name: Debezium, Headers: none}, envelope.Names{ID: "event"}, contractDoc(bson.E{Key: "event", Value: id}))
	if want := "id=" + text + "\noutrelay-id=e-1\nkey"; !strings.HasPrefix(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}
}
