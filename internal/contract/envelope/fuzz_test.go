package envelope_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// summary returns the contents of a View in a form that can be compared.
func summary(v *envelope.View) map[string]string {
	m := map[string]string{
		"id": fmt.Sprintf("%s %x", bson.Type(v.IDType), v.ID), "aggregatetype": show(v.AggregateType), "aggregateid": show(v.AggregateID), "type": show(v.Type),
		"payload": fmt.Sprintf("%s %x", bson.Type(v.PayloadType), v.Payload), "key": show(v.Key), "topic": show(v.Topic), "partition": fmt.Sprint(v.Partition),
		"contenttype": show(v.ContentType), "schemaversion": show(v.SchemaVersion), "source": show(v.Source), "subject": show(v.Subject),
		"time": fmt.Sprint(v.Time, v.HasTime), "dueAt": fmt.Sprint(v.DueAt, v.HasDueAt), "expiresAt": fmt.Sprint(v.ExpiresAt, v.HasExpiresAt),
		"ts": fmt.Sprint(v.TS), "slot": fmt.Sprint(v.Slot),
	}

	var hs []string
	for it := v.Headers.Iter(); it.Next(); {
		hs = append(hs, fmt.Sprintf("%q=%s", it.Key, show(it.Value)))
	}

	m["headers"] = strings.Join(hs, ",")
	return m
}

func show(b []byte) string {
	if b == nil {
		return "nil"
	}
	return fmt.Sprintf("%x", b)
}

// reference reads an envelope with the decoder of the driver. ok is false if the envelope must be
// rejected.
func reference(raw bson.Raw) (m map[string]string, ok bool) {
	elems, err := raw.Elements()
	if err != nil || !framed(raw, elems) || unterminated(elems) {
		return nil, false
	}

	vals := map[string]bson.RawValue{}
	for _, e := range elems {
		if _, twice := vals[e.Key()]; twice && known[e.Key()] {
			return nil, false
		}
		vals[e.Key()] = e.Value()
	}

	r := refReader{vals: vals, ok: true}
	m = map[string]string{
		"id": r.id(), "aggregatetype": r.str("aggregatetype", true), "aggregateid": r.text("aggregateid", true), "type": r.str("type", true),
		"payload": r.payload(), "key": r.text("key", false), "topic": r.str("topic", false), "partition": r.partition(),
		"contenttype": r.str("contenttype", false), "schemaversion": r.text("schemaversion", false), "source": r.str("source", false), "subject": r.str("subject", false),
		"time": r.date("time"), "dueAt": r.date("dueAt"), "expiresAt": r.date("expiresAt"),
		"ts": r.ts(), "slot": r.slot(), "headers": r.headers(),
	}

	return m, r.ok
}

// framed reports whether the length of a document is the number of its bytes, and whether it
// contains exactly its elements and a final zero. The driver ignores all three.
func framed(doc []byte, elems []bson.RawElement) bool {
	n := 5
	for _, e := range elems {
		n += len(e)
	}
	return n == len(doc) && int(binary.LittleEndian.Uint32(doc)) == len(doc) && doc[len(doc)-1] == 0
}

// unterminated finds strings without their final zero, which the driver accepts and Parse does not.
// It looks at the top level, and inside of headers, the only field whose inside Parse reads.
func unterminated(elems []bson.RawElement) bool {
	for _, e := range elems {
		v := e.Value()
		switch v.Type {
		case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
			if v.Value[len(v.Value)-1] != 0 {
				return true
			}
		case bson.TypeDBPointer:
			if v.Value[len(v.Value)-13] != 0 {
				return true
			}
		case bson.TypeArray, bson.TypeEmbeddedDocument:
			if e.Key() == "headers" && unterminatedHeaders(v) {
				return true
			}
		}
	}

	return false
}

func unterminatedHeaders(v bson.RawValue) bool {
	elems, err := bson.Raw(v.Value).Elements()
	if err != nil || !framed(v.Value, elems) || unterminated(elems) {
		return true
	}

	for _, e := range elems {
		if d, ok := e.Value().DocumentOK(); ok {
			if inner, err := d.Elements(); err != nil || !framed(d, inner) || unterminated(inner) {
				return true
			}
		}
	}

	return false
}

var known = func() map[string]bool {
	m := map[string]bool{}
	for _, f := range strings.Fields("_id aggregatetype aggregateid type payload key topic partition headers contenttype schemaversion source subject time ts slot dueAt expiresAt state pos delivery attempts nextAt") {
		m[f] = true
	}
	return m
}()

type refReader struct {
	vals map[string]bson.RawValue
	ok   bool
}

func (r *refReader) no() string { r.ok = false; return "" }

// get returns the value, unless it is missing or null.
func (r *refReader) get(name string) (bson.RawValue, bool) {
	v, ok := r.vals[name]
	return v, ok && v.Type != bson.TypeNull
}

func (r *refReader) id() string {
	v, ok := r.get("_id")
	if !ok {
		return r.no()
	}

	switch v.Type {
	case bson.TypeString:
		if v.StringValue() == "" {
			return r.no()
		}

		return fmt.Sprintf("%s %x", v.Type, v.StringValue())
	case bson.TypeObjectID:
		id := v.ObjectID()
		return fmt.Sprintf("%s %x", v.Type, id[:])
	case bson.TypeBinary:
		if sub, data := v.Binary(); sub == 4 && len(data) == 16 {
			return fmt.Sprintf("%s %x", v.Type, data)
		}
	}

	return r.no()
}

func (r *refReader) str(name string, required bool) string {
	v, ok := r.get(name)
	if ok && v.Type != bson.TypeString {
		return r.no()
	}
	if !ok || v.StringValue() == "" {
		if required {
			r.ok = false
		}
		return "nil"
	}

	return fmt.Sprintf("%x", v.StringValue())
}

func (r *refReader) text(name string, required bool) string {
	v, ok := r.get(name)
	if !ok || v.Type == bson.TypeString {
		return r.str(name, required)
	}

	switch v.Type {
	case bson.TypeInt32:
		return fmt.Sprintf("%x", fmt.Sprint(v.Int32()))
	case bson.TypeInt64:
		return fmt.Sprintf("%x", fmt.Sprint(v.Int64()))
	case bson.TypeObjectID:
		return fmt.Sprintf("%x", v.ObjectID().Hex())
	case bson.TypeBinary:
		if sub, data := v.Binary(); sub == 4 && len(data) == 16 {
			return fmt.Sprintf("%x", uuid.UUID(data).String())
		}
	}

	return r.no()
}

func (r *refReader) payload() string {
	v, ok := r.vals["payload"]
	if !ok {
		return r.no()
	}

	switch v.Type {
	case bson.TypeNull:
		return fmt.Sprintf("%s ", v.Type)
	case bson.TypeString:
		return fmt.Sprintf("%s %x", v.Type, v.StringValue())
	case bson.TypeBinary:
		_, data := v.Binary()
		return fmt.Sprintf("%s %x", v.Type, data)
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		return fmt.Sprintf("%s %x", v.Type, v.Value)
	}

	return r.no()
}

func (r *refReader) whole(name string) (int64, bool) {
	v, ok := r.get(name)
	if !ok {
		return 0, false
	}

	switch v.Type {
	case bson.TypeInt32:
		return int64(v.Int32()), true
	case bson.TypeInt64:
		return v.Int64(), true
	case bson.TypeDouble:
		if f := v.Double(); f == math.Trunc(f) && math.Abs(f) < 1<<53 {
			return int64(f), true
		}
	}

	return 0, false
}

func (r *refReader) partition() string {
	if _, there := r.get("partition"); !there {
		return "-1"
	}
	n, ok := r.whole("partition")
	if !ok || n < -1 || n > math.MaxInt32 {
		return r.no()
	}
	return fmt.Sprint(n)
}

func (r *refReader) slot() string {
	if n, ok := r.whole("slot"); ok && n >= 0 && n < keyhash.Slots {
		return fmt.Sprint(n)
	}
	return "-1"
}

func (r *refReader) ts() string {
	var ts bson.Timestamp
	if v, ok := r.get("ts"); ok && v.Type == bson.TypeTimestamp {
		ts.T, ts.I = v.Timestamp()
	}
	return fmt.Sprint(ts)
}

func (r *refReader) date(name string) string {
	v, ok := r.get(name)
	if !ok {
		return "0 false"
	}
	if v.Type != bson.TypeDateTime {
		return r.no()
	}
	return fmt.Sprint(v.DateTime(), true)
}

func (r *refReader) headers() string {
	v, ok := r.get("headers")
	if !ok {
		return ""
	}
	if v.Type != bson.TypeArray && v.Type != bson.TypeEmbeddedDocument {
		return r.no()
	}

	elems, err := bson.Raw(v.Value).Elements()
	if err != nil {
		return r.no()
	}

	var hs []string
	for _, e := range elems {
		k, val := e.Key(), e.Value()
		if v.Type == bson.TypeArray {
			if k, val, ok = pairOf(val); !ok {
				return r.no()
			}
		}

		if k == "" || k == "id" || strings.HasPrefix(k, "outrelay-") {
			return r.no()
		}

		switch val.Type {
		case bson.TypeNull:
			hs = append(hs, fmt.Sprintf("%q=nil", k))
		case bson.TypeString:
			hs = append(hs, fmt.Sprintf("%q=%x", k, val.StringValue()))
		case bson.TypeBinary:
			_, data := val.Binary()
			hs = append(hs, fmt.Sprintf("%q=%x", k, data))
		default:
			return r.no()
		}
	}

	return strings.Join(hs, ",")
}

func pairOf(v bson.RawValue) (k string, val bson.RawValue, ok bool) {
	if v.Type != bson.TypeEmbeddedDocument {
		return "", val, false
	}

	elems, err := v.Document().Elements()
	if err != nil {
		return "", val, false
	}

	val.Type = bson.TypeNull
	seen := map[string]bool{}
	for _, e := range elems {
		if seen[e.Key()] {
			return "", val, false
		}

		seen[e.Key()] = true
		switch e.Key() {
		case "k":
			if e.Value().Type != bson.TypeString {
				return "", val, false
			}

			k = e.Value().StringValue()
		case "v":
			val = e.Value()
		default:
			return "", val, false
		}
	}

	return k, val, seen["k"]
}

func seeds(t testing.TB) [][]byte {
	oid := bson.NewObjectID()
	all := doc(t, bson.E{Key: "_id", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}}, bson.E{Key: "aggregateid", Value: oid}, bson.E{Key: "key", Value: int64(-5)},
		bson.E{Key: "topic", Value: "t"}, bson.E{Key: "partition", Value: 2.0}, bson.E{Key: "headers", Value: bson.A{pair("a", []byte{1}), pair("b", "s"), pair("c", nil)}},
		bson.E{Key: "contenttype", Value: "c"}, bson.E{Key: "schemaversion", Value: int32(3)}, bson.E{Key: "source", Value: "s"}, bson.E{Key: "subject", Value: "s"},
		bson.E{Key: "time", Value: bson.DateTime(1)}, bson.E{Key: "ts", Value: bson.Timestamp{T: 1, I: 2}}, bson.E{Key: "slot", Value: int32(5)}, bson.E{Key: "dueAt", Value: bson.DateTime(2)},
		bson.E{Key: "expiresAt", Value: bson.DateTime(3)}, bson.E{Key: "state", Value: "retry"}, bson.E{Key: "payload", Value: bson.D{{Key: "a", Value: 1.0}, {Key: "b", Value: bson.A{true, "\n"}}, {Key: "c", Value: bson.CodeWithScope{Code: "x", Scope: bson.D{{Key: "y", Value: bson.Regex{Pattern: "p", Options: "xi"}}}}}}}, bson.E{Key: "pos", Value: "82"}, bson.E{Key: "delivery", Value: int32(1)})

	odd := doc(t, bson.E{Key: "payload", Value: bson.A{1, "x", bson.D{{Key: "n", Value: nil}}}}, bson.E{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}},
		bson.E{Key: "re", Value: bson.Regex{Pattern: "a", Options: "i"}}, bson.E{Key: "js", Value: bson.JavaScript("1")}, bson.E{Key: "cs", Value: bson.CodeWithScope{Code: "1", Scope: bson.D{}}},
		bson.E{Key: "sym", Value: bson.Symbol("s")}, bson.E{Key: "ptr", Value: bson.DBPointer{DB: "d", Pointer: oid}}, bson.E{Key: "dec", Value: bson.NewDecimal128(1, 2)},
		bson.E{Key: "min", Value: bson.MinKey{}}, bson.E{Key: "max", Value: bson.MaxKey{}}, bson.E{Key: "u", Value: bson.Undefined{}}, bson.E{Key: "old", Value: bson.Binary{Subtype: 2, Data: []byte{1}}}, bson.E{Key: "b", Value: true})
	return [][]byte{doc(t), all, odd, {}, {5, 0, 0, 0, 0}}
}

// FuzzParse shows that Parse accepts any bytes without a panic, never reads beyond the document,
// and finds the same values as the decoder of the driver if the decoder can read the document.
func FuzzParse(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, data []byte) { checkParse(t, data) })
}

func checkParse(t *testing.T, data []byte) {
	t.Helper()
	// An exact capacity makes every read beyond the end a panic.
	raw := bytes.Clone(data)
	raw = raw[:len(raw):len(raw)]
	var v envelope.View
	err := envelope.Parse(raw, &v)
	var r *record.Rejection
	if err != nil && !errors.As(err, &r) {
		t.Fatalf("the error is no rejection: %v", err)
	}
	if !bytes.Equal(raw, data) {
		t.Fatal("the document was changed")
	}

	if err == nil {
		got := summary(&v)
		v.AppendID(nil)
		checkPayload(t, &v)
		// The same document in the middle of other bytes reads the same: nothing outside of it counts.
		padded := append(append(bytes.Repeat([]byte{0xff}, 16), data...), bytes.Repeat([]byte{0xff}, 16)...)
		var w envelope.View
		if err := envelope.Parse(padded[16:16+len(data)], &w); err != nil {
			t.Fatalf("in other surroundings: %v", err)
		}
		if diff := cmp.Diff(got, summary(&w)); diff != "" {
			t.Fatalf("in other surroundings: %s", diff)
		}
	}

	if bson.Raw(raw).Validate() != nil {
		return
	}

	want, ok := reference(raw)
	if ok != (err == nil) {
		t.Fatalf("Parse: %v; the driver's decoder finds it good: %v\n%x", err, ok, data)
	}
	if !ok {
		return
	}
	if diff := cmp.Diff(want, summary(&v)); diff != "" {
		t.Fatal(diff)
	}
}

// checkPayload compares the payload with the output of the driver's writer, if the writer can read
// the document.
func checkPayload(t *testing.T, v *envelope.View) {
	t.Helper()
	got, err := envelope.AppendPayload(nil, v)
	if err != nil || v.PayloadType != byte(bson.TypeEmbeddedDocument) || bytes.Contains(got, []byte(`"subType":"02"`)) {
		return
	}
	if want, err := bson.MarshalExtJSON(bson.Raw(v.Payload), false, false); err == nil && string(got) != string(want) {
		t.Fatalf("payload %s, the driver writes %s", got, want)
	}
}

// TestParseSurvivesMutations changes each byte of the seeds, so that an ordinary run covers the first cases
// of the fuzzer.
func TestParseSurvivesMutations(t *testing.T) {
	t.Parallel()
	for _, s := range seeds(t) {
		for i := range s {
			for _, x := range []byte{0x01, 0x80, 0xff, s[i]} {
				m := bytes.Clone(s)
				m[i] ^= x
				checkParse(t, m)
			}
		}
	}
}
