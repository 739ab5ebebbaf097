package reconciler

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Discard removes the envelopes that wait of the dropped outbox coll of db, with positions
// before that of the drop, and returns their number. It removes them in fenced transactions, and then opens their gates. An envelope
// in flight may still be sent. A repetition has no second effect. Discard may be called from any goroutine, by one at a time.
func (x *Sender) Discard(ctx context.Context, fence mongodb.Fencer, db, coll, before string) (n int64, err error) {
	size := mongodb.NewPartSize(mongodb.MaxDocuments)
	store := x.config.Store.Collection()
	for {
		list, err := x.config.Store.OfOutbox(ctx, db, coll, before, mongodb.MaxDocuments)
		if err != nil || len(list) == 0 {
			return n, err
		}

		idle := x.reserveIdle(list)
		var last []waiting.Document
		err = mongodb.WriteInParts(ctx, fence, list, mongodb.Parts[waiting.Document]{
			Doing:    "removing the waiting events of a dropped collection",
			PartSize: size,
			Write: func(tx context.Context, client *mongo.Client, part []waiting.Document) error {
				last = part
				_, err := waiting.WriteChanges(tx, mongodb.InClient(client, store), nil, idsOf(part))
				return err
			},
			Written: func() {
				n += int64(len(last))
				x.forget(last, idle)
			},
		})
		if err != nil {
			x.unreserveIdle(idle)
			return n, err
		}
	}
}

func idsOf(list []waiting.Document) []docID {
	ids := make([]docID, len(list))
	for i := range list {
		ids[i] = list[i].DocumentID
	}
	return ids
}

// reserveIdle keeps scans from publishing the documents that are neither in flight nor reserved, and returns these. The others get an
// outcome, which opens their gates.
func (x *Sender) reserveIdle(list []waiting.Document) map[docID]bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	idle := map[docID]bool{}
	for i := range list {
		id := list[i].DocumentID
		_, reserved := x.reserved[id]
		if x.inFlight[id] == nil && !reserved {
			idle[id] = true
			x.reserved[id] = struct{}{}
		}
	}
	return idle
}

// unreserveIdle lets scans publish the documents again.
func (x *Sender) unreserveIdle(idle map[docID]bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for id := range idle {
		delete(x.reserved, id)
	}
}

// forget opens the gates of removed documents that were idle, and lets their keys continue.
func (x *Sender) forget(list []waiting.Document, idle map[docID]bool) {
	for i := range list {
		document := &list[i]
		if !idle[document.DocumentID] {
			continue
		}
		key := orderKey{document.NS, document.Key}
		x.mu.Lock()
		delete(x.reserved, document.DocumentID)
		// The page that a scan reads now may still show it.
		x.landedIDs[document.DocumentID] = false
		delete(x.stops, key)
		x.queueKeyLocked(x.work.nextPoll, key)
		x.mu.Unlock()

		if document.IsOfStream() {
			for _, topic := range document.Pending {
				x.config.Outlet.OpenGate(document.NS, topic, document.Key)
			}
		}
	}
}
