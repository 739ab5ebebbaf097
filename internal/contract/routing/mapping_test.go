package routing

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// mappedView parses a document with the mapping of names.
func mappedView(t *testing.T, names envelope.Names, doc bson.D) (*envelope.Mapping, *envelope.View) {
	t.Helper()
	m, problems := envelope.NewMapping(names, false)
	if problems != nil {
		t.Fatal(problems)
	}

	raw, err := bson.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}

	v := new(envelope.View)
	if err := m.Parse(raw, v); err != nil {
		t.Fatal(err)
	}

	return m, v
}

func contractDoc(more ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: "e-1"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "o-1"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: bson.D{{Key: "n", Value: int32(1)}}},
	}, more...)
}

func TestPlaceholdersOfTopics(t *testing.T) {
	t.Parallel()
	decimal, err := bson.ParseDecimal128("1.50")
	if err != nil {
		t.Fatal(err)
	}
	doc := contractDoc(
		bson.E{Key: "tenant", Value: bson.D{{Key: "name", Value: "acme"}, {Key: "no", Value: int64(7)}, {Key: "list", Value: bson.A{}}}},
		bson.E{Key: "headers", Value: bson.D{{Key: "region", Value: "eu"}, {Key: "empty", Value: ""}}},
		bson.E{Key: "id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: make([]byte, 16)}},
		bson.E{Key: "legacy", Value: bson.Binary{Subtype: bson.TypeBinaryUUIDOld, Data: make([]byte, 16)}},
		bson.E{Key: "bytes", Value: []byte("x")},
		bson.E{Key: "regex", Value: bson.Regex{Pattern: "x"}},
		bson.E{Key: "stamp", Value: bson.Timestamp{T: 1}},
		bson.E{Key: "null", Value: nil},
		bson.E{Key: "none", Value: ""},
		bson.E{Key: "oid", Value: bson.ObjectID{1}},
		bson.E{Key: "flag", Value: true},
		bson.E{Key: "half", Value: 0.5},
		bson.E{Key: "price", Value: decimal},
		bson.E{Key: "long", Value: strings.Repeat("x", envelope.MaxFieldText+1)},
	)
	const unfit = "; a text, a number, a date or an id is wanted"
	_, v := mappedView(t, envelope.Names{}, doc)
	from := &Meta{DB: []byte("tenant_a"), Coll: []byte("outbox")}
	for text, want := range map[string]string{
		"{database}.{collection}":                 "tenant_a.outbox",
		"{header:region}-{aggregatetype}":         "eu-order",
		"t.{field:tenant.name}.{field:tenant.no}": "t.acme.7",
		"{field:aggregateid}":                     "o-1",
		"{field:id}":                              "00000000-0000-0000-0000-000000000000",
		"{field:oid}":                             "010000000000000000000000",
		"{field:flag}-{field:half}-{field:price}": "true-0.5-1.50",
		"x.{header:zone}":                         "header zone is missing",
		"x.{header:empty}":                        "header empty is empty",
		"x.{field:tenant.zone}":                   "field tenant.zone is missing",
		"x.{field:tenant.name.first}":             "field tenant.name.first is missing",
		"x.{field:null}":                          "field null is missing",
		"x.{field:none}":                          "field none is empty",
		"x.{field:tenant.list}":                   "field tenant.list is of type array" + unfit,
		"x.{field:bytes}":                         "field bytes is of type binary" + unfit,
		"x.{field:legacy}":                        "field legacy is of type binary" + unfit,
		"x.{field:regex}":                         "field regex is of type regex" + unfit,
		"x.{field:stamp}":                         "field stamp is of type timestamp" + unfit,
		"x.{field:long}":                          "field long has 32774 bytes; at most 32768 are allowed",
		"{field:payload}":                         "field payload is of type embedded document" + unfit,
	} {
		if strings.Contains(want, " ") {
			want = "its topic is unknown: " + want
		}
		r := mustNew(t, Config{Template: text})
		// The second response comes from the cache.
		for range 2 {
			got, err := r.Route(v, from, nil)
			response := ""
			if err != nil {
				response = err.Error()
			} else {
				response = got[0].Topic
			}
			if !strings.HasSuffix(response, want) {
				t.Errorf("%s: got %s, want %s", text, response, want)
			}
		}
	}

	// The topic of a field is checked like any other.
	r := mustNew(t, Config{Template: "{field:aggregateid}", Allow: []string{"a*"}})
	if _, err := r.Route(v, from, nil); classOf(err) != record.NotAllowed {
		t.Errorf("a topic of a field that is not allowed: %v", err)
	}
}

// Decisions with the same types and other values are not taken from the cache.
func TestCacheDistinguishesTenants(t *testing.T) {
	t.Parallel()
	_, v := mappedView(t, envelope.Names{}, contractDoc())
	r := mustNew(t, Config{Template: "{database}.{collection}"})
	for _, ns := range [][2]string{{"a", "b.c"}, {"a.b", "c"}, {"a", "b.c"}, {"x", "y"}} {
		got, err := r.Route(v, &Meta{DB: []byte(ns[0]), Coll: []byte(ns[1])}, nil)
		if err != nil || got[0].Topic != ns[0]+"."+ns[1] {
			t.Errorf("%v is routed to %v, %v", ns, got, err)
		}
	}
}

func TestRulesOnValues(t *testing.T) {
	t.Parallel()
	r := mustNew(t, Config{Template: "rest", Rules: []Rule{
		{Headers: map[string]string{"env": "test*"}, Drop: true},
		{Fields: map[string]string{"kind": "ping"}, Drop: true},
		{Database: "tenant_*", Fields: map[string]string{"vip": "*"}, To: []string{"vip.{database}"}},
		{Collection: "audit", Type: "Order*", To: []string{"audit"}},
	}})

	header := func(name, value string) bson.E {
		return bson.E{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: name}, {Key: "v", Value: value}}}}
	}

	for _, c := range []struct {
		ns   string
		more []bson.E
		want string
	}{
		{"shop.outbox", nil, "rest"},
		{"shop.outbox", []bson.E{header("env", "test-1")}, "dropped"},
		{"shop.outbox", []bson.E{header("env", "prod")}, "rest"},
		{"shop.outbox", []bson.E{header("env", "test"), {Key: "topic", Value: "own"}}, "dropped"},
		{"shop.outbox", []bson.E{{Key: "topic", Value: "own"}}, "own"},
		{"shop.outbox", []bson.E{{Key: "kind", Value: "ping"}}, "dropped"},
		{"tenant_a.outbox", []bson.E{{Key: "vip", Value: true}}, "vip.tenant_a"},
		{"tenant_a.outbox", nil, "rest"},
		{"shop.audit", nil, "audit"},
	} {
		_, v := mappedView(t, envelope.Names{}, contractDoc(c.more...))
		db, coll, _ := strings.Cut(c.ns, ".")
		for range 2 {
			got, err := r.Route(v, &Meta{DB: []byte(db), Coll: []byte(coll)}, nil)
			response := string(classOf(err))
			if err == nil {
				response = got[0].Topic
			}
			if response != c.want {
				t.Errorf("%s %v: %s, want %s", c.ns, c.more, response, c.want)
			}
		}
	}
}

func TestImpossibleRouting(t *testing.T) {
	t.Parallel()
	m, _ := envelope.NewMapping(envelope.Names{AggregateType: "-", Headers: "-", Key: "user"}, false)
	_, err := New(Config{Mapping: m, Template: "{aggregatetype}", Rules: []Rule{
		{Headers: map[string]string{"x": "y"}, To: []string{"a"}},
		{AggregateType: "order", To: []string{"{field:key}"}},
		{Fields: map[string]string{"state": ""}, Drop: true, To: []string{"b"}},
		{Fields: map[string]string{"seal": "x"}, Drop: true},
		{To: []string{"{header}", "{database:x}", "{field:a..b}"}},
	}})

	var invalid *InvalidError
	if !errors.As(err, &invalid) {
		t.Fatal(err)
	}

	var fields []string
	for _, p := range invalid.Problems {
		fields = append(fields, p.Field)
	}

	want := []string{
		"template", "rules[0].match.headers.x", "rules[1].match.aggregatetype", "rules[2].match.fields.state",
		"rules[2].to", "rules[4].to[0]", "rules[4].to[1]", "rules[4].to[2]",
	}
	if diff := cmp.Diff(want, fields); diff != "" {
		t.Errorf("(-want +got):\n%s\n%v", diff, err)
	}
}

// fillRecord returns the record of a document.
func fillRecord(t *testing.T, c PresetConfig, names envelope.Names, doc bson.D) string {
	t.Helper()
	m, v := mappedView(t, names, doc)
	c.Mapping = m

	var rec record.Record
	if err := newFiller(t, c).Fill(v, &meta, Target{Topic: "t"}, &rec); err != nil {
		t.Fatal(err)
	}

	var lines []string
	for _, h := range rec.Headers {
		if !isVariable(h) {
			lines = append(lines, string(h.Key)+"="+string(h.Value))
		}
	}
	return strings.Join(append(lines, "key "+string(rec.Key), string(rec.Value)), "\n")
}

func TestPlacement(t *testing.T) {
	t.Parallel()
	extra := []bson.E{
		{Key: "tenant", Value: "acme"},
		{Key: "n", Value: int64(7)},
		{Key: "at", Value: time.UnixMilli(1700000000123)},
		{Key: "b", Value: true},
		{Key: "f", Value: 1.5},
		{Key: "o", Value: bson.ObjectID{1}},
	}
	// MongoEventRouter of Debezium 3.6.1 produced these values with JsonConverter, without schemas.
	all := []string{"type:envelope", "tenant:envelope:tenant-id", "n:envelope", "at:envelope", "b:envelope", "f:envelope", "o:envelope", "none:envelope"}
	got := fillRecord(t, PresetConfig{Name: Debezium, Placement: all}, envelope.Names{}, contractDoc(extra...))
	const context = "__debezium.context.taskId=0\n__debezium.context.connectorName=mongodb\n"
	want := context + "id=e-1\nkey o-1\n" +
		`{"payload":"{\n  \"n\": {\n    \"$numberInt\": \"1\"\n  }\n}","type":"OrderPlaced","tenant-id":"acme","n":7,` +
		`"at":1700000000123,"b":true,"f":1.5,"o":"010000000000000000000000"}`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	headers := []string{"type:header", "tenant:header:tenant-id", "n:header", "at:header", "b:header", "f:header", "o:header", "none:header"}
	got = fillRecord(t, PresetConfig{Name: Debezium, Placement: headers, JSON: plainJSON}, envelope.Names{}, contractDoc(extra...))
	want = context + "id=e-1\ntype=OrderPlaced\ntenant-id=acme\nn=7\nat=2023-11-14T22:13:20.123Z\nb=true\nf=1.5\no=010000000000000000000000\n" +
		"key o-1\n" + `{"n":1}`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	got = fillRecord(t, PresetConfig{JSON: plainJSON, Placement: []string{"at:value"}}, envelope.Names{}, contractDoc(extra...))
	if want := `{"payload":{"n":1},"at":"2023-11-14T22:13:20.123Z"}`; !strings.HasSuffix(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}

	if _, err := NewPreset(PresetConfig{Placement: []string{"a:value", "b:value:a"}}); err == nil {
		t.Error("two fields may be the same member of the value")
	}
	for _, bad := range []string{"", "a", "a:value:payload", "a:b", "a:header:", "a:header:b:c", "a:header:id", "a:value:outrelay-x", "state:header", "key:header"} {
		m, _ := envelope.NewMapping(envelope.Names{Key: "user"}, false)
		_, err := NewPreset(PresetConfig{Placement: []string{bad}, Mapping: m})
		// Names of the service are free, also if the relay has fields of the same names elsewhere.
		if wantErr := !slices.Contains([]string{"a:value:outrelay-x", "state:header", "key:header"}, bad); (err != nil) != wantErr {
			t.Errorf("placement %q: %v", bad, err)
		}
	}
}

// A header whose value has no text, or is too long, rejects the envelope and names the field.
func TestHeadersOfUnfitFields(t *testing.T) {
	t.Parallel()
	for _, value := range []any{bson.A{}, strings.Repeat("x", envelope.MaxFieldText+1)} {
		_, v := mappedView(t, envelope.Names{}, contractDoc(bson.E{Key: "tenant", Value: value}))
		var rec record.Record
		err := newFiller(t, PresetConfig{Placement: []string{"tenant:header:of"}}).Fill(v, &meta, Target{Topic: "t"}, &rec)
		want := record.Malformed
		if _, isText := value.(string); isText {
			want = record.MessageTooLarge
		}
		if classOf(err) != want || !strings.Contains(err.Error(), "header of: field tenant ") {
			t.Errorf("got %v", err)
		}
	}
}

// The MongoDB Kafka connector 2.0.1 publishes these bytes with publish.full.document.only, in records without headers.
func TestConnectorPreset(t *testing.T) {
	t.Parallel()
	names := envelope.Names{Payload: "*", Key: "*", AggregateType: "-", AggregateID: "-", Type: "-", Topic: "-", Headers: "-"}
	got := fillRecord(t, PresetConfig{Name: Connector}, names, bson.D{
		{Key: "_id", Value: bson.ObjectID{1}},
		{Key: "total", Value: int64(5)},
		{Key: "at", Value: time.UnixMilli(7)},
		{Key: "topic", Value: bson.A{1.0}},
	})

	want := "id=010000000000000000000000\n" + `key {"_id": {"$oid": "010000000000000000000000"}}` + "\n" +
		`{"_id": {"$oid": "010000000000000000000000"}, "total": {"$numberLong": "5"}, "at": {"$date": 7}, "topic": [1.0]}`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A record whose id comes from another field has the _id as well, because a read-back must recognize the document.
func TestMappedIDAndTimestamp(t *testing.T) {
	t.Parallel()
	names := envelope.Names{ID: "no", Timestamp: "at"}
	doc := contractDoc(bson.E{Key: "no", Value: int64(5)}, bson.E{Key: "at", Value: int64(1700000000123)})
	m, v := mappedView(t, names, doc)
	var rec record.Record
	if err := newFiller(t, PresetConfig{Name: Debezium, Mapping: m}).Fill(v, &meta, Target{Topic: "t"}, &rec); err != nil {
		t.Fatal(err)
	}
	if string(rec.Header("id")) != "5" || string(rec.DocumentID()) != "e-1" || rec.TimeMS != 1700000000123 {
		t.Errorf("%s, %d", rec.Headers, rec.TimeMS)
	}
}

func TestMappedRecordsDoNotAllocate(t *testing.T) {
	names := envelope.Names{AggregateType: "kind", AggregateID: "owner", Type: "name", Payload: "body"}
	m, _ := envelope.NewMapping(names, false)
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "kind", Value: "order"},
		{Key: "owner", Value: int64(7)},
		{Key: "name", Value: "Placed"},
		{Key: "tenant", Value: "acme"},
		{Key: "body", Value: bson.D{{Key: "n", Value: int64(1) << 40}, {Key: "at", Value: time.Now()}}},
	})
	if err != nil {
		t.Fatal(err)
	}

	for _, name := range []string{Typed, Debezium} {
		router, err := New(Config{Mapping: m, Template: "{database}.{field:tenant}", Rules: []Rule{{Fields: map[string]string{"x": "y"}, Drop: true}}})
		if err != nil {
			t.Fatal(err)
		}
		f := newFiller(t, PresetConfig{Name: name, Mapping: m, Placement: []string{"tenant:header", "tenant:value"}})
		var v envelope.View
		var rec record.Record
		var targets []Target
		if n := testing.AllocsPerRun(200, func() {
			if err := m.Parse(raw, &v); err != nil {
				t.Fatal(err)
			}
			var err error
			if targets, err = router.Route(&v, &meta, targets[:0]); err == nil {
				err = f.Fill(&v, &meta, targets[0], &rec)
			}
			if err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("%s: %v allocations per event", name, n)
		}
		if !slices.Contains([]string{"shop.acme"}, rec.Topic) {
			t.Errorf("the topic is %s", rec.Topic)
		}
	}
}
