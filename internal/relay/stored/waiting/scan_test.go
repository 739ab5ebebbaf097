package waiting

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// oddKeys are ordering keys that a query or a collation could take for something else.
var oddKeys = []string{"", "k1", "K1", "k10", "k2", "$key", "$gt", "{\"$gt\": \"\"}", "/.*/", ".*", "null", "7", "é", "e\u0301", "\x00", "a\x00b", "ÿ", "😀"}

// mixed returns envelopes of several outboxes and keys, several of which have one position.
func mixed(t *testing.T) (list []Entry) {
	t.Helper()
	for i := range 180 {
		list = append(list, newEntry(t, i, oddKeys[i%len(oddKeys)], func(e *Entry) {
			e.NS = []string{"shop.outbox", "shop.outbox2", "Shop.outbox"}[i%3]
			e.Pos = fmt.Sprintf("82%02X", i*7%40)
			e.Pending = [][]string{{"a"}, {"b"}, {"a", "b"}, nil}[i%4]
			e.Slot = int32(i % 4)
		}))
	}
	return list
}

// checkOrder returns a function for readAll that checks the order of N15, and the number of different documents.
func checkOrder(t *testing.T, doing string) (take func(*Document), n func() int) {
	seen, last, ended := map[string]bool{}, map[[2]string]string{}, map[[2]string]bool{}
	var current [2]string
	return func(d *Document) {
		id := string(d.DocumentID[:])
		key := [2]string{d.NS, d.Key}
		if seen[id] {
			t.Errorf("%s: %v came twice", doing, d.ID)
		}
		seen[id] = true
		if key != current {
			ended[current] = true
			current = key
		}
		if ended[key] || d.Pos < last[key] {
			t.Errorf("%s: %s of key %q in %s came after %s, after the end of the key: %t", doing, d.Pos, d.Key, d.NS, last[key], ended[key])
		}
		last[key] = d.Pos
	}, func() int { return len(seen) }
}

func TestN15_AScanIsInTheOrderOfDelivery(t *testing.T) {
	t.Parallel()
	collation := func(c options.Collation) []options.Lister[options.CreateCollectionOptions] {
		return []options.Lister[options.CreateCollectionOptions]{options.CreateCollection().SetCollation(&c)}
	}
	for name, opts := range map[string][]options.Lister[options.CreateCollectionOptions]{
		"simple": nil,
		// Positions and keys are compared as bytes, also in a collection that somebody else created.
		"numbers": collation(options.Collation{Locale: "en", NumericOrdering: true}),
		"coarse":  collation(options.Collation{Locale: "en", Strength: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			coll := newColl(t, opts...)
			list := mixed(t)
			enter(t, coll, list...)
			enter(t, coll, newEntry(t, 1, "k1", func(e *Entry) { e.Watcher = "orders2" }), newEntry(t, 2, "k1", func(e *Entry) { e.Watcher = "Orders" }))

			for _, limit := range []int{1, 2, 7, 50, 180, 500} {
				take, n := checkOrder(t, fmt.Sprint("limit ", limit))
				readAll(t, &Scan{Store: storeOf(coll)}, limit, take)
				if n() != len(list) {
					t.Errorf("limit %d: %d of %d", limit, n(), len(list))
				}
			}

			for i := range oddKeys {
				want := 0
				for _, e := range list {
					if e.NS == "shop.outbox" && e.Key == oddKeys[i] {
						want++
					}
				}
				got := 0
				readAll(t, &Scan{Store: storeOf(coll), NS: "shop.outbox", Keys: oddKeys[i : i+1]}, 2, func(d *Document) {
					if got++; d.Key != oddKeys[i] || d.NS != "shop.outbox" {
						t.Errorf("key %q of %s was not requested", d.Key, d.NS)
					}
				})
				if got != want {
					t.Errorf("key %q: %d of %d", oddKeys[i], got, want)
				}
			}
		})
	}
}

// The topics that a scan leaves out may grow between two pages, and a scan may leave a key.
func TestN15_AScanLeavesOutTopicsAndKeys(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	enter(t, coll, mixed(t)...)
	only := func(d *Document, topic string) bool { return slices.Equal(d.Pending, []string{topic}) }

	n := 0
	readAll(t, &Scan{Store: storeOf(coll), Skip: []string{"a"}}, 3, func(d *Document) {
		if n++; only(d, "a") {
			t.Errorf("%v waits only for a", d.ID)
		}
	})
	if n != 180*3/4 {
		t.Errorf("%d without those that wait only for a", n)
	}

	// Of each key, only the first envelope is read.
	s, keys := &Scan{Store: storeOf(coll)}, map[[2]string]int{}
	for more := true; more; {
		var err error
		more, err = s.Page(t.Context(), 10, func(raw bson.Raw) error {
			d := ReadDocument(raw)
			keys[[2]string{d.NS, d.Key}]++
			s.Leave(nil)
			return ErrLeave
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for key, n := range keys {
		if n != 1 {
			t.Errorf("%d of key %q", n, key)
		}
	}
	// Each outbox has every third of the positions, and so each key of every third.
	if want := len(oddKeys); len(keys) != want {
		t.Errorf("%d keys, want %d", len(keys), want)
	}

	// The rest of a key is left only for a topic, and not for the next key.
	s, n = &Scan{Store: storeOf(coll), NS: "shop.outbox"}, 0
	left := ""
	for more := true; more; {
		var err error
		more, err = s.Page(t.Context(), 5, func(raw bson.Raw) error {
			d := ReadDocument(raw)
			if d.Key == left && left != "" && only(&d, "a") {
				t.Errorf("%v of the left key waits only for a", d.ID)
			}
			if only(&d, "b") && d.Key != left {
				left = d.Key
				s.Leave([]string{"a"})
				return ErrLeave
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A slot reads only its own envelopes, and the slots together read all.
func TestN28_SlotsShareTheStore(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	list := mixed(t)
	for i := range list {
		list[i].Slot = int32(i * 5 % 1024)
	}
	enter(t, coll, list...)
	all := 0

	for i := range 3 {
		s := NewStore(coll, "orders", slot.Range{I: i, N: 3})
		n, each := 0, 0
		readAll(t, &Scan{Store: s}, 10, func(*Document) { n++ })
		if err := s.Each(t.Context(), func(*Document) error { each++; return nil }); err != nil || each != n {
			t.Errorf("slot %d: %d and %d, %v", i, n, each, err)
		}
		if n == 0 || n == len(list) {
			t.Errorf("slot %d has %d", i, n)
		}
		all += n
	}
	if all != len(list) {
		t.Errorf("the slots have %d of %d", all, len(list))
	}
}

// The plans of the queries: none reads documents that it does not return, none scans the collection, and only the one of several
// keys sorts.
func TestQueriesOfTheStoreUseItsIndexes(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	var list []Entry
	for i := range 3000 {
		list = append(list, newEntry(t, i, fmt.Sprint("k", i%50), at(time.Hour), func(e *Entry) { e.Slot = int32(i % 1024) }))
	}
	for _, part := range [][]Entry{list[:1000], list[1000:2000], list[2000:]} {
		enter(t, coll, part...)
	}

	var mu sync.Mutex
	var plans []stacktest.Plan
	asked := coll.Database().Collection(coll.Name()).Database().Name()
	client := stacktest.Explained(t, func(p stacktest.Plan) { mu.Lock(); defer mu.Unlock(); plans = append(plans, p) })
	store := storeOf(client.Database(asked).Collection(coll.Name()))

	for name, c := range map[string]struct {
		run        func() error
		docs, keys int64 // at most
		sorts      bool
	}{
		"first page": {func() error { _, err := (&Scan{Store: store}).Page(t.Context(), 100, ignore); return err }, 101, 110, false},
		"keys": {func() error {
			_, err := (&Scan{Store: store, NS: "shop.outbox", Keys: []string{"k3", "k4"}}).Page(t.Context(), 200, ignore)
			return err
		}, 130, 140, true},
		"due": {func() error { _, err := store.DueKeys(t.Context(), time.Now(), nil, 100); return err }, 1, 5, false},
		"next pages": {func() error {
			s := &Scan{Store: store}
			for range 5 {
				if _, err := s.Page(t.Context(), 50, ignore); err != nil {
					return err
				}
			}
			return nil
		}, 300, 330, false},
		"takeover": {func() error { return store.Each(t.Context(), func(*Document) error { return nil }) }, 0, 3100, false},
		// The plan of an aggregation names the figures of its query twice.
		"counts": {func() error {
			_, err := CountGroups(t.Context(), store.coll, Query{Watcher: store.watcher})
			return err
		}, 0, 6100, false},
		"unneeded": {func() error { _, err := store.Unneeded(t.Context(), []string{"a"}); return err }, 0, 6100, false},
		"ids": {func() error {
			return store.OfIDs(t.Context(), "shop.outbox", []bson.RawValue{list[7].Raw.Lookup("_id")}, func(*Document) error { return nil })
		}, 1, 5, false},
	} {
		mu.Lock()
		plans = nil
		mu.Unlock()
		if err := c.run(); err != nil {
			t.Fatal(name, err)
		}
		var docs, keys int64
		for _, p := range plans {
			docs, keys = docs+p.Docs, keys+p.Keys
			stages := strings.Join(p.Stages, " ")
			if strings.Contains(stages, "COLLSCAN") || strings.Contains(stages, "SORT ") && !c.sorts {
				t.Errorf("%s: %s by %s", name, p.Command, stages)
			}
		}
		if len(plans) == 0 || docs > c.docs || keys > c.keys {
			t.Errorf("%s: %d plans, %d documents and %d keys examined, at most %d and %d are needed", name, len(plans), docs, keys, c.docs, c.keys)
		}
	}
}

func ignore(bson.Raw) error { return nil }

// A page contains everything that was committed before its call (N21, N22).
func TestN21_APageSeesWhatWasCommittedBefore(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	early := coll.Clone(options.Collection().SetWriteConcern(nil))
	for i := range 20 {
		enterEarly(t, early, newEntry(t, i, "k"))
		n := 0
		readAll(t, &Scan{Store: storeOf(coll)}, 100, func(*Document) { n++ })
		if n != i+1 {
			t.Fatalf("%d are seen of %d", n, i+1)
		}
	}
}

func enterEarly(t *testing.T, coll *mongo.Collection, e Entry) {
	t.Helper()
	if err := Enter(t.Context(), coll, []Entry{e}); err != nil {
		t.Fatal(err)
	}
}

func TestDueKeysAreThoseOfTheServersTime(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	enter(t, coll, newEntry(t, 1, "past", at(-time.Hour)), newEntry(t, 2, "now", at(-time.Millisecond)), newEntry(t, 3, "future", at(time.Hour)),
		newEntry(t, 4, "parked"), newEntry(t, 5, "of b", at(-time.Minute), func(e *Entry) { e.Pending = []string{"b"} }),
		newEntry(t, 6, "another watcher", at(-time.Hour), func(e *Entry) { e.Watcher = "audit" }))
	names := func(near time.Time, skip ...string) (list []string) {
		t.Helper()
		keys, err := storeOf(coll).DueKeys(t.Context(), near, skip, 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			list = append(list, k.Key)
		}
		return list
	}

	if got := names(time.Now()); !slices.Equal(got, []string{"past", "of b", "now"}) {
		t.Errorf("due: %v", got)
	}
	// The clock of this process is fast: the server decides.
	if got := names(time.Now().Add(5*time.Hour), "b"); !slices.Equal(got, []string{"past", "now"}) {
		t.Errorf("due by a fast clock, without topic b: %v", got)
	}
}

// A takeover looks for the records of waiting envelopes. Only one that lists no topics needs its headers and its payload.
func TestATakeoverReadsNoPayloadOfListedTopics(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	whole := func(topics ...string) func(*Entry) {
		return func(e *Entry) {
			e.Raw = marshal(t, bson.D{{Key: "_id", Value: e.Raw.Lookup("_id")}, {Key: "headers", Value: bson.D{{Key: "tenant", Value: "x"}}}, {Key: "payload", Value: "p"}})
			e.Pending = topics
		}
	}
	enter(t, coll, newEntry(t, 1, "k", whole("a")), newEntry(t, 2, "k", whole("b")), newEntry(t, 3, "k", whole()))

	read := map[string]bson.Raw{}
	err := storeOf(coll).EachWithoutPayload(t.Context(), []string{"a"}, func(d *Document) error {
		read[joinTopics(d.Pending)] = slices.Clone(d.Envelope)
		return nil
	})
	if err != nil || len(read) != 2 {
		t.Fatalf("read %v, %v", read, err)
	}
	if listed := read["a"]; listed.Lookup("headers").Type != 0 || listed.Lookup("payload").Type != bson.TypeNull {
		t.Errorf("with a listed topic: %v", listed)
	}
	if unlisted := read[""]; unlisted.Lookup("headers", "tenant").Type == 0 || unlisted.Lookup("payload").Type != bson.TypeString {
		t.Errorf("without a listed topic: %v", unlisted)
	}
}
