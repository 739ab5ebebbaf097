package changes

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/resume"
)

func insertEvent(tb testing.TB, extra ...bson.E) []byte {
	tb.Helper()
	raw, err := bson.Marshal(append(bson.D{
		{Key: "_id", Value: bson.D{{Key: "_data", Value: "826B018C46"}}},
		{Key: "operationType", Value: "insert"},
		{Key: "clusterTime", Value: bson.Timestamp{T: 7, I: 9}},
		{Key: "collectionUUID", Value: bson.Binary{Subtype: 4, Data: []byte("0123456789abcdef")}},
		{Key: "wallTime", Value: bson.NewDateTimeFromTime(time.UnixMilli(1234567))},
		{Key: "fullDocument", Value: bson.D{
			{Key: "_id", Value: "e1"},
			{Key: "payload", Value: bson.Binary{Data: []byte("xyz")}},
		}},
		{Key: "ns", Value: bson.D{{Key: "db", Value: "shop"}, {Key: "coll", Value: "outbox.v1"}}},
		{Key: "documentKey", Value: bson.D{{Key: "shard", Value: int32(1)}, {Key: "_id", Value: "e1"}}},
		{Key: "txnNumber", Value: int64(3)},
		{Key: "re", Value: bson.Regex{Pattern: "a", Options: "i"}},
		{Key: "d", Value: 1.5},
		{Key: "n", Value: nil},
		{Key: "b", Value: true},
		{Key: "a", Value: bson.A{1}},
	}, extra...))
	if err != nil {
		tb.Fatal(err)
	}

	return raw
}

// TestN15_AnEventHasOnePositionInAllVersionsOfTokens: after an upgrade of MongoDB, the server gives an event another token. The owner must
// recognize an event that it has stored before.
func TestN15_AnEventHasOnePositionInAllVersionsOfTokens(t *testing.T) {
	t.Parallel()
	const uuid = "6E5A1004F905307258A64E45BCB430ACFBC8238C"
	tokens := []string{
		"8266A1B2C300000005" + "2B02" + "2C01002B0A" + uuid + "46645F696400646B0C9561BBE3CBFE0AADCD8C0004",
		"8266A1B2C300000005" + "2B04" + "2C01002B0A" + uuid + "463C6F7065726174696F6E54797065003C696E73657274000004",
	}

	for _, token := range tokens {
		raw, err := bson.Marshal(bson.D{{Key: "_id", Value: bson.D{{Key: "_data", Value: token}}}, {Key: "operationType", Value: "insert"}})
		if err != nil {
			t.Fatal(err)
		}
		var ev Event
		if err := Parse(raw, &ev); err != nil || string(ev.Pos) != "8266A1B2C3000000052C01002B0A" {
			t.Errorf("position %s, %v", ev.Pos, err)
		}
	}
}

func TestParseInsert(t *testing.T) {
	t.Parallel()
	var ev Event
	if err := Parse(insertEvent(t), &ev); err != nil {
		t.Fatal(err)
	}

	if ev.Op != Insert || string(ev.Pos) != "826B018C46" || ev.ClusterTime != (bson.Timestamp{T: 7, I: 9}) ||
		ev.WallMS != 1234567 ||
		string(ev.DB) != "shop" || string(ev.Coll) != "outbox.v1" || !ev.HasUUID || ev.UUID[15] != 'f' || !ev.HasDocument {
		t.Errorf("parsed %+v", ev)
	}

	if id, _ := (bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}).StringValueOK(); id != "e1" {
		t.Errorf("id %q, want e1", id)
	}
	if p := bson.Raw(ev.Document).Lookup("payload"); p.Type != bson.TypeBinary {
		t.Errorf("document %s, want a binary payload", bson.Raw(ev.Document))
	}
	if d, _ := bson.Raw(ev.Token).Lookup("_data").StringValueOK(); d != "826B018C46" {
		t.Errorf("token %s, want _data 826B018C46", bson.Raw(ev.Token))
	}
}

func TestParseOtherKinds(t *testing.T) {
	t.Parallel()
	token := bson.E{Key: "_id", Value: bson.D{{Key: "_data", Value: "82"}}}
	for _, c := range []struct {
		name string
		op   Op
	}{
		{"drop", Drop},
		{"rename", Rename},
		{"dropDatabase", DropDatabase},
		{"invalidate", Invalidate},
		{"createIndexes", Other},
	} {
		raw, err := bson.Marshal(bson.D{
			token,
			{Key: "operationType", Value: c.name},
			{Key: "clusterTime", Value: bson.Timestamp{T: 5}},
			{Key: "ns", Value: bson.D{{Key: "db", Value: "a"}}},
			{Key: "to", Value: bson.D{{Key: "db", Value: "b"}, {Key: "coll", Value: "c"}}},
		})
		if err != nil {
			t.Fatal(err)
		}

		var ev Event
		if err := Parse(raw, &ev); err != nil {
			t.Fatal(err)
		}
		if ev.Op != c.op || string(ev.DB) != "a" || ev.Coll != nil || string(ev.ToDB) != "b" ||
			string(ev.ToColl) != "c" || ev.WallMS != 5000 || ev.HasDocument {
			t.Errorf("%s: parsed %+v, want op %s", c.name, ev, c.op)
		}
	}

	for _, bad := range []bson.D{
		{},
		{token},
		{{Key: "operationType", Value: "insert"}},
		{token, {Key: "operationType", Value: 1}},
	} {
		raw, _ := bson.Marshal(bad)
		if err := Parse(raw, new(Event)); err == nil {
			t.Errorf("Parse(%v) returned no error", bad)
		}
	}
}

func TestParseRejectsTruncation(t *testing.T) {
	t.Parallel()
	raw := insertEvent(t)
	for n := range raw {
		cut := bytes.Clone(raw[:n])
		if err := Parse(cut, new(Event)); err == nil {
			t.Fatalf("Parse accepted %d of %d bytes", n, len(raw))
		}

		// With a matching length the result may be valid, but Parse must not panic.
		if n >= 5 {
			binary.LittleEndian.PutUint32(cut, uint32(n))
			cut[n-1] = 0
			_ = Parse(cut, new(Event))
		}
	}
}

func TestParseAllocatesNothing(t *testing.T) {
	raw := insertEvent(t)
	var ev Event
	if n := testing.AllocsPerRun(100, func() { _ = Parse(raw, &ev) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(insertEvent(f))
	f.Add([]byte{5, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var ev Event
		err := Parse(raw, &ev)
		if err == nil && bson.Raw(raw).Validate() == nil {
			if d, ok := bson.Raw(raw).Lookup("_id", "_data").StringValueOK(); ok && string(resume.AppendOperation(nil, d)) != string(ev.Pos) &&
				bytes.Count(raw, []byte("_data")) == 1 {
				t.Errorf("data %q, want %q", ev.Pos, d)
			}
		}
		_, _, _ = lookupField(raw, "_id")
	})
}

func BenchmarkParse(b *testing.B) {
	raw := insertEvent(b)
	var ev Event
	b.ReportAllocs()
	for b.Loop() {
		if err := Parse(raw, &ev); err != nil {
			b.Fatal(err)
		}
	}
}
