//go:build unix

package fault

import (
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// writeSome lets half of the writers work that pause during a fault. The loads and the shop do not pause.
func (e *era) writeSome() {
	e.t.Helper()
	writers := []func(){
		e.insertForeign, e.scheduleSome, e.appendLarge, e.appendMany,
		func() { e.AppendMalformed(e.newKey("malformed-")) },
		// A transaction that is open while others commit.
		func() {
			slow := kit.NewEvent("item", e.newKey("slow-"), 1, 100)
			e.AppendWithin(e.Outbox(), func() { e.wait(500*time.Millisecond, 2*time.Second) }, slow)
		},
	}
	// A sweep after lost history delivers only events that are still there.
	if !e.site.forgets {
		writers = append(writers, e.cleanOutbox)
	}
	for _, write := range writers {
		if e.random.IntN(2) == 0 {
			write()
		}
	}
}

// insertForeign is a writer that does not use outrelay. Its envelopes have an expiry.
func (e *era) insertForeign() {
	for range 8 {
		doc, entry := newForeign(e.t, e.Scene, foreignID(e.keys, time.Now(), "text"), "item", e.newKey("foreign-"))
		doc = append(doc, bson.E{Key: expiryField, Value: time.Now().Add(3 * time.Second)})
		_, err := e.Outbox().InsertOne(e.t.Context(), doc)
		mustSucceed(e.t, err)
		e.Ledger.Add(entry)
	}
}

// expiryField is the date at which MongoDB removes an envelope of insertForeign.
const expiryField = "removeAt"

// expireOld creates a TTL index on the outbox.
func (e *era) expireOld() {
	e.t.Helper()
	if e.site.forgets {
		return
	}
	ttl := mongo.IndexModel{Keys: bson.D{{Key: expiryField, Value: 1}}, Options: options.Index().SetExpireAfterSeconds(0)}
	_, err := e.Outbox().Indexes().CreateOne(e.t.Context(), ttl)
	mustSucceed(e.t, err)
}

// scheduleSome commits events that are due soon, and cancels some of them.
func (e *era) scheduleSome() {
	all := e.Schedule("timer", 30, 5, time.Now().Add(time.Second), 2*time.Second)
	for range 5 {
		id := all[e.random.IntN(len(all))].ID()
		if e.box.Cancel(e.t.Context(), id) == nil {
			e.Ledger.MarkCancelled(e.DB.Name()+".outbox", id.String())
		}
	}
}

// appendLarge appends an event that takes a batch for itself.
func (e *era) appendLarge() {
	e.AppendEvents(e.Outbox(), kit.NewEvent("item", e.newKey("large-"), 1, 800<<10), kit.NewEvent("grown", e.newKey("grown-"), 1, 100))
}

// appendMany appends a transaction of many events.
func (e *era) appendMany() {
	events, prefix := make([]event.Event, 1500), e.newKey("many-")
	for i := range events {
		events[i] = kit.NewEvent("item", prefix+"-"+strconv.Itoa(i%40), i, 60)
	}
	e.AppendEvents(e.Outbox(), events...)
}

// askSagas requests the next step of each saga.
func (e *era) askSagas() {
	e.steps++
	var asked []event.Event
	for id := range int32(soakSagas) {
		asked = append(asked, member.Ask(id, e.steps, e.newKey("saga-")))
	}
	e.AppendEvents(e.Outbox(), asked...)
}

// cleanOutbox deletes committed envelopes, delivered or not, as a cleaning job of the services does.
func (e *era) cleanOutbox() {
	var ids bson.A
	all := e.Ledger.ExpectedEntries()
	for _, entry := range all[min(e.cleaned, len(all)):] {
		if !entry.Unordered {
			ids = append(ids, event.ParseID(entry.ID))
		}
	}
	e.cleaned = len(all)
	_, err := e.Outbox().DeleteMany(e.t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
	mustSucceed(e.t, err)
}
