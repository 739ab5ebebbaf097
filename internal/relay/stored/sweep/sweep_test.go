package sweep

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestSweepsInTheOrderOfStampsOverCollections(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	names := []string{"a", "b", "c"}
	var want []string
	for i := range 300 {
		id := fmt.Sprintf("e%03d", i)
		b.insert(t.Context(), b.newOutbox(names[i*7%3]), id)
		want = append(want, id)
	}

	// The fields of a service decide nothing. Which envelopes wait or are dead is looked up when they are delivered.
	b.insert(t.Context(), b.newOutbox("a"), "own fields", bson.E{Key: "state", Value: "retry"}, bson.E{Key: "claim", Value: 1}, bson.E{Key: "pending", Value: "x"})
	want = append(want, "own fields")
	b.insert(t.Context(), b.newOutbox("b"), "scheduled", bson.E{Key: "dueAt", Value: time.Now()})
	b.insert(t.Context(), b.newOutbox("c"), "sent", bson.E{Key: "sentAt", Value: time.Now()}, bson.E{Key: "sent", Value: bson.A{}})
	to := b.clusterTime()
	b.insert(t.Context(), b.newOutbox("a"), "late")

	p := &publisher{}
	s := b.newSweep(to, p, names...)
	// With one byte of memory, each response is small, so there are many.
	s.Memory = 1
	if res := b.run(s); res.Swept != 301 {
		t.Errorf("%d swept, want 301", res.Swept)
	}

	p.checkSent(t, want...)

	for i, m := range p.marks {
		if below := slices.IndexFunc(p.stamps, func(ts bson.Timestamp) bool { return ts.After(m) }); below >= 0 && below < p.at[i] || below < 0 && p.at[i] < 301 {
			t.Errorf("mark %d at %v after %d envelopes is not between two stamps", i, m, p.at[i])
		}
	}
	if len(p.marks) < 2 || p.marks[len(p.marks)-1] != to {
		t.Errorf("marks %v, want several and the last at %v", p.marks, to)
	}
}

func TestFromCursorAndMargin(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	at := func(id string, ts bson.Timestamp) {
		if _, err := c.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: ts}}); err != nil {
			t.Fatal(err)
		}
	}

	at("old", bson.Timestamp{T: 1000, I: 1})
	at("margin", bson.Timestamp{T: 1901, I: 1})
	at("in", bson.Timestamp{T: 2500, I: 1})
	// The server stamps this envelope, with a later time.
	at("unstamped", bson.Timestamp{})

	for _, x := range []struct {
		name         string
		from, cursor uint32
		want         []string
	}{
		{"everything", 0, 0, []string{"old", "margin", "in"}},
		{"from a time", 2000, 0, []string{"margin", "in"}},
		{"after a cursor", 2000, 2000, []string{"in"}},
		{"after all", 2000, 2500, nil},
	} {
		p := &publisher{}
		s := b.newSweep(bson.Timestamp{T: 3000}, p, "o")
		s.From, s.Margin = bson.Timestamp{T: x.from}, 100*time.Second
		if x.cursor > 0 {
			s.Cursor = bson.Timestamp{T: x.cursor, I: 1}
		}
		b.run(s)
		if !slices.Equal(p.ids, x.want) {
			t.Errorf("%s: swept %q, want %q", x.name, p.ids, x.want)
		}
	}

	if m := mongodb.Margin(t.Context(), b.client); m != mongodb.MinMargin {
		t.Errorf("margin %v on a server with the default life of transactions", m)
	}
}

// The times in ids limit the repeats of a sweep. The sweep leaves out no envelope that was inserted since by a writer
// whose clock is wrong by less than the margin, and it keeps the order of insertion.
func TestN25_TimesInIDsLimitTheSweepOfUnstampedEnvelopes(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	now := time.Now()
	const margin = idMargin

	objectID := func(at time.Time) any {
		id, fresh := outboxes.FirstObjectID(at), bson.NewObjectID()
		copy(id[4:], fresh[4:])
		return id
	}
	uuidOf := func(version byte) func(at time.Time) any {
		return func(at time.Time) any {
			id := outboxes.FirstUUID(at)
			id.Data[6], id.Data[8] = version<<4, 0x80
			return id
		}
	}

	// The latest come first, so that the order of the ids differs from the order of insertion.
	// since includes the envelopes that were inserted after an early purge.
	var all, recent, since []string
	for _, kind := range []struct {
		name  string
		id    func(at time.Time) any
		timed bool
	}{{"ObjectId", objectID, true}, {"UUIDv7", uuidOf(7), true}, {"UUIDv4", uuidOf(4), false}, {"text", nil, false}} {
		for _, ago := range []time.Duration{-2 * margin, 0, 10 * time.Hour, margin - time.Minute, margin + time.Minute, 1000 * margin} {
			name := kind.name + " of " + ago.String() + " ago"
			id := any(name)
			if kind.id != nil {
				id = kind.id(now.Add(-ago))
			}
			if _, err := c.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "type", Value: name}}); err != nil {
				t.Fatal(err)
			}
			all = append(all, name)
			if !kind.timed || ago < margin {
				recent = append(recent, name)
			}
			if !kind.timed || ago < margin || ago > 2*margin {
				since = append(since, name)
			}
		}
	}

	uuid := findUUID(t, b, "o")
	for _, x := range []struct {
		name   string
		from   bson.Timestamp
		change func(s *Sweep)
		want   []string
	}{
		{"since a time", bson.Timestamp{T: uint32(now.Unix())}, func(*Sweep) {}, recent},
		{"with ids of any age", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) { s.OldIDs = true }, all},
		{"of everything", bson.Timestamp{}, func(*Sweep) {}, all},
		{"with irregular ids", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) {
			s.Claims = map[[16]byte]outboxes.Registration{uuid: {IrregularIDs: true}}
		}, all},
		{"of a purged collection", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) {
			s.Claims = map[[16]byte]outboxes.Registration{uuid: {PurgedIDs: bson.Timestamp{T: uint32(now.Add(-margin).Unix())}}}
		}, all},
		{"of a collection that was purged long ago", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) {
			s.Claims = map[[16]byte]outboxes.Registration{uuid: {PurgedIDs: bson.Timestamp{T: uint32(now.Add(-2 * margin).Unix())}}}
		}, since},
		{"of a collection without a known UUID", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) { s.Collections[0].UUID = [16]byte{} }, all},
		{"of a collection that was never read", bson.Timestamp{T: uint32(now.Unix())}, func(s *Sweep) {
			s.ReadUpTo = map[string]bson.Timestamp{s.Collections[0].NS(): {}}
		}, all},
	} {
		p := &publisher{}
		s := b.newSweep(b.clusterTime(), p, "o")
		s.From, s.Collections[0].UUID = x.from, uuid
		x.change(s)
		n, err := s.Count(t.Context(), s.Collections[0])

		b.run(s)
		if !slices.Equal(p.ids, x.want) {
			t.Errorf("%s: swept %q, want %q", x.name, p.ids, x.want)
		}
		if err != nil || int(n) != len(x.want) {
			t.Errorf("%s: %d are counted, want %d (%v)", x.name, n, len(x.want), err)
		}
	}
}

// findUUID returns the UUID of a collection.
func findUUID(t *testing.T, b *bundle, name string) [16]byte {
	t.Helper()
	found, err := outboxes.ListOutboxes(t.Context(), b.client, func(_, c []byte) bool { return string(c) == name }, b.db.Name())
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	return found[0].UUID
}

// Documents without a stamp are found by the index, in the order of insertion within a kind, before the others.
func TestUnstampedAreSweptByPresence(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	if found, err := HasUnstamped(t.Context(), b.clusterTime(), c, slot.Range{}); err != nil || found {
		t.Fatalf("an empty outbox has unstamped envelopes: %v %v", found, err)
	}

	for i := range 50 {
		b.insert(t.Context(), c, fmt.Sprint(i), bson.E{Key: "sentAt", Value: time.Now()}, bson.E{Key: "sent", Value: bson.A{}})
	}
	b.insert(t.Context(), c, "stamped")
	if found, err := HasUnstamped(t.Context(), b.clusterTime(), c, slot.Range{}); err != nil || found {
		t.Fatalf("a stamped envelope counts as unstamped: %v %v", found, err)
	}

	want := []string{"z-missing", "a-missing", "null", "int", "text", "date", "zero", "regex", "own-field"}
	for _, d := range []bson.D{
		{{Key: "_id", Value: "z-missing"}},
		{{Key: "_id", Value: "a-missing"}},
		{{Key: "_id", Value: "null"}, {Key: "ts", Value: nil}},
		{{Key: "_id", Value: "regex"}, {Key: "ts", Value: bson.Regex{Pattern: "x"}}},
		{{Key: "_id", Value: "date"}, {Key: "ts", Value: time.Now()}},
		{{Key: "_id", Value: "text"}, {Key: "ts", Value: "2026-01-01"}},
		{{Key: "_id", Value: "int"}, {Key: "ts", Value: 5}},
		{{Key: "_id", Value: "own-field"}, {Key: "state", Value: "retry"}}, // a field of the service
	} {
		if _, err := c.InsertOne(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := c.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "zero"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: bson.Timestamp{}}}}}, options.UpdateOne().SetUpsert(true)); err != nil {
		t.Fatal(err)
	}

	p := &publisher{}
	s := b.newSweep(b.clusterTime(), p, "o")
	// The stretch is empty.
	s.From = s.To
	b.run(s)

	order := slices.Clone(p.ids)
	if last := order[len(order)-1]; last != "stamped" {
		t.Errorf("%q comes last, want the stamped one", last)
	}
	if slices.Index(order, "z-missing") > slices.Index(order, "a-missing") {
		t.Error("envelopes of a kind are not in the order of insertion")
	}
	slices.Sort(order)
	if all := slices.Sorted(slices.Values(append(want, "stamped"))); !slices.Equal(order, all) {
		t.Fatalf("swept %q, want %q", order, all)
	}

	if found, err := HasUnstamped(t.Context(), b.clusterTime(), c, slot.Range{}); err != nil || !found {
		t.Fatalf("unstamped envelopes are not seen: %v %v", found, err)
	}

	p = &publisher{}
	s = b.newSweep(b.clusterTime(), p, "o")
	s.Cursor = mongodb.Earlier(s.To, time.Hour)
	b.run(s)
	// According to the cursor, the other envelopes are done.
	p.checkSent(t, "stamped")

	var plan bson.M
	explain := bson.D{{Key: "explain", Value: bson.D{{Key: "find", Value: "o"}, {Key: "filter", Value: unstampedFilter(idRange{})}}}, {Key: "verbosity", Value: "executionStats"}}
	if err := b.db.RunCommand(t.Context(), explain).Decode(&plan); err != nil {
		t.Fatal(err)
	}
	raw, _ := bson.Marshal(plan)
	if n := bson.Raw(raw).Lookup("executionStats", "totalKeysExamined").AsInt64(); n < 9 || n > 11 {
		t.Errorf("%d keys of the index examined to find 9 envelopes among many", n)
	}
}

// N22: the sweep finds all envelopes that were committed before the end of its stretch, including the ones that reached
// the majority last.
func TestN22_NothingBetweenSweepAndStream(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	w1 := b.db.Collection("o", options.Collection().SetWriteConcern(writeconcern.W1()))

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var mu sync.Mutex
	written := map[string]bool{}
	for g := range 4 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				id := fmt.Sprintf("%d-%d", g, i)
				if _, err := w1.InsertOne(context.WithoutCancel(ctx), bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{}}}); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				written[id] = true
				mu.Unlock()
			}
		})
	}

	type pass struct {
		at   bson.Timestamp
		p    *publisher
		skip *Skip
	}
	var passes []pass
	for range 5 {
		at, p := b.clusterTime(), &publisher{}
		s := b.newSweep(at, p, "o")
		// There is room for all envelopes of the writers.
		s.Skip = NewSkip(1 << 26)
		b.run(s)
		passes = append(passes, pass{at, p, s.Skip})
	}

	stop()
	wg.Wait()
	b.insert(t.Context(), c, "end")

	for _, x := range passes {
		got := map[string]int{}
		for _, id := range x.p.ids {
			got[id]++
		}

		b.readStream(c, x.at, "end", func(id bson.RawValue, doc bson.Raw) {
			if known, doubtful := b.checkSkip(x.skip, "o", id, doc); doubtful {
				t.Errorf("%s is in doubt", id.StringValue())
			} else if !known {
				got[id.StringValue()]++
			}
		})

		missing, twice := 0, 0
		for id := range written {
			switch n := got[id]; {
			case n == 0:
				missing++
			case n > 1:
				twice++
			}
		}
		if missing+twice > 0 {
			t.Errorf("of %d envelopes %d are neither in the sweep nor in the stream, and %d are in both", len(written), missing, twice)
		}
	}
}

// N22: a transaction that is open at the end of the stretch has stamps inside of it. Whether it commits before the sweep
// comes there, while it is there, or afterwards: sweep and stream deliver its envelopes once.
func TestN22_TransactionOpenAcrossTheEnd(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "during", "after"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			b := newBundle(t)
			c := b.newOutbox("o")
			b.insert(t.Context(), c, "first")

			sess, err := b.client.StartSession()
			if err != nil {
				t.Fatal(err)
			}
			defer sess.EndSession(context.WithoutCancel(t.Context()))
			if err := sess.StartTransaction(); err != nil {
				t.Fatal(err)
			}

			b.insert(mongo.NewSessionContext(t.Context(), sess), c, "slow")
			b.insert(t.Context(), c, "second")

			to := b.clusterTime()
			commit := func() {
				if err := sess.CommitTransaction(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
				}
			}

			p := &publisher{}
			p.deliver = func(e *outboxes.Envelope) error {
				if when == "during" && e.Raw.Lookup("_id").StringValue() == "first" {
					commit()
				}
				return nil
			}
			if when == "before" {
				commit()
			}

			s := b.newSweep(to, p, "o")
			b.run(s)
			if when == "after" {
				commit()
			}
			b.insert(t.Context(), c, "end")

			got := slices.Clone(p.ids)
			b.readStream(c, to, "end", func(id bson.RawValue, doc bson.Raw) {
				known, doubtful := b.checkSkip(s.Skip, "o", id, doc)
				if doubtful {
					t.Errorf("%s is in doubt", id.StringValue())
				}
				if !known {
					got = append(got, id.StringValue())
				}
			})

			slices.Sort(got)
			if want := []string{"first", "second", "slow"}; !slices.Equal(got, want) {
				t.Errorf("delivered %q, want %q", got, want)
			}
			if when == "before" && !slices.Contains(p.ids, "slow") {
				t.Error("the sweep missed an envelope that was committed before it")
			}
			if when == "after" && slices.Contains(p.ids, "slow") {
				t.Error("the sweep sent an envelope that was not committed yet")
			}
			if s.Skip.IsPast(to) || !s.Skip.IsPast(b.clusterTime()) {
				t.Error("the set is over too early or never")
			}
		})
	}
}

// N22: a second round does not repeat the envelopes of the first round.
func TestN22_RoundsShareTheSkipSet(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	for i := range 10 {
		b.insert(t.Context(), c, fmt.Sprintf("e%d", i))
	}

	p := &publisher{}
	s := b.newSweep(b.clusterTime(), p, "o")
	b.run(s)

	b.insert(t.Context(), c, "new")
	again := &publisher{}
	s2 := b.newSweep(b.clusterTime(), again, "o")
	s2.From, s2.Skip = s.To, s.Skip
	res := b.run(s2)
	again.checkSent(t, "new")

	if res.Skipped != 10 || res.Swept != 1 {
		t.Errorf("%+v, want 10 skipped and 1 swept", res)
	}
}

// N22: the set stays within its memory. Envelopes that it does not contain, and only those, are
// sent with the flag.
func TestN22_FullSkipSetFlags(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	for i := range 5 {
		b.insert(t.Context(), c, fmt.Sprintf("e%d", i))
	}

	s := b.newSweep(b.clusterTime(), &publisher{}, "o")
	s.Skip = NewSkip(3 * skipEntry)
	b.run(s)
	if len(s.Skip.ids) != 3 {
		t.Fatalf("%d ids in a set with room for 3", len(s.Skip.ids))
	}

	b.insert(t.Context(), c, "later")
	b.insert(t.Context(), c, "end")
	n := 0
	b.readStream(c, bson.Timestamp{T: s.To.T - 30, I: 1}, "end", func(id bson.RawValue, doc bson.Raw) {
		n++
		known, doubtful := b.checkSkip(s.Skip, "o", id, doc)
		want := [2]bool{id.StringValue() < "e3", id.StringValue() >= "e3" && id.StringValue() != "later"}
		if got := [2]bool{known, doubtful}; got != want {
			t.Errorf("%s: known, doubtful = %v, want %v", id.StringValue(), got, want)
		}
	})

	if n != 6 {
		t.Fatalf("%d events, want 6", n)
	}

	resumed := b.newSweep(b.clusterTime(), &publisher{}, "o")
	resumed.Cursor = s.To
	b.run(resumed)
	if !resumed.Skip.partial {
		t.Error("a sweep that continues after a restart has lost the swept envelopes")
	}
}

// If the cursor is lost, the server fails and envelopes share stamps, no envelope is missing or sent twice.
func TestReadsGoOnBehindTheLastEnvelope(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.newOutbox("o")
	var want []string
	var docs []any
	for i := range 400 {
		id := fmt.Sprintf("e%03d", i)
		want = append(want, id)
		docs = append(docs, bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{T: uint32(1000 + i/90), I: 1}}, {Key: "payload", Value: make([]byte, 2000)}}) // up to 90 alike
	}
	if _, err := c.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	p := &publisher{}
	n, off := 0, func() {}
	p.deliver = func(*outboxes.Envelope) error {
		if n++; n%100 == 1 {
			off()
			off = stacktest.FailCommand(t, b.app, bson.D{{Key: "times", Value: 1}}, bson.D{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: 43}})
		}
		return nil
	}

	s := b.newSweep(b.clusterTime(), p, "o")
	s.Memory = 1
	b.run(s)
	p.checkSent(t, want...)
	if p.trouble < 2 {
		t.Errorf("%d faults were seen, want several", p.trouble)
	}
}

func TestSweepEnds(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	b.insert(t.Context(), b.newOutbox("o"), "a")
	b.insert(t.Context(), b.newOutbox("o"), "b")
	rejected := errors.New("no")
	p := &publisher{deliver: func(*outboxes.Envelope) error { return rejected }}
	if _, err := b.newSweep(b.clusterTime(), p, "o").Run(t.Context()); !errors.Is(err, rejected) {
		t.Errorf("a rejection ends the sweep with %v", err)
	}

	over := errors.New("over")
	ctx, cancel := context.WithCancelCause(t.Context())
	p = &publisher{deliver: func(*outboxes.Envelope) error { cancel(over); return nil }}
	if _, err := b.newSweep(b.clusterTime(), p, "o").Run(ctx); !errors.Is(err, over) {
		t.Errorf("a context's end ends the sweep with %v", err)
	}
	if len(p.ids) != 1 {
		t.Errorf("%d envelopes although the context ended at the first", len(p.ids))
	}
}

// N21: a sweep reads with read concern majority, on the primary, and not before the end of its stretch, for all
// settings of the client.
func TestN21_SweepReadsMajorityOnThePrimary(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var finds []bson.Raw
	monitor := &mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		if e.CommandName == "aggregate" {
			mu.Lock()
			defer mu.Unlock()
			finds = append(finds, bson.Raw(append([]byte(nil), e.Command...)))
		}
	}}

	b := newBundle(t, options.Client().SetMonitor(monitor).SetReadPreference(readpref.Nearest()))
	b.insert(t.Context(), b.newOutbox("o"), "a")
	s := b.newSweep(b.clusterTime(), &publisher{}, "o")
	b.run(s)
	// One find is for envelopes without a stamp, and one for the others.
	if len(finds) != 2 {
		t.Fatalf("%d reads, want 2", len(finds))
	}

	for _, f := range finds {
		after, i, _ := f.Lookup("readConcern", "afterClusterTime").TimestampOK()
		level, _ := f.Lookup("readConcern", "level").StringValueOK()
		pref, set := f.Lookup("$readPreference", "mode").StringValueOK()
		if (bson.Timestamp{T: after, I: i}).Before(s.To) || level != "majority" || set && pref != "primary" && pref != "primaryPreferred" {
			t.Errorf("a read with %s %s", f.Lookup("readConcern"), f.Lookup("$readPreference"))
		}
	}
}

// TestN27_ASweepReportsThatItsCollectionWasRenamed: a sweep that reads a collection by its name would take a rename for the end of the collection.
func TestN27_ASweepReportsThatItsCollectionWasRenamed(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	for i := range 200 {
		b.insert(t.Context(), b.newOutbox("o"), fmt.Sprintf("e%03d", i))
	}
	list, err := outboxes.ListOutboxes(t.Context(), b.client, func(_, coll []byte) bool { return string(coll) == "o" }, b.db.Name())
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}

	s := b.newSweep(b.clusterTime(), &publisher{}, "o")
	s.Collections = list
	s.Publisher = publisherFunc{s.Publisher, func() {
		if err := b.client.Database("admin").RunCommand(t.Context(), bson.D{
			{Key: "renameCollection", Value: list[0].NS()}, {Key: "to", Value: b.db.Name() + ".moved"},
		}).Err(); err != nil {
			t.Error(err)
		}
	}}

	if _, err := s.Run(t.Context()); !errors.Is(err, errMoved) {
		t.Fatalf("a sweep whose collection was renamed ended with %v", err)
	}
}

// A collection that is dropped during the sweep has no envelope left, so the sweep of the others goes on. With a new term
// for each dropped tenant, a sweep would begin again for as long as tenants are dropped.
func TestASweepGoesOnAfterADroppedCollection(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{false, true} {
		b := newBundle(t)
		for i := range 200 {
			b.insert(t.Context(), b.newOutbox("o"), fmt.Sprintf("e%03d", i))
			b.insert(t.Context(), b.newOutbox("p"), fmt.Sprintf("f%03d", i))
		}
		list, err := outboxes.ListOutboxes(t.Context(), b.client, func(_, coll []byte) bool { return len(coll) == 1 }, b.db.Name())
		if err != nil || len(list) != 2 {
			t.Fatalf("%+v, %v", list, err)
		}

		p := &publisher{}
		s := b.newSweep(b.clusterTime(), p, "o", "p")
		s.Collections = list
		s.Publisher = publisherFunc{s.Publisher, func() {
			err := b.db.Collection("o").Drop(t.Context())
			if err == nil && again {
				err = b.db.CreateCollection(t.Context(), "o")
			}
			if err != nil {
				t.Error(err)
			}
		}}
		if _, err := s.Run(t.Context()); err != nil {
			t.Fatalf("the sweep ended with %v", err)
		}
		if n := slices.DeleteFunc(p.ids, func(id string) bool { return !strings.HasPrefix(id, "f") }); len(n) != 200 {
			t.Errorf("%d envelopes of the other collection were delivered, want 200", len(n))
		}
	}
}

// publisherFunc calls first before the first envelope.
type publisherFunc struct {
	Publisher
	first func()
}

func (p publisherFunc) Deliver(ctx context.Context, e *outboxes.Envelope) error {
	if bson.Raw(e.Raw).Lookup("_id").StringValue() == "e000" {
		p.first()
	}
	return p.Publisher.Deliver(ctx, e)
}

// The server sorts a collection without an index on its stamps before the first response. This may take longer than a sweep waits for a response.
// The sweep waits longer each time, so that it ends.
func TestN22_ASweepOfASlowCollectionEnds(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	c := b.db.Collection("o")
	for i := range 3 {
		b.insert(t.Context(), c, fmt.Sprint("e", i))
	}

	p := &publisher{}
	s := b.newSweep(b.clusterTime(), p, "o")
	// No response arrives in so short a time.
	s.response = 500 * time.Microsecond
	if res := b.run(s); res.Swept != 3 || p.trouble == 0 {
		t.Errorf("%d of 3 swept after %d timeouts", res.Swept, p.trouble)
	}
}
