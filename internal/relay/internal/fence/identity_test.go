package fence

import (
	"testing"

	"github.com/outrelay/outrelay/internal/contract/record"
)

func TestN07_IdentityDistinguishesDeliveries(t *testing.T) {
	t.Parallel()
	same := mustIdentify(t, newHeader("id", "a"), newHeader("type", "Placed"))
	if same != mustIdentify(t, newHeader("id", "a"), newHeader("type", "Shipped"), newHeader("id", "b")) {
		t.Error("headers that do not identify changed the identity")
	}

	seen := map[Identity]int{same: -1}
	for i, hs := range [][]record.Header{
		{newHeader("id", "")},
		{newHeader("id", "b")},
		{newHeader("id", "a"), newHeader("outrelay-id-type", "string")},
		{newHeader("id", "a"), newHeader("outrelay-ns", "string")},
		{newHeader("id", "a"), newHeader("outrelay-ns", "")},
		{newHeader("id", "a"), newHeader("outrelay-delivery", "1")},
		{newHeader("id", "a"), newHeader("outrelay-delivery", "2")},
		{newHeader("id", "a"), newHeader("outrelay-ns", "n"), newHeader("outrelay-delivery", "1")},
	} {
		id := mustIdentify(t, hs...)
		if j, dup := seen[id]; dup {
			t.Errorf("case %d has the identity of case %d", i, j)
		}
		seen[id] = i
	}
	if _, ok := IdentityOf([]record.Header{newHeader("type", "x")}); ok {
		t.Error("a record without an id has an identity")
	}
}

func TestN07_KnownIsAMultiset(t *testing.T) {
	t.Parallel()
	a, b := mustIdentify(t, newHeader("id", "a")), mustIdentify(t, newHeader("id", "b"))
	var k Known
	for i, id := range []Identity{a, b, a, a} {
		k.Add(id, int64(10+i), 1000)
	}
	if k.Len() != 4 {
		t.Errorf("Len() = %d, want 4", k.Len())
	}

	for _, want := range []int64{10, 12, 13} {
		if got, ok := k.Take(a, AnyTime); !ok || got != want {
			t.Errorf("Take(a) = %d, %t, want %d", got, ok, want)
		}
	}
	if _, ok := k.Take(a, AnyTime); ok {
		t.Error("a fourth a was found")
	}
	if got, ok := k.Take(b, AnyTime); !ok || got != 11 || k.Len() != 0 {
		t.Errorf("Take(b) = %d, %t with %d left", got, ok, k.Len())
	}
	if _, ok := (*Known)(nil).Take(a, AnyTime); ok {
		t.Error("a nil Known contains an identity")
	}
}

func TestN07_LookupDoesNotAllocate(t *testing.T) {
	var k Known
	hs := []record.Header{newHeader("id", "01890a5d-ac96-774b-bcce-b302099a8057"), newHeader("outrelay-ns", "12345678"), newHeader("type", "OrderPlaced")}
	for i := range 2000 {
		k.Add(mustIdentify(t, hs...), int64(i), 1000)
	}

	if n := testing.AllocsPerRun(1000, func() {
		id, ok := IdentityOf(hs)
		if ok {
			_, ok = k.Take(id, AnyTime)
		}
		if !ok {
			panic("not found")
		}
	}); n > 0 {
		t.Errorf("%v allocations per lookup", n)
	}
}

func TestKnownCountsDeliveries(t *testing.T) {
	t.Parallel()
	a, b, c := Identity{1}, Identity{2}, Identity{3}
	k := &Known{}
	if k.Has(a, AnyTime) {
		t.Error("an empty set has something in it")
	}

	k.Add(a, 7, 1000)
	k.Add(b, 5, 1000)
	k.Add(a, 9, 1000)
	k.Add(c, 10, 1000)
	k.Add(a, 12, 1000)
	if k.Len() != 5 || !k.Has(c, AnyTime) {
		t.Fatalf("%d deliveries", k.Len())
	}

	for _, want := range []int64{7, 9, 12} {
		if at, ok := k.Take(a, AnyTime); !ok || at != want {
			t.Fatalf("found at %d, want %d", at, want)
		}
	}
	if k.Has(a, AnyTime) || k.Len() != 2 {
		t.Error("a taken identity is still there")
	}
}

// A service may use an id again. Then the time of a record of the stream, or the position of a record of the store, distinguishes the events.
func TestN07_AnIDThatIsUsedAgainIsAnotherDelivery(t *testing.T) {
	t.Parallel()
	const first, second, other = 1000, 1001, 1002
	stored := record.AppendPositionDigest(nil, []byte("82AA"))
	found := func(k *Known, rec record.Record) (offset int64) {
		offset = -1
		EachHit(&rec, func(id Identity, timeMS int64) bool {
			at, ok := k.Take(id, timeMS)
			if ok {
				offset = at
			}
			return ok
		})
		return offset
	}
	id := newHeader(record.HeaderID, "x")
	position := record.Header{Key: []byte(record.HeaderPosition), Value: stored}

	for name, c := range map[string]struct {
		rec  record.Record
		want int64 // offset
	}{
		"of the stream":                  {record.Record{Headers: []record.Header{id}, TimeMS: second}, 8},
		"another one of the stream":      {record.Record{Headers: []record.Header{id}, TimeMS: other}, -1},
		"of the store":                   {record.Record{Headers: []record.Header{id, position}, TimeMS: other}, 9},
		"of the store, sent before":      {record.Record{Headers: []record.Header{id, {Key: position.Key, Value: []byte("another1")}}, Sent: record.Sent{StreamMS: first}}, 7},
		"of the store, not sent before":  {record.Record{Headers: []record.Header{id, {Key: position.Key, Value: []byte("another1")}}, TimeMS: first}, -1},
		"of the stream, from the store":  {record.Record{Headers: []record.Header{id}, TimeMS: other, Sent: record.Sent{Positions: [2][]byte{[]byte("82AA")}}}, 9},
		"of a sweep":                     {record.Record{Headers: []record.Header{id}, TimeMS: other, Sent: record.Sent{AnyTime: true}}, 7},
		"of the stream, at another time": {record.Record{Headers: []record.Header{id, newHeader(record.HeaderDelivery, "1")}, TimeMS: other}, 10},
	} {
		k := &Known{}
		add := func(offset, timeMS int64, headers ...record.Header) {
			k.Add(mustIdentify(t, headers...), offset, timeMS)
		}
		add(7, first, id)
		add(8, second, id)
		add(9, 5000, id, position)
		// The topic stores the times at which the broker has appended the records.
		add(10, AnyTime, id, newHeader(record.HeaderDelivery, "1"))
		if got := found(k, c.rec); got != c.want {
			t.Errorf("%s: found at %d, want %d", name, got, c.want)
		}
		if want := 4; c.want < 0 && k.Len() != want || c.want >= 0 && k.Len() != want-1 {
			t.Errorf("%s: %d records are left", name, k.Len())
		}
	}
}

// The _id of the document decides, wherever the header id comes from. So a record of before a mapping is recognized, and
// two documents with the same mapped id are two deliveries.
func TestN07_DocumentIDIsTheIdentity(t *testing.T) {
	t.Parallel()
	identity := func(pairs ...string) Identity {
		var headers []record.Header
		for i := 0; i < len(pairs); i += 2 {
			headers = append(headers, record.Header{Key: []byte(pairs[i]), Value: []byte(pairs[i+1])})
		}
		id, ok := IdentityOf(headers)
		if !ok {
			t.Fatalf("%v has no identity", pairs)
		}
		return id
	}

	plain := identity(record.HeaderID, "e-1")
	if identity(record.HeaderID, "5", record.HeaderDocumentID, "e-1") != plain {
		t.Error("the mapped id changes the identity")
	}
	if identity(record.HeaderID, "5", record.HeaderDocumentID, "e-2") == plain {
		t.Error("two documents with the same mapped id are one delivery")
	}

	// The preset debezium writes a UUID as base64, and marks a string that has this form.
	uuid := identity(record.HeaderID, "01020304-0506-0708-090a-0b0c0d0e0fff")
	if identity(record.HeaderID, "AQIDBAUGBwgJCgsMDQ4P/w==") != uuid {
		t.Error("the base64 of a UUID is another identity than its digits")
	}
	if identity(record.HeaderID, "AQIDBAUGBwgJCgsMDQ4P/w==", record.HeaderIDType, "string") == uuid {
		t.Error("a string that is the base64 of a UUID is the UUID")
	}
}
