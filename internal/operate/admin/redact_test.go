package admin

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

func TestRedactionHidesTheFieldsOfItsRules(t *testing.T) {
	t.Parallel()
	r, err := NewRedaction([]string{"authorization", "x-*-token"}, []string{"$.card.number", "$.items[*].price", "$.list[1]", "$..password"})
	if err != nil {
		t.Fatal(err)
	}

	b64 := base64.StdEncoding.EncodeToString
	for in, want := range map[string]string{
		`{"headers":[{"k":"Authorization","v":"s"},{"k":"X-My-Token","v":"s"},{"k":"a","v":"1"}]}`: `{"headers":[{"k":"Authorization","v":"***"},{"k":"X-My-Token","v":"***"},{"k":"a","v":"1"}]}`,
		`{"headers":{"AUTHORIZATION":"s","a":"1"}}`:                                                `{"headers":{"AUTHORIZATION":"***","a":"1"}}`,
		`{"payload":{"card":{"number":1,"name":"n"},"n":1.50}}`:                                    `{"payload":{"card":{"name":"n","number":"***"},"n":1.50}}`,
		`{"payload":{"items":[{"price":1,"x":2},{"price":2}],"list":[1,2,3]}}`:                     `{"payload":{"items":[{"price":"***","x":2},{"price":"***"}],"list":[1,"***",3]}}`,
		`{"payload":{"a":[{"password":"s","b":{"password":{"c":1}}}],"password":1}}`:               `{"payload":{"a":[{"b":{"password":"***"},"password":"***"}],"password":"***"}}`,
		`{"payload":"{\"password\":1,\"big\":12345678901234567890}"}`:                              `{"payload":"{\"big\":12345678901234567890,\"password\":\"***\"}"}`,
		`{"payload":"no json"}`: `{"payload":"***"}`,
		`{"payload":{"$binary":{"base64":"` + b64([]byte(`{"password":1}`)) + `","subType":"00"}}}`: `{"payload":{"$binary":{"base64":"` + b64([]byte(`{"password":"***"}`)) + `","subType":"00"}}}`,
		`{"payload":{"$binary":{"base64":"` + b64([]byte("secret")) + `","subType":"00"}}}`:         `{"payload":"***"}`,
		// A payload that looks like a hidden one, and headers of forms that they must not have.
		`{"payload":{"hidden":true,"password":"s","card":{"number":1}}}`:    `{"payload":{"card":{"number":"***"},"hidden":true,"password":"***"}}`,
		`{"headers":[["authorization","s"]]}`:                               `{"headers":["***"]}`,
		`{"headers":[{"k":"a","v":"1","authorization":"s"}]}`:               `{"headers":["***"]}`,
		`{"headers":[{"authorization":"s"},"s",{"k":1,"v":"s"},{"k":"a"}]}`: `{"headers":["***","***","***","***"]}`,
		`{"headers":{"a":{"authorization":"s"},"b":"1"}}`:                   `{"headers":{"a":"***","b":"1"}}`,
		`{"headers":{"$binary":{"base64":"cw==","subType":"00"}}}`:          `{"headers":{"$binary":"***"}}`,
		`{"headers":"authorization: s"}`:                                    `{"headers":"***"}`,
		`{"payload":null}`:                                                  `{"payload":null}`,
	} {
		if got := string(r.redactEnvelope(json.RawMessage(in), true, nil)); got != want {
			t.Errorf("%s\nbecame %s\nnot    %s", in, got, want)
		}
	}
	if got := string((Redaction{}).redactEnvelope(json.RawMessage(`{"payload":"x"}`), true, nil)); got != `{"payload":"x"}` {
		t.Errorf("without rules: %s", got)
	}
	if got := string(r.redactEnvelope(json.RawMessage(`{"payload":{"bytes":3,"hidden":true,"type":"string"}}`), false, nil)); got != `{"payload":{"bytes":3,"hidden":true,"type":"string"}}` {
		t.Errorf("a payload without a request for it: %s", got)
	}
	if got := string(r.redactJSON(json.RawMessage(`not json`))); got != `"***"` {
		t.Errorf("%s", got)
	}

	for _, bad := range []string{"", "card", "$", "$.", "$[", "$[x]", "$.a b", "$.a[-1]"} {
		if _, err := NewRedaction(nil, []string{bad}); err == nil {
			t.Errorf("path %q was taken", bad)
		}
	}
	if _, err := NewRedaction([]string{"[a"}, nil); err == nil {
		t.Error("a header that cannot be matched was taken")
	}
}

// TestADeepRuleLeavesNothing: the rule removes the values under the name from documents of every
// shape.
func TestADeepRuleLeavesNothing(t *testing.T) {
	t.Parallel()
	r, err := NewRedaction(nil, []string{"$..secret"})
	if err != nil {
		t.Fatal(err)
	}

	rapid.Check(t, func(t *rapid.T) {
		v := drawTree(t, 4)
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if out := string(r.redactJSON(raw)); strings.Contains(out, "hunter2") || !json.Valid([]byte(out)) {
			t.Fatalf("%s became %s", raw, out)
		}
	})
}

func drawTree(t *rapid.T, depth int) any {
	switch n := rapid.IntRange(0, 5).Draw(t, "kind"); {
	case depth == 0 || n == 0:
		return rapid.SampledFrom([]any{nil, true, 1, "x"}).Draw(t, "leaf")
	case n < 3:
		list := []any{}
		for range rapid.IntRange(0, 3).Draw(t, "length") {
			list = append(list, drawTree(t, depth-1))
		}
		return list
	}

	m := map[string]any{}
	for range rapid.IntRange(0, 3).Draw(t, "fields") {
		m[rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")] = drawTree(t, depth-1)
	}

	if rapid.Bool().Draw(t, "has") {
		m["secret"] = rapid.SampledFrom([]any{"hunter2", map[string]any{"x": "hunter2"}, []any{"hunter2"}}).Draw(t, "value")
	}

	return m
}

// A document may have a field $binary (since MongoDB 5.0). It is not a binary value then.
func TestDocumentsThatLookLikeABinaryAreRedacted(t *testing.T) {
	t.Parallel()
	r, err := NewRedaction(nil, []string{"$.card.number"})
	if err != nil {
		t.Fatal(err)
	}
	card := bson.E{Key: "card", Value: bson.D{{Key: "number", Value: "4111-1111"}}}
	inner := bson.D{{Key: "base64", Value: "e30="}, {Key: "subType", Value: "00"}}
	for name, payload := range map[string]bson.D{
		"plain":          {card},
		"beside":         {{Key: "$binary", Value: inner}, card},
		"more inside":    {{Key: "$binary", Value: append(bson.D{card}, inner...)}, card},
		"without a type": {{Key: "$binary", Value: inner[:1]}, card},
	} {
		raw, err := bson.MarshalExtJSON(bson.D{{Key: "_id", Value: "1"}, {Key: "payload", Value: payload}}, false, false)
		if err != nil {
			t.Fatal(err)
		}
		// The field inside of $binary is another path.
		out := string(r.redactEnvelope(raw, true, nil))
		if shown := strings.Count(out, "4111"); shown != strings.Count(name, "inside") {
			t.Errorf("%s: the hidden value is shown: %s", name, out)
		}
	}

	m, problems := envelope.NewMapping(envelope.Names{Payload: envelope.WholeDocument, AggregateType: "-", AggregateID: "-", Type: "-"}, false)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	raw, err := bson.MarshalExtJSON(bson.D{{Key: "$binary", Value: inner}, card}, false, false)
	if err != nil {
		t.Fatal(err)
	}
	if out := string(r.redactEnvelope(raw, true, m)); strings.Contains(out, "4111") {
		t.Errorf("a whole document: %s", out)
	}
}
