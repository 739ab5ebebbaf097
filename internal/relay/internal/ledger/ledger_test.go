package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// The ledger stores the whole envelope as it came, and gives plain operators no meaning in it.
func TestN16_AWaitingEnvelopeIsTheWholeEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice = true
	payload := bson.D{{Key: "$inc", Value: "$key"}, {Key: "a.b", Value: bson.Binary{Data: []byte{0, 255}}}}
	o := b.newEnvelope(1, bson.E{Key: "payload", Value: payload}, bson.E{Key: "ts", Value: bson.Timestamp{T: 5, I: 5}}, bson.E{Key: "slot", Value: int32(7)},
		// Fields of the same names in the envelope have no meaning.
		bson.E{Key: "pending", Value: "x"}, bson.E{Key: "attempts", Value: int32(9)}, bson.E{Key: "", Value: "no name"})
	o.End, o.Reason, o.Topics, o.Key, o.Topic = Retrying, waiting.Retry, []string{"$topic"}, "$k", "$topic"
	o.Rejection = record.Rejection{Class: record.RecordRejected, Reason: "$bad \xff" + strings.Repeat("x", 5000)}
	raw := o.Raw
	b.store(o)

	var d struct {
		Watcher, NS, Key, Pos, Reason, Origin, Topics string
		Slot, Attempts                                int32
		NextAt                                        time.Time
		Error                                         record.Attempt
		History                                       []record.Attempt
		Envelope                                      bson.Raw
	}
	if err := b.waiting.FindOne(t.Context(), bson.D{{Key: "id", Value: "e000001"}}).Decode(&d); err != nil {
		t.Fatal(err)
	}
	if d.Watcher != "orders" || d.NS != b.ns() || d.Key != "$k" || d.Pos != "82000001" || d.Reason != "retry" || d.Origin != "stream" || d.Slot != 7 ||
		d.Attempts != 1 || d.Topics != "$topic" {
		t.Errorf("%+v", d)
	}
	if !bytes.Equal(d.Envelope, raw) {
		t.Errorf("the envelope is %s, want %s", d.Envelope, raw)
	}
	if at := time.Until(d.NextAt); at < 0 || at > time.Hour {
		t.Errorf("the next attempt is in %v, want up to an hour", at)
	}
	if len(d.History) != 1 || d.History[0] != d.Error || d.Error.Class != record.RecordRejected || d.Error.Node != "a" || len(d.Error.Reason) > 2100 {
		t.Errorf("error %+v, %d in the history", d.Error, len(d.History))
	}
	if len(b.entered) != 1 || b.entered[0].Key != "$k" {
		t.Errorf("the sender gets %+v", b.entered)
	}
}

// An id is used twice: the first event waits, its document was deleted, and another one was inserted. Both wait, and both may die.
func TestN16_AnIDThatIsUsedTwiceWaitsTwice(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	first, second := b.newEnvelope(1), b.newEnvelope(1, bson.E{Key: "payload", Value: "second"})
	second.Pos = "82000009"
	// The same event once more, as after a takeover: the stream repeats it.
	again := b.newEnvelope(1)
	b.store(first)
	b.store(second, again)
	if n := b.count(b.waiting, bson.D{{Key: "id", Value: "e000001"}}); n != 2 {
		t.Fatalf("%d documents, want two", n)
	}

	l := New(b.config)
	var dead []*Outcome
	for _, o := range []*Outcome{first, second} {
		d := o.entry.Document()
		dead = append(dead, l.Rejected(&d, []string{"a"}, &record.Rejection{Class: record.Malformed, Reason: "no type"}))
	}
	b.store(dead...)
	list := b.lettersOf(1)
	if len(list) != 2 || bytes.Equal(list[0].Envelope, list[1].Envelope) || b.count(b.waiting, bson.D{}) != 0 {
		t.Errorf("%d letters, want one of each event", len(list))
	}
}

// Two watchers may have one outbox: the envelope of one is not that of the other.
func TestN16_TwoWatchersWaitWithTheSameIDs(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	other := b.config
	other.Store = waiting.NewStore(b.config.Store.Collection(), "audit", b.slot())
	for _, c := range []Config{b.config, other} {
		if _, err := b.tryStore(t.Context(), New(c), b.newEnvelope(1), b.newEnvelope(2)); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.count(b.waiting, bson.D{}); n != 4 {
		t.Fatalf("%d documents, want two of each watcher", n)
	}

	o := b.newEnvelope(1)
	b.store(o)
	d := o.entry.Document()
	l := New(b.config)
	b.store(l.Decide(&d, []string{"a"}, []record.Result{{Topic: "a"}}))
	if n := b.count(b.waiting, bson.D{{Key: "watcher", Value: "audit"}}); n != 2 {
		t.Errorf("the other watcher has %d of 2", n)
	}
	if n := b.count(b.waiting, bson.D{{Key: "watcher", Value: "orders"}}); n != 1 {
		t.Errorf("the watcher has %d, want 1", n)
	}
}

func TestN17_DecisionsAboutAWaitingEnvelope(t *testing.T) {
	t.Parallel()
	acked := func(topic string) record.Result { return record.Result{Topic: topic, Partition: 2, Offset: 7} }
	rejected := func(topic string, class record.Class) record.Result {
		return record.Result{Topic: topic, Partition: record.AnyPartition, Rejection: &record.Rejection{Class: class, Reason: "r"}}
	}
	held := func(topic string, why error) record.Result { return record.Result{Topic: topic, Held: why} }
	for name, c := range map[string]struct {
		attempts int32
		topics   []string
		results  []record.Result
		end      End
		left     []string
		reason   waiting.Reason
		class    record.Class
	}{
		"all have it":                 {0, []string{"a", "b"}, []record.Result{acked("a"), acked("b")}, Sent, nil, "", ""},
		"one is parked":               {0, []string{"a", "b"}, []record.Result{acked("a"), held("b", record.ErrParked)}, Waiting, []string{"b"}, waiting.Parked, ""},
		"a partition is parked":       {0, []string{"a"}, []record.Result{held("a", record.ErrPartitionParked)}, Waiting, []string{"a"}, waiting.Parked, ""},
		"one is blocked":              {2, []string{"a"}, []record.Result{held("a", record.ErrBlocked)}, Waiting, []string{"a"}, waiting.Blocked, ""},
		"parked counts before":        {0, []string{"a", "b"}, []record.Result{held("a", record.ErrBlocked), held("b", record.ErrParked)}, Waiting, []string{"a", "b"}, waiting.Parked, ""},
		"not sent to all":             {0, []string{"a", "b"}, []record.Result{acked("a")}, Waiting, []string{"b"}, waiting.Blocked, ""},
		"first rejection":             {0, []string{"a"}, []record.Result{rejected("a", record.RecordRejected)}, Retrying, []string{"a"}, waiting.Retry, record.RecordRejected},
		"last rejection":              {2, []string{"a"}, []record.Result{rejected("a", record.RecordRejected)}, Dead, []string{"a"}, "", record.AttemptsExhausted},
		"dead at once":                {0, []string{"a"}, []record.Result{rejected("a", record.MessageTooLarge)}, Dead, []string{"a"}, "", record.MessageTooLarge},
		"dead, but another one waits": {0, []string{"a", "b"}, []record.Result{rejected("a", record.MessageTooLarge), held("b", record.ErrParked)}, Retrying, []string{"a", "b"}, waiting.Retry, record.MessageTooLarge},
		"dead, and another has it":    {0, []string{"a", "b"}, []record.Result{rejected("a", record.MessageTooLarge), acked("b")}, Dead, []string{"a"}, "", record.MessageTooLarge},
		"one rejection is final":      {0, []string{"a", "b"}, []record.Result{rejected("a", record.NotAllowed), rejected("b", record.RecordRejected)}, Retrying, []string{"a", "b"}, waiting.Retry, record.RecordRejected},
		"one is, at the last attempt": {2, []string{"a", "b"}, []record.Result{rejected("a", record.NotAllowed), rejected("b", record.RecordRejected)}, Dead, []string{"a", "b"}, "", record.AttemptsExhausted},
		"all rejections are final":    {0, []string{"a", "b"}, []record.Result{rejected("a", record.MessageTooLarge), rejected("b", record.NotAllowed)}, Dead, []string{"a", "b"}, "", record.MessageTooLarge},
	} {
		l := New(Config{MaxAttempts: 3})
		o := l.Decide(&waiting.Document{Attempts: c.attempts}, c.topics, c.results)
		if o.End != c.end || !slices.Equal(o.Topics, c.left) || o.Reason != c.reason || o.Rejection.Class != c.class {
			t.Errorf("%s: %v for %v, %s, %s", name, o.End, o.Topics, o.Reason, o.Rejection.Class)
		}
	}

	for drop, want := range map[bool]End{true: Dropped, false: Dead} {
		l := New(Config{MaxAttempts: 3, DropExpired: drop})
		if o := l.Rejected(&waiting.Document{}, []string{"a"}, &record.Rejection{Class: record.Expired}); o.End != want {
			t.Errorf("an expired envelope is %v, want %v", o.End, want)
		}
		if o := l.Decide(&waiting.Document{}, []string{"a", "b"}, []record.Result{rejected("a", record.Expired), acked("b")}); o.End != want {
			t.Errorf("an envelope that has expired for the last topic is %v, want %v", o.End, want)
		}
		if o := l.Decide(&waiting.Document{}, []string{"a", "b"}, []record.Result{rejected("a", record.Expired), rejected("b", record.NotAllowed)}); o.End != Dead {
			t.Errorf("an envelope that one topic rejects is %v", o.End)
		}
		if o := l.Rejected(&waiting.Document{}, []string{"a"}, &record.Rejection{Class: record.Dropped}); o.End != Dropped {
			t.Errorf("an envelope that a rule drops is %v", o.End)
		}
	}
}

// N17: while a topic is parked, the rejections by another topic delay the next attempt. They use up no attempt of the parked topic.
func TestN17_RejectionsBesideAParkedTopicUseNoAttempts(t *testing.T) {
	t.Parallel()
	for name, class := range map[string]record.Class{"final": record.MessageTooLarge, "for now": record.RecordRejected} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			b.config.MaxAttempts = 3
			l := New(b.config)
			both := []string{"a", "b"}
			b.enter(1, func(e *waiting.Entry) { e.Pending = both })
			read := func() *waiting.Document {
				t.Helper()
				raw, err := b.waiting.FindOne(t.Context(), bson.D{}).Raw()
				if errors.Is(err, mongo.ErrNoDocuments) {
					return nil
				}
				if err != nil {
					t.Fatal(err)
				}
				document := waiting.ReadDocument(raw)
				return &document
			}
			send := func(results ...record.Result) *waiting.Document {
				t.Helper()
				b.store(l.Decide(read(), both, results))
				return read()
			}
			ofA := record.Result{Topic: "a", Rejection: &record.Rejection{Class: class, Reason: "no"}}
			for range 6 {
				send(ofA, record.Result{Topic: "b", Held: record.ErrParked})
			}
			// The pause grows with the attempts.
			if document := read(); document.Attempts != 6 || document.NextAt == 0 {
				t.Errorf("%d attempts, the next one at %d", document.Attempts, document.NextAt)
			}

			ofB := record.Result{Topic: "b", Rejection: newRejection("not now")}
			for attempt := range 2 {
				if send(ofA, ofB) == nil {
					t.Fatalf("it is dead after %d rejections by the topic that was parked", attempt+1)
				}
			}
			if send(ofA, ofB) != nil {
				t.Error("it waits after three rejections")
			}
		})
	}
}

// Each end of a waiting envelope has its effect once, also if the transaction runs twice.
func TestN08_FatesAreIdempotent(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice = true
	l := New(b.config)
	retry := func(e *waiting.Entry) {
		e.Reason, e.Attempts, e.NextAt = waiting.Retry, 1, time.UnixMilli(1)
		e.Error = &record.Attempt{Class: record.RecordRejected, Reason: "first", Topic: "a", At: time.UnixMilli(1), Node: "z"}
	}
	result := func(d *waiting.Document, a record.Result) *Outcome {
		a.Topic = "a"
		return l.Decide(d, []string{"a"}, []record.Result{a})
	}
	list := []*Outcome{
		result(b.enter(1), record.Result{Partition: 1, Offset: 5}),
		result(b.enter(2, retry), record.Result{Rejection: newRejection("second")}),
		result(b.enter(3, retry, func(e *waiting.Entry) { e.Attempts = 2 }), record.Result{Rejection: newRejection("last")}),
		result(b.enter(4, retry), record.Result{Held: record.ErrParked}),
		result(b.enter(5), record.Result{Held: record.ErrParked}),
		l.Rejected(b.enter(6), []string{"a"}, &record.Rejection{Class: record.Malformed, Reason: "no type"}),
		l.Rejected(b.enter(7), []string{"a"}, &record.Rejection{Class: record.Dropped}),
	}
	b.enter(8)
	b.store(list...)
	if want := map[End]int{Sent: 1, Retrying: 1, Waiting: 2, Dead: 2, Dropped: 1}; fmt.Sprint(b.ends) != fmt.Sprint(want) {
		t.Errorf("ends %v, want %v", b.ends, want)
	}

	for _, n := range []int{1, 3, 6, 7} {
		if b.waitingOf(n) != nil {
			t.Errorf("envelope %d still waits", n)
		}
	}
	if d := b.waitingOf(2); d["attempts"] != int32(2) || len(d["history"].(bson.A)) != 2 || d["reason"] != "retry" || !d["nextAt"].(bson.DateTime).Time().After(time.Now()) {
		t.Errorf("an attempt was spent twice: %v", d)
	}
	// It is found when its topic is free again, and keeps its attempts.
	if d := b.waitingOf(4); d["attempts"] != int32(1) || d["reason"] != "parked" || d["nextAt"] != nil {
		t.Errorf("a retried envelope of a parked topic: %v", d)
	}
	if d := b.waitingOf(5); d["reason"] != "parked" || d["attempts"] != int32(0) {
		t.Errorf("a parked envelope: %v", d)
	}
	if b.waitingOf(8) == nil {
		t.Error("an envelope that was not sent is gone")
	}
	if l := b.letterOf(3); l.Class != record.AttemptsExhausted || len(l.Attempts) != 2 || l.Attempts[0].Node != "z" || l.Attempts[1].Reason != "last" || l.Attempts[1].Class != record.RecordRejected {
		t.Errorf("the letter of a rejected envelope: %+v", l)
	}
	if l := b.letterOf(6); l.Class != record.Malformed || len(l.Attempts) != 1 || l.Pos != "82000006" || !bytes.Equal(l.Envelope, b.newEnvelope(6).Raw) {
		t.Errorf("the letter of a malformed envelope: %+v", l)
	}
	if n := b.count(b.letters, bson.D{}); n != 2 {
		t.Errorf("%d letters", n)
	}

	// The next owner learns how far envelopes of the stream were sent outside of its order.
	if doc := b.watcher(); doc.Beside != "82000007" {
		t.Errorf("sent beside the stream up to %q", doc.Beside)
	}
}

// An operator resets the attempts or removes the document while the envelope is in flight.
func TestN18_ChangesOfOperatorsMeanwhileStay(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := New(b.config)
	retry := func(e *waiting.Entry) { e.Reason, e.Attempts, e.NextAt = waiting.Retry, 2, time.UnixMilli(1) }
	rejection := []record.Result{{Topic: "a", Rejection: newRejection("no")}}
	var list []*Outcome
	for n := 1; n <= 3; n++ {
		list = append(list, l.Decide(b.enter(n, retry), []string{"a"}, rejection))
	}
	for n := 4; n <= 5; n++ {
		list = append(list, l.Decide(b.enter(n), []string{"a"}, rejection))
	}
	list = append(list,
		l.Decide(b.enter(6), []string{"a"}, []record.Result{{Topic: "a", Held: record.ErrBlocked}}),
		l.Decide(b.enter(7), []string{"a"}, []record.Result{{Topic: "a"}}))

	id := func(n int) bson.D { return bson.D{{Key: "id", Value: fmt.Sprintf("e%06d", n)}} }
	reset := bson.D{{Key: "$set", Value: bson.D{{Key: "attempts", Value: int32(0)}, {Key: "nextAt", Value: time.Now().Add(time.Hour)}}}}
	_, err1 := b.waiting.UpdateOne(t.Context(), id(1), reset)
	_, err2 := b.waiting.DeleteOne(t.Context(), id(2))
	_, err3 := b.waiting.UpdateOne(t.Context(), id(4), bson.D{{Key: "$set", Value: bson.D{{Key: "attempts", Value: int32(9)}}}})
	_, err4 := b.waiting.DeleteMany(t.Context(), bson.D{{Key: "id", Value: bson.D{{Key: "$in", Value: bson.A{"e000005", "e000006", "e000007"}}}}})
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}

	b.store(list...)
	var ends []End
	for _, o := range list {
		ends = append(ends, o.End)
	}
	if want := []End{Waiting, Gone, Dead, Retrying, Gone, Gone, Sent}; !slices.Equal(ends, want) {
		t.Errorf("ends %v, want %v", ends, want)
	}
	if d := b.waitingOf(1); d["attempts"] != int32(0) || d["history"] != nil {
		t.Errorf("the reset is undone: %v", d)
	}
	if d := b.waitingOf(4); d["attempts"] != int32(9) || d["history"] != nil {
		t.Errorf("a change of the attempts is undone: %v", d)
	}
	for _, n := range []int{2, 5, 6, 7} {
		if b.waitingOf(n) != nil || len(b.lettersOf(n)) > 0 {
			t.Errorf("envelope %d, which was removed, is there again", n)
		}
	}
	b.letterOf(3)
}

// An operator resets the attempts while one topic acks the envelope and another one rejects it. Only the other one gets it again.
func TestN18_AResetInFlightKeepsTheTopicsThatHaveTheEnvelope(t *testing.T) {
	t.Parallel()
	for name, attempts := range map[string]int32{"one of several attempts": 1, "the last attempt": 2} {
		b := setUp(t)
		b.twice, b.config.Recording = true, RecordMark
		l := New(b.config)
		document := b.enter(1, func(e *waiting.Entry) {
			e.Pending, e.Reason, e.Attempts, e.NextAt = []string{"a", "b"}, waiting.Retry, attempts, time.UnixMilli(1)
		})
		outcome := l.Decide(document, document.Pending, []record.Result{{Topic: "a", Offset: 7}, {Topic: "b", Rejection: newRejection("no")}})
		if _, err := waiting.RetryFailed(t.Context(), b.waiting, waiting.Query{Watcher: "orders"}, true); err != nil {
			t.Fatal(err)
		}

		b.store(outcome)
		if d := b.waitingOf(1); !outcome.End.Waits() || d["topics"] != "b" || d["attempts"] != int32(0) || d["nextAt"] == nil || len(d["sent"].(bson.A)) != 1 {
			t.Errorf("%s: the end is %v, and it waits as %v", name, outcome.End, d)
		}
	}
}

func TestN17_TheOnlyAttemptEndsInALetter(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.MaxAttempts = 1
	o := b.newEnvelope(1)
	o.End, o.Reason, o.Topic, o.Rejection = Retrying, waiting.Retry, "a", *newRejection("null key")
	blocked := b.newEnvelope(2)
	blocked.Reason = waiting.Blocked

	b.store(o, blocked)
	if l := b.letterOf(1); l.Class != record.AttemptsExhausted || l.Reason != "the only attempt failed with: null key" || len(l.Attempts) != 1 || l.Attempts[0].Class != record.RecordRejected {
		t.Errorf("%s %q, %+v", l.Class, l.Reason, l.Attempts)
	}
	if b.waitingOf(2) == nil || o.End != Dead {
		t.Errorf("ends %v and %v", o.End, blocked.End)
	}
}

// N17: one attempt is allowed, and one of the topics cannot be written. The envelope waits for it.
func TestN17_TheOnlyAttemptWaitsForOtherTopics(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.MaxAttempts = 1
	l, claimed := New(b.config), b.newEnvelope(1)
	b.store(l.DecideClaim(nil, &waiting.Claimed{NS: b.ns(), Raw: claimed.Raw, Pos: claimed.Pos, Key: "k"}, nil, []record.Result{
		{Topic: "a", Rejection: newRejection("no")}, {Topic: "b", Held: record.ErrParked},
	}))
	if d := b.waitingOf(1); d == nil || d["topics"] != "a,b" {
		t.Errorf("it waits as %v", d)
	}
}

// Images of records that the sink gave back are read together. An envelope that is gone leaves its id.
func TestN16_ImagesAreRestoredTogether(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.Restore = func(_ context.Context, list []*Outcome) error {
		b.restores = append(b.restores, slices.Clone(list))
		if len(b.restores) == 1 {
			return errors.New("not reachable")
		}
		for _, o := range list {
			o.NS = b.ns()
			if string(o.ID) != "gone" && string(o.ID) != "42" {
				o.Raw, o.Pos = b.newEnvelope(1).Raw, "82000001"
			}
		}
		return nil
	}
	withdrawn := func(id string) *Outcome {
		return &Outcome{End: Waiting, Reason: waiting.Blocked, Headers: Headers{ID: []byte(id)}, Key: "k", Topics: []string{"a"}, Partition: record.AnyPartition}
	}
	gone, number := withdrawn("gone"), withdrawn("42")
	number.StringID = true
	delivered := &Outcome{End: Sent, NS: b.ns(), EnvelopeID: bson.RawValue{Type: bson.TypeString}}

	b.store(withdrawn("e000001"), b.newEnvelope(2), gone, delivered, number)
	if len(b.restores) != 2 || len(b.restores[1]) != 3 || len(b.reported()) != 1 {
		t.Errorf("%d reads, %d errors", len(b.restores), len(b.reported()))
	}
	if b.waitingOf(1) == nil || b.waitingOf(2) == nil {
		t.Error("envelopes do not wait")
	}
	for _, id := range []string{"gone", "42"} {
		var l struct{ Reason string }
		if err := b.letters.FindOne(t.Context(), bson.D{{Key: "id", Value: id}}).Decode(&l); err != nil || !strings.Contains(l.Reason, "only its id is left") {
			t.Errorf("%s: %q, %v", id, l.Reason, err)
		}
	}
}

// Swept envelopes without a stamp get positions in the order of their outcomes, and a repetition gives them no other place.
func TestN15_SweptEnvelopesWithoutAStampAreNumbered(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := New(b.config)
	var list []*Outcome
	for i := range 12 {
		o := b.newEnvelope(20 - i)
		o.Pos = outboxes.PosAt(bson.Timestamp{})
		list = append(list, o)
	}
	stamped := b.newEnvelope(30)
	if _, err := b.tryStore(t.Context(), l, append(list, stamped)...); err != nil {
		t.Fatal(err)
	}

	last := ""
	for i := range 12 {
		d := b.waitingOf(20 - i)
		pos := d["pos"].(string)
		if pos <= last || d["origin"] != "sweep" || d["redelivered"] != true {
			t.Errorf("envelope %d: %v after %s", 20-i, d, last)
		}
		last = pos
	}
	if d := b.waitingOf(30); d["pos"] != "82000030" {
		t.Errorf("an envelope with a stamp: %v", d)
	}

	again := b.newEnvelope(20)
	again.Pos = list[0].Pos
	if _, err := b.tryStore(t.Context(), New(b.config), again); err != nil {
		t.Fatal(err)
	}
	if n := b.count(b.waiting, bson.D{{Key: "id", Value: "e000020"}}); n != 1 {
		t.Errorf("%d documents of one envelope", n)
	}
}

// One read prepares all queued outcomes, but a transaction has a limit.
func TestN03_OutcomesAreStoredInBoundedTransactions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ outcomes, size, transactions int }{
		"many":  {2100, 1, 3},
		"large": {3, 5 << 20, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			var list []*Outcome
			for i := range c.outcomes {
				list = append(list, b.newEnvelope(i, bson.E{Key: "payload", Value: make([]byte, c.size)}))
			}
			if b.store(list...); b.fences != c.transactions {
				t.Errorf("%d transactions, want %d", b.fences, c.transactions)
			}
			if n := b.count(b.waiting, bson.D{}); n != int64(c.outcomes) {
				t.Errorf("%d of %d wait", n, c.outcomes)
			}
		})
	}
}

// Run stores in the order of Add, from any goroutine, and Drain returns when everything is stored.
func TestRunStoresInTheOrderOfAdd(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := New(b.config)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var stored []int
	const n = 1500
	go func() {
		for i := range n {
			o := b.newEnvelope(i)
			o.Stored = func(*Outcome) { stored = append(stored, i) }
			l.Add(o)
		}
		if err := l.Drain(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}()
	go func() { ended <- l.Run(ctx) }()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}

	if len(stored) != n || !slices.IsSorted(stored) || l.Len() != 0 {
		t.Errorf("%d of %d are stored, in order: %t; %d are left", len(stored), n, slices.IsSorted(stored), l.Len())
	}
	if got := b.count(b.waiting, bson.D{}); got != n {
		t.Errorf("%d of %d wait", got, n)
	}
}

// The letter of a waiting envelope of more than 15 MiB is stored in chunks. Such letters are not made in one transaction.
func TestN20_LargeWaitingEnvelopesDieWhole(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice = true
	sizes := []int{16<<20 - 5000, 6 << 20, 6 << 20}
	l := New(b.config)
	var list []*Outcome
	for i, size := range sizes {
		d := b.enter(i, func(e *waiting.Entry) {
			e.Raw = b.newEnvelope(i, bson.E{Key: "payload", Value: make([]byte, size)}).Raw
		})
		list = append(list, l.Rejected(d, []string{"a"}, &record.Rejection{Class: record.MessageTooLarge, Reason: "too large"}))
	}

	b.store(list...)
	// Each of them ran twice.
	if b.fences != 2*len(sizes) || len(b.reported()) > 0 {
		t.Errorf("%d transactions; errors %v", b.fences, b.reported())
	}
	for i, size := range sizes {
		if l := b.letterOf(i); !bytes.Equal(l.Envelope, b.newEnvelope(i, bson.E{Key: "payload", Value: make([]byte, size)}).Raw) || b.waitingOf(i) != nil {
			t.Errorf("letter %d has %d bytes", i, len(l.Envelope))
		}
	}
}
