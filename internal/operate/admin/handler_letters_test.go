package admin_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/service/lettercount"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// openWard is openOffice with an operator who sees the letters of handlers.
func openWard(t *testing.T) *office {
	t.Helper()
	f := openOffice(t)
	f.op.HandlerLetters = []string{deadletter.DefaultCollection, "billing_dead"}
	return f
}

// giveUp stores the letter of a message in the database of an outbox.
func (f *office) giveUp(outbox *mongo.Collection, collection, handler, message string) {
	f.t.Helper()
	f.giveUpAt(0, outbox, collection, handler, message)
}

// giveUpAt is giveUp for a message at an offset.
func (f *office) giveUpAt(offset int64, outbox *mongo.Collection, collection, handler, message string) {
	f.t.Helper()
	desk, err := deadletter.New(outbox.Database(), deadletter.WithCollection(collection))
	if err != nil {
		f.t.Fatal(err)
	}
	if err := desk.EnsureIndexes(f.t.Context(), module.Key{}); err != nil {
		f.t.Fatal(err)
	}

	l := &deadletter.Letter{
		ID: deadletter.ID{Group: "g", Handler: handler, Topic: "orders", Offset: offset, Message: message}, Class: deadletter.ClassHandler, Reason: "no response",
		Name: "OrderPlaced", Key: []byte("7"), Value: []byte(`{"card":"` + planted + `"}`),
		Headers: []event.Header{{Key: "id", Value: []byte(message)}},
	}

	omitted, err := desk.Put(f.t.Context(), module.Key{}, l, func(context.Context, string) error { return nil })
	if err := errors.Join(omitted, err); err != nil {
		f.t.Fatal(err)
	}
}

// ofHandlers is the filter for letters of handlers.
var ofHandlers = admin.DeadFilter{Source: admin.FromHandler}

func TestLettersOfHandlersAreSeenOverAllCollections(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range 9 {
		coll := []*mongo.Collection{f.a, f.b}[n%2]
		f.giveUp(coll, f.op.HandlerLetters[n%3%2], fmt.Sprint("h", n%2), fmt.Sprint("m", n))
	}

	var seen []string
	for after, pages := "", 0; ; pages++ {
		page, err := f.op.Letters().List(t.Context(), ofHandlers, 2, after)
		if err != nil || page.Total != 9 || pages > 5 {
			t.Fatalf("page %d: %+v, %v", pages, page, err)
		}
		for _, l := range page.Items {
			seen = append(seen, l.ID)
		}
		if after = page.Next; after == "" {
			break
		}
	}
	want := slices.Clone(seen)
	slices.Sort(want)
	if want = slices.Compact(want); len(seen) != 9 || len(want) != 9 {
		t.Errorf("the pages have %q, want each letter once", seen)
	}

	byHandler := ofHandlers
	byHandler.Handler = "h1"
	if n, err := f.op.Letters().Count(t.Context(), byHandler); n != 4 || err != nil {
		t.Errorf("letters of h1: got %d (%v), want 4", n, err)
	}
	groups, err := f.op.Letters().Summary(t.Context(), ofHandlers)
	if err != nil || len(groups) < 2 || groups[0].ConsumerGroup != "g" {
		t.Errorf("summary: %+v, %v", groups, err)
	}
	one := ofHandlers
	one.Collection = mongodb.Namespace(f.a.Database().Collection("billing_dead"))
	if n, err := f.op.Letters().Count(t.Context(), one); n == 0 || n == 9 || err != nil {
		t.Errorf("letters of one collection: %d, %v", n, err)
	}
	for name, filter := range map[string]admin.DeadFilter{
		"a class of the relay":   {Source: admin.FromHandler, Class: "not_allowed"},
		"a handler of the relay": {Source: admin.FromRelay, Handler: "h1"},
		"a collection":           {Source: admin.FromHandler, Collection: f.a.Database().Name() + ".none"},
	} {
		if _, err := f.op.Letters().Count(t.Context(), filter); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if _, err := f.op.Letters().List(t.Context(), ofHandlers, 2, "nonsense"); !errors.Is(err, listing.ErrCursor) {
		t.Errorf("a wrong cursor: %v", err)
	}
}

// Letters that were given up in the same millisecond, in several collections, are on one page each, wherever a page ends.
func TestLettersOfOneMomentAreListedOnce(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range 12 {
		f.giveUpAt(int64(n), []*mongo.Collection{f.a, f.b}[n%2], f.op.HandlerLetters[n/2%2], "h", fmt.Sprint("m", n))
	}
	f.moveToDead(f.a, record.Malformed, letterOf("e0", planted))
	moment := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, coll := range []*mongo.Collection{
		f.a.Database().Collection(deadletter.DefaultCollection), f.a.Database().Collection("billing_dead"),
		f.b.Database().Collection(deadletter.DefaultCollection), f.b.Database().Collection("billing_dead"), f.state.Collection("letters"),
	} {
		set := bson.D{{Key: "$set", Value: bson.D{{Key: "givenUpAt", Value: moment}, {Key: "movedAt", Value: moment}}}}
		if _, err := coll.UpdateMany(t.Context(), bson.D{}, set); err != nil {
			t.Fatal(err)
		}
	}

	for size := range 14 {
		seen := map[string]int{}
		for after, pages := "", 0; pages < 14; pages++ {
			page, err := f.op.Letters().List(t.Context(), admin.DeadFilter{}, size+1, after)
			if err != nil || page.Total != 13 {
				t.Fatalf("%+v, %v", page, err)
			}
			for _, letter := range page.Items {
				seen[letter.Source.Kind+letter.ID]++
			}
			if after = page.Next; after == "" {
				break
			}
		}
		for id, times := range seen {
			if times != 1 {
				t.Errorf("pages of %d: letter %s is listed %d times", size+1, id, times)
			}
		}
		if len(seen) != 13 {
			t.Errorf("pages of %d: %d letters, want 13", size+1, len(seen))
		}
	}
}

// Without a source, the letters of the relay and of handlers are one list, which continues page by page. A condition that only one kind can
// fulfill selects that kind.
func TestLettersOfBothKindsAreOneList(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range 4 {
		f.giveUp([]*mongo.Collection{f.a, f.b}[n%2], deadletter.DefaultCollection, "h", fmt.Sprint("m", n))
		f.moveToDead(f.a, record.Malformed, letterOf(fmt.Sprint("e", n), planted))
	}
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "e3")

	var seen []string
	for after, pages := "", 0; ; pages++ {
		page, err := f.op.Letters().List(t.Context(), admin.DeadFilter{}, 2, after)
		if err != nil || page.Total != 9 || pages > 5 {
			t.Fatalf("page %d: %+v, %v", pages, page, err)
		}
		for _, l := range page.Items {
			seen = append(seen, l.Source.Kind+" "+l.ID)
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if want := []string{
		"handler e3", "relay e3", "handler m3", "relay e2", "handler m2", "relay e1", "handler m1", "relay e0", "handler m0",
	}; !slices.Equal(seen, want) {
		t.Errorf("the pages have %q, want %q", seen, want)
	}

	for name, c := range map[string]struct {
		filter admin.DeadFilter
		want   int64
	}{
		"all":                       {admin.DeadFilter{}, 9},
		"a class of the relay":      {admin.DeadFilter{Class: string(record.Malformed)}, 4},
		"a class of handlers":       {admin.DeadFilter{Class: deadletter.ClassHandler}, 5},
		"a handler":                 {admin.DeadFilter{Handler: "h"}, 5},
		"an id that both gave up":   {admin.DeadFilter{IDs: []string{"e3"}}, 2},
		"an outbox":                 {admin.DeadFilter{Collection: mongodb.Namespace(f.a)}, 4},
		"a collection of one's own": {admin.DeadFilter{Collection: f.b.Database().Name() + "." + deadletter.DefaultCollection}, 2},
	} {
		if n, err := f.op.Letters().Count(t.Context(), c.filter); n != c.want || err != nil {
			t.Errorf("%s: %d, %v, want %d", name, n, err, c.want)
		}
	}

	// One id may have a letter of either.
	if _, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "e3", Delivery: -1}, admin.WithoutPayload); err == nil || !strings.Contains(err.Error(), "choose the source") {
		t.Errorf("an ambiguous id: %v", err)
	}
	for id, kind := range map[string]string{"e1": "relay", "m1": "handler"} {
		if l, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: id, Delivery: -1}, admin.WithoutPayload); err != nil || l.Source.Kind != kind {
			t.Errorf("%s: %+v, %v", id, l.Source, err)
		}
	}

	// The letters of one failure are a group, whose fingerprint selects them.
	groups, err := f.op.Letters().Summary(t.Context(), admin.DeadFilter{})
	if err != nil || len(groups) != 2 || groups[0].Source != "handler" || groups[0].Count != 5 || groups[0].Failure != "no response" || groups[1].Count != 4 {
		t.Fatalf("groups %+v, %v", groups, err)
	}
	got, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{Fingerprint: groups[0].Fingerprint}, admin.ForReal, nil)
	if err != nil || got.Discarded != 5 {
		t.Errorf("discard of a group: %+v, %v", got, err)
	}
	requeued, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{Fingerprint: groups[1].Fingerprint}, admin.DeadOptions{}, nil)
	if err != nil || requeued.Matched != 4 || requeued.Requeued+requeued.Rejected != 4 {
		t.Errorf("requeue of a group: %+v, %v", requeued, err)
	}
	if _, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{}, admin.ForReal, nil); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("an action on nothing: %v", err)
	}
}

// Discarded letters of the relay and of handlers are listed in the archive, shown by lookup, and can be requeued.
func TestDiscardedLettersAreTakenBack(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.op.LetterArchive = 30 * 24 * time.Hour
	f.moveToDead(f.a, record.RecordRejected, letterOf("e1", planted))
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "m1")
	desk := f.op.Letters()

	gone, err := desk.Discard(t.Context(), admin.DeadFilter{All: true}, admin.ForReal, nil)
	if err != nil || gone.Discarded != 2 || gone.ArchivedUntil == nil || time.Until(*gone.ArchivedUntil) < 29*24*time.Hour {
		t.Fatalf("discard: %+v, %v", gone, err)
	}
	archive := admin.DeadFilter{Archived: true}
	page, err := desk.List(t.Context(), archive, 0, "")
	if err != nil || page.Total != 2 {
		t.Fatalf("the archive: %+v, %v", page, err)
	}
	for _, letter := range page.Items {
		if letter.Archived == nil || letter.Archived.Actor != "ann" || letter.Archived.Until.IsZero() {
			t.Errorf("unexpected letter %+v", letter)
		}
		shown, err := desk.Show(t.Context(), admin.DeadRef{ID: letter.ID, Delivery: -1}, admin.WithoutPayload)
		if err != nil || shown.Archived == nil || shown.Envelope == nil {
			t.Errorf("show %s: %+v, %v", letter.ID, shown, err)
		}
		found, err := f.op.Lookup(t.Context(), admin.LookupQuery{ID: letter.ID})
		if err != nil || len(found.Envelopes) != 1 || !slices.ContainsFunc(found.Envelopes[0].Timeline, func(entry admin.TimelineEntry) bool {
			return entry.What == "discarded" && strings.HasPrefix(entry.Text, "by ann; the archive has it until ")
		}) {
			t.Errorf("lookup of %s: %+v, %v", letter.ID, found, err)
		}
	}
	if n, err := desk.Count(t.Context(), admin.DeadFilter{}); err != nil || n != 0 {
		t.Errorf("%d letters outside of the archive, %v", n, err)
	}

	archive.All = true
	out, err := desk.Requeue(t.Context(), archive, admin.DeadOptions{}, nil)
	if err != nil || out.Matched != 2 || out.Requeued != 2 {
		t.Errorf("requeue: %+v, %v", out, err)
	}
	if n := f.countEnvelopes(f.state.Collection("waiting")); n != 1 {
		t.Errorf("%d envelopes wait, want 1", n)
	}
	if gone, err = desk.Discard(t.Context(), archive, admin.ForReal, nil); err != nil || gone.Discarded != 2 || gone.ArchivedUntil != nil {
		t.Errorf("removal from the archive: %+v, %v", gone, err)
	}
	if n, err := desk.Count(t.Context(), archive); err != nil || n != 0 {
		t.Errorf("%d letters are still in the archive, %v", n, err)
	}
}

// A watcher that has read nothing has no letters: that is no error.
func TestANewWatcherHasNoLetters(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	op := admin.Operator{State: f.state, Watcher: "nobody"}
	if page, err := op.Letters().List(t.Context(), admin.DeadFilter{}, 0, ""); err != nil || page.Total != 0 || page.Items == nil {
		t.Errorf("%+v, %v", page, err)
	}
	if groups, err := op.Letters().Summary(t.Context(), admin.DeadFilter{}); err != nil || len(groups) != 0 {
		t.Errorf("%+v, %v", groups, err)
	}
}

// An edit of a message without a change is an error.
func TestAnEditOfAMessageChangesSomething(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "m1")
	f.moveToDead(f.a, record.NotAllowed, letterOf("d1", "paid"))
	headers := [][2]string{{"id", "m1"}}
	for name, c := range map[string]struct {
		id   string
		edit admin.DeadEdit
	}{
		"nothing of a message":        {"m1", admin.DeadEdit{}},
		"the parts of a message":      {"m1", admin.DeadEdit{Payload: []byte(`{"card":"` + planted + `"}`), Fields: map[string]string{"key": "7"}, Headers: headers}},
		"nothing of an event":         {"d1", admin.DeadEdit{}},
		"the fields of an event":      {"d1", admin.DeadEdit{Payload: []byte("paid"), Fields: map[string]string{"type": "OrderPlaced"}}},
		"a missing field of an event": {"d1", admin.DeadEdit{Unset: []string{"topic"}}},
	} {
		_, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: c.id, Delivery: -1}, c.edit, admin.DeadOptions{})
		if err == nil || !strings.Contains(err.Error(), "changes nothing") {
			t.Errorf("an edit with %s: %v", name, err)
		}
	}

	edited, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: "d1", Delivery: -1},
		admin.DeadEdit{Payload: []byte("paid"), Fields: map[string]string{"key": "8"}}, admin.DeadOptions{DryRun: true})
	if err != nil || !slices.Equal(edited.Edited, []string{"key"}) {
		t.Errorf("an edit of one of two fields: %+v, %v", edited, err)
	}
	l, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "m1", Delivery: -1}, admin.WithoutPayload)
	if err != nil || l.Place != "orders/0@0" || l.Partition == nil {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestClearRemovesLettersOfHandlersAlone(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range 6 {
		coll := []*mongo.Collection{f.a, f.b}[n%2]
		f.giveUp(coll, f.op.HandlerLetters[n%3%2], "h", fmt.Sprint("m", n))
	}
	mustInsert(t, f.a, letterOf("e", planted))
	f.moveToDead(f.a, record.Malformed, letterOf("d", planted))

	// The letters of one outbox's database first, then all.
	order := admin.ClearOrder{What: []string{admin.ClearHandlers}, Confirm: admin.ClearPhrase("orders"), Force: true}
	for _, step := range []struct {
		collection string
		removed    int64
		left       int64
	}{{mongodb.Namespace(f.a), 3, 3}, {"", 3, 0}} {
		order.Collection, order.DryRun = step.collection, true
		if out, err := f.op.Clear(t.Context(), order); err != nil || out.Found != step.removed || out.Removed != 0 {
			t.Errorf("dry run for %q: %+v, %v", step.collection, out, err)
		}
		order.DryRun = false
		if out, err := f.op.Clear(t.Context(), order); err != nil || out.Removed != step.removed {
			t.Errorf("for %q: %+v, %v", step.collection, out, err)
		}
		if n, err := f.op.Letters().Count(t.Context(), ofHandlers); n != step.left || err != nil {
			t.Errorf("letters after %q: got %d (%v), want %d", step.collection, n, err, step.left)
		}
	}

	if n := f.countEnvelopes(f.a); n != 1 {
		t.Errorf("envelopes: got %d, want 1", n)
	}
	if n, err := f.op.Letters().Count(t.Context(), admin.DeadFilter{}); n != 1 || err != nil {
		t.Errorf("letters of the relay: got %d (%v), want 1", n, err)
	}
}

// A handler may have letters of several messages with one id. The place of the record selects one of them.
func TestALetterOfAHandlerIsFoundByItsPlace(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for offset := range int64(3) {
		f.giveUpAt(offset, f.a, deadletter.DefaultCollection, "h", "m")
	}
	f.giveUpAt(7, f.a, deadletter.DefaultCollection, "h", "orders/0@1")

	ref := admin.DeadRef{Source: admin.FromHandler, ID: "m", Delivery: -1}
	if _, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err == nil || !strings.Contains(err.Error(), "as in orders/0@") {
		t.Errorf("by the id of the message: %v", err)
	}
	// An id of a message that looks like a place is an id.
	for id, place := range map[string]string{"orders/0@2": "orders/0@2", "orders/0@1": "orders/0@7"} {
		ref.ID = id
		if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err != nil || l.Place != place {
			t.Errorf("%s: %s, %v", id, l.Place, err)
		}
	}
	// A foreign producer may write the 16 bytes of a UUID into the header.
	f.giveUpAt(8, f.a, deadletter.DefaultCollection, "h", "\xff\x01")
	page, err := f.op.Letters().List(t.Context(), admin.DeadFilter{Source: admin.FromHandler}, admin.MaxPage, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, listed := range page.Items {
		ref.ID = listed.Row
		if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err != nil || l.Place != listed.Place {
			t.Errorf("the row %s of %s: %s, %v", listed.Row, listed.Place, l.Place, err)
		}
	}

	ref.ID = "orders/0@9"
	if _, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("a place without a letter: %v", err)
	}
}

func TestALetterOfAHandlerIsShownEditedAndRequeued(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.giveUp(f.a, deadletter.DefaultCollection, "h1", "m")
	f.giveUp(f.a, deadletter.DefaultCollection, "h2", "m")
	f.giveUp(f.a, deadletter.DefaultCollection, "", "u")

	ref := admin.DeadRef{Source: admin.FromHandler, ID: "m", Delivery: -1}
	if _, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err == nil || !strings.Contains(err.Error(), "several dead letters of message m") {
		t.Errorf("letters of two handlers: %v", err)
	}
	ref.Handler = "h1"
	l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload)
	if err != nil || strings.Contains(string(l.Envelope), planted) || !strings.Contains(string(l.Envelope), `"hidden":true`) {
		t.Errorf("without the payload: %s, %v", l.Envelope, err)
	}
	// The record has no aggregate and no content type, so the envelope has none.
	if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithPayload); err != nil || !strings.Contains(string(l.Envelope), planted) || strings.Contains(string(l.Envelope), `""`) {
		t.Errorf("with the payload: %s, %v", l.Envelope, err)
	}
	stored, err := f.a.Database().Collection(deadletter.DefaultCollection).CountDocuments(t.Context(), bson.D{{Key: "aggregate.type", Value: ""}})
	if err != nil || stored > 0 {
		t.Errorf("%d letters are stored with an empty aggregate type, %v", stored, err)
	}

	waiting := setaside.New(f.a.Database(), setaside.DefaultCollection)
	for _, e := range []admin.DeadEdit{
		{Fields: map[string]string{"topic": "other"}}, {Unset: []string{"type"}}, {Version: 1, Payload: []byte("x")},
	} {
		if _, err := f.op.Letters().Edit(t.Context(), ref, e, admin.DeadOptions{}); err == nil {
			t.Errorf("the edit %+v was taken", e)
		}
	}
	edit := admin.DeadEdit{Payload: []byte("new"), Fields: map[string]string{"key": "8"}}
	got, err := f.op.Letters().Edit(t.Context(), ref, edit, admin.DeadOptions{})
	if err != nil || got.Delivery != 1 || !slices.Equal(got.Edited, []string{"key", "payload"}) {
		t.Errorf("edit: %+v, %v", got, err)
	}
	m, err := waiting.First(t.Context(), setaside.Place{Handler: "g/h1", Topic: "orders"}, setaside.KeyQueue([]byte("8")))
	if err != nil || m == nil || string(m.Value) != "new" {
		t.Errorf("the message that waits: %+v, %v", m, err)
	}
	if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err != nil || l.Requeued == nil || l.Requeued.Actor != "ann" || !l.Waiting {
		t.Errorf("after the edit: %+v, %v", l, err)
	}
	_, err = f.op.Letters().Edit(t.Context(), ref, edit, admin.DeadOptions{})
	if kind, _ := admin.Explain(err); kind != admin.FailConflict {
		t.Errorf("another edit: %v, %s", err, kind)
	}

	// The dry run and the requeue count alike.
	all := ofHandlers
	all.All = true
	member := setaside.Member{Group: "g", ID: "a", Handlers: []string{"h1", "h2"}}
	if _, err := waiting.Census(t.Context(), member, func(context.Context, []setaside.Place) ([]setaside.Place, error) { return nil, nil }); err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		out, err := f.op.Letters().Requeue(t.Context(), all, admin.DeadOptions{DryRun: dry, Handlers: []string{"nosuch"}}, nil)
		if err != nil || out.Matched != 2 || out.Rejected != 2 || len(out.Why) != 2 || !strings.Contains(out.Why[0].Reason, "no handler nosuch") {
			t.Errorf("to a handler that no member has, dry %v: %+v, %v", dry, out, err)
		}
	}
	for _, dry := range []bool{true, false} {
		out, err := f.op.Letters().Requeue(t.Context(), all, admin.DeadOptions{DryRun: dry}, nil)
		if err != nil || out.Matched != 2 || out.Requeued != 1 || out.Rejected != 1 || !dry && (len(out.Why) != 1 || out.Why[0].ID != "u") {
			t.Errorf("dry %v: %+v, %v", dry, out, err)
		}
	}
	out, err := f.op.Letters().Requeue(t.Context(), all, admin.DeadOptions{Handlers: []string{"h2"}}, nil)
	if err != nil || out.Requeued != 1 {
		t.Errorf("to a handler: %+v, %v", out, err)
	}
	if n, err := f.a.Database().Collection(setaside.DefaultCollection).CountDocuments(t.Context(), bson.D{{Key: "h", Value: "g/h2"}}); n != 2 || err != nil {
		t.Errorf("messages that wait for h2: %d, %v", n, err)
	}

	if done, err := f.op.Letters().Discard(t.Context(), all, admin.ForReal, nil); err != nil || done.Discarded != 3 {
		t.Errorf("discarded: %+v, %v", done, err)
	}
	var kinds []string
	for _, e := range f.readLog() {
		kinds = append(kinds, string(e.Kind))
	}
	if want := "dead_discarded dead_discarding dead_requeued dead_requeued dead_requeued dead_edited payload_shown"; strings.Join(kinds, " ") != want {
		t.Errorf("audit log: got %s, want %s", strings.Join(kinds, " "), want)
	}
}

func TestTheSeriesOfLettersAreCountedByAnIndex(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range 5 {
		f.giveUp(f.a, deadletter.DefaultCollection, fmt.Sprint("h", n%2), fmt.Sprint("m", n))
	}
	q := ofHandlers
	q.IDs = []string{"m0"}
	if _, err := f.op.Letters().Requeue(t.Context(), q, admin.DeadOptions{}, nil); err != nil {
		t.Fatal(err)
	}

	explained := stacktest.Explained(t, func(p stacktest.Plan) {
		if p.Docs > 0 {
			t.Errorf("%s reads %d documents: %v", p.Command, p.Docs, p.Stages)
		}
	})
	list, err := lettercount.CountSeries(t.Context(), explained.Database(f.a.Database().Name()), deadletter.DefaultCollection, 100)
	want := []lettercount.Series{
		{Group: "g", Handler: "h0", Class: deadletter.ClassHandler, Dead: 2},
		{Group: "g", Handler: "h1", Class: deadletter.ClassHandler, Dead: 2},
	}
	if err != nil || !slices.Equal(list, want) {
		t.Errorf("got %+v (%v), want %+v", list, err, want)
	}
}
