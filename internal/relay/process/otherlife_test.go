package process_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/offline"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestN19_ClaimsOutliveTheWatcherDocument: the watcher document was lost. The envelopes of its claims exist nowhere else, and the next owner
// sends them.
func TestN19_ClaimsOutliveTheWatcherDocument(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start()
	b.log.wait(t, "took over")
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.state.Collection("watchers").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	b.insertClaim("default/0of1", 3, time.Now().Add(-time.Second))
	b.start("lost_history=sweep")
	b.consume(3)
	b.waitNoneClaimed()
}

// TestN28_EventsThatAnotherHistoryHadPassedAreForgotten: the positions up to which earlier slots had delivered are in a future
// that this history does not have, as after a restored backup. After the following sweep they have no effect.
func TestN28_EventsThatAnotherHistoryHadPassedAreForgotten(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start()
	b.append(1)
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "passed", Value: bson.A{bson.D{{Key: "slot", Value: "0of2"}, {Key: "pos", Value: "82F0000000"}}, bson.D{{Key: "slot", Value: "1of2"}, {Key: "pos", Value: "82F0000000"}}}},
	}}}); err != nil {
		t.Fatal(err)
	}
	if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}

	b.start()
	b.log.wait(t, "the gap is closed")
	b.append(1, event.WithID("behind"))
	b.waitRecords("behind", b.topic)
}

// TestN28_AReplayDuringAResliceIsRecognized: an operator replays an envelope during a reslice, in a collection
// of which nothing waits. The new slots find it, although it is in no stream.
func TestN28_AReplayDuringAResliceIsRecognized(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("slots=2", "node=a")
	b.waitWatchers("both of a", sharesAre(map[string]int{"a": 2}))
	b.append(1, event.WithID("again"))
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	cfg, _, err := config.Load("", b.env, nil)
	if err != nil {
		t.Fatal(err)
	}

	replayed := 0
	say := func(text string) {
		if !strings.HasPrefix(text, "fencing") { // every document is held
			return
		}
		replayed++
		b.enterWaiting("again", "82", func(e *waiting.Entry) {
			e.Reason, e.NextAt, e.Delivery, e.Origin = waiting.Queued, time.Now(), 1, waiting.OriginReplay
		})
	}

	rep, err := offline.Reslice(t.Context(), cfg, slog.New(slog.NewTextHandler(b.log, nil)), offline.ResliceOptions{Slots: 3, Wait: 40 * time.Second, Actor: "test", OnStep: say})
	if err != nil || !rep.Done || replayed != 1 {
		t.Fatalf("%+v, %v, %d replayed", rep, err, replayed)
	}

	b.start("slots=3", "node=b")
	b.consume(2)
	stacktest.Eventually(t, "no envelope waits", func() bool {
		return b.countWaiting(bson.D{}) == 0
	})
}

// TestN28_AResliceKeepsClaimedEnvelopes: an owner has died after it claimed scheduled envelopes. Their claim belongs to a slot that a
// reslice removes. The next owners send them, and not before they are due.
func TestN28_AResliceKeepsClaimedEnvelopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("slots=2", "node=a")
	b.waitWatchers("both of a", sharesAre(map[string]int{"a": 2}))
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	due := time.Now().Add(10 * time.Second).Truncate(time.Millisecond)
	claim := b.insertClaim("default/0of2", 20, due)
	if rep, err := b.reslice(3); err != nil || !rep.Done {
		t.Fatalf("%+v, %v", rep, err)
	}
	b.start("slots=3", "node=b")
	for _, r := range b.consume(len(claim.Envelopes)) {
		if r.Timestamp.Before(due) {
			t.Errorf("an envelope was sent %s before it was due", due.Sub(r.Timestamp))
		}
	}
	b.waitNoneClaimed()
}

// waitNoneClaimed waits until neither a claim nor a waiting envelope is left.
func (b *bundle) waitNoneClaimed() {
	b.t.Helper()
	stacktest.Eventually(b.t, "neither a claim nor a waiting envelope", func() bool {
		n, err := waiting.CountClaimed(b.t.Context(), b.state.Collection(waiting.ClaimsName), "default")
		return err == nil && n == 0 && b.countWaiting(bson.D{}) == 0
	})
}

// insertClaim stores a claim of n envelopes of the outbox, as an owner of a watcher document has left it.
func (b *bundle) insertClaim(watcherID string, n int, due time.Time) *waiting.Claim {
	b.t.Helper()
	claim := &waiting.Claim{ID: waiting.NewClaimID(watcherID)}

	for i := range n {
		e := event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i)}, "Due", event.Bytes("", []byte("p")), event.WithDueAt(due))
		raw, err := e.MarshalBSON()
		if err != nil {
			b.t.Fatal(err)
		}
		claim.Envelopes = append(claim.Envelopes, waiting.Claimed{NS: b.db.Name() + ".outbox", Key: fmt.Sprint(i), Pos: fmt.Sprintf("82%02d", i), Raw: raw})
	}
	if err := waiting.InsertClaim(b.t.Context(), b.state.Collection(waiting.ClaimsName), claim); err != nil {
		b.t.Fatal(err)
	}
	return claim
}

// TestN28_AFirstStartDuringAResliceKeepsItsNumber: a watcher that has never run is divided while a process makes its document.
func TestN28_AFirstStartDuringAResliceKeepsItsNumber(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg, _, err := config.Load("", b.env, nil)
	if err != nil {
		t.Fatal(err)
	}

	say := func(string) {
		if _, err := b.state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of1"}}); err != nil {
			t.Error(err)
		}
	}

	rep, err := offline.Reslice(t.Context(), cfg, slog.New(slog.NewTextHandler(b.log, nil)), offline.ResliceOptions{Slots: 3, Wait: 40 * time.Second, Actor: "test", OnStep: say})
	if !errors.Is(err, offline.ErrResliceRejected) || rep.Done {
		t.Errorf("%+v, %v", rep, err)
	}
	if err := divisions.New(b.state).Agree(t.Context(), "default", slot.Range{}); err != nil {
		t.Error(err)
	}
}
