package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Merge returns new documents with the given ids, which replace the old documents of a watcher in a
// reslice (N28). All new documents start at the least position of the old ones and record how far each
// old slot had come. They list the remaining senders of all old documents, and their read-back starts
// at the least stored offsets. Their epochs are above all old epochs, so that the claims of old epochs
// can be taken over. Their instances, and with these the transactional ids, are new.
//
// old are the documents as their acquisition returned them, drained and with fenced senders. senders
// are the senders that the read-back still needs. pos returns the position of a document in the format
// of [Passed].
func Merge(ids []string, old []Document, senders []record.Sender, pos func(Document) string) []Document {
	least := slices.MinFunc(old, func(a, b Document) int { return a.Position().Compare(b.Position()) })
	// The stream of a new slot may not contain the event of a token, so it starts by time (N23).
	at, _ := least.Position().Time()
	merged := Document{
		ClusterTime:  at,
		ReplicaSetID: least.ReplicaSetID, StartedAt: least.StartedAt,
		SenderTable: newSenderTable(senders), ExpiresAt: time.UnixMilli(0),
	}
	merged.mergeDescription(old)

	offsets := map[string][]int64{}
	for _, d := range old {
		merged.Epoch = max(merged.Epoch, d.Epoch)
		merged.Seq = max(merged.Seq, d.Seq)
		merged.Fence = max(merged.Fence, d.Fence)
		if d.StartedAt.Before(merged.StartedAt) {
			merged.StartedAt = d.StartedAt
		}

		merged.Beside = max(merged.Beside, d.Beside)
		if d.Swept != nil && (merged.Swept == nil || d.Swept.Until.After(merged.Swept.Until)) {
			merged.Swept = d.Swept
		}
		offsets = lowerOffsets(offsets, d.OffsetMap())

		part := d.ID[strings.LastIndexByte(d.ID, '/')+1:]
		merged.Passed = append(merged.Passed, d.Passed...)
		merged.Passed = append(merged.Passed, Passed{Slot: part, Pos: pos(d)})
	}
	merged.Offsets = sortedOffsets(offsets)

	// The streams start at the time of the least position, so they repeat nothing from before.
	start := pos(Document{ClusterTime: at})
	merged.Passed = slices.DeleteFunc(merged.Passed, func(passed Passed) bool { return passed.Pos <= start })
	slices.SortFunc(merged.Passed, func(a, b Passed) int {
		return slices.Compare([]string{a.Slot, a.Pos}, []string{b.Slot, b.Pos})
	})
	merged.Passed = slices.Compact(merged.Passed)

	out := make([]Document, len(ids))
	for i, id := range ids {
		out[i] = merged
		out[i].ID, out[i].Instance = id, uuid.NewString()
		out[i].SenderTable.List = slices.Clone(merged.SenderTable.List)
	}
	return out
}

// mergeDescription sets the description of the stream that the old slots have read: the hash, and the collections that each of them has
// read. A slot that contains no key of a collection does not list it. If the slots had different configurations, only the collections that all
// of them list count, and no stream is known.
func (d *Document) mergeDescription(old []Document) {
	d.PipelineHash = old[0].PipelineHash
	isSame := !slices.ContainsFunc(old, func(document Document) bool { return document.PipelineHash != d.PipelineHash })
	if !isSame {
		d.PipelineHash = ""
	}

	lists := map[string]int{}
	for _, document := range old {
		for _, collection := range document.Collections {
			id := string(collection.UUID.Data)
			lists[id]++
			i := slices.IndexFunc(d.Collections, func(known Collection) bool { return known.UUID.Equal(collection.UUID) })
			switch {
			case i < 0:
				d.Collections = append(d.Collections, collection)
			case !collection.ReadUpTo.IsZero() && (d.Collections[i].ReadUpTo.IsZero() || collection.ReadUpTo.Before(d.Collections[i].ReadUpTo)):
				d.Collections[i] = collection
			}
		}
	}
	d.Collections = slices.DeleteFunc(d.Collections, func(collection Collection) bool {
		return !isSame && lists[string(collection.UUID.Data)] < len(old)
	})
}

// AddSender adds sender, the first sender of a document that Merge returned. No record has been sent with
// sender, and the first owner can write its marker.
func (d *Document) AddSender(sender record.Sender) {
	d.SenderTable.List = append(d.SenderTable.List, sender)
}

// lowerOffsets lowers the offsets in a to those in b, per partition, and returns a. A partition without
// an offset was never written by that slot, so it does not lower the other offset (N9).
func lowerOffsets(a, b map[string][]int64) map[string][]int64 {
	for topic, offsets := range b {
		have := a[topic]
		for p, at := range offsets {
			switch {
			case p >= len(have):
				have = append(have, at)
			case have[p] < 0 || at >= 0 && at < have[p]:
				have[p] = at
			}
		}

		a[topic] = have
	}
	return a
}

// ErrNotHeld is the error when a document to be replaced has another owner or is gone.
var ErrNotHeld = errors.New("watcher document is no longer held by this process")

// errSweepRequested is the error when an operator has requested a sweep of a document to be replaced.
var errSweepRequested = errors.New("a sweep was requested in the meantime")

// Replace deletes the old documents and inserts the fresh ones, in the transaction of tx. The old
// documents are as their acquisition returned them. control returns the Control of a fresh document,
// from the old documents as they are now.
func Replace(tx context.Context, coll *mongo.Collection, old, fresh []Document,
	control func(id string, old []Document) Control,
) error {
	removed, err := removeHeld(tx, coll, old)
	if err != nil {
		return err
	}

	docs := make([]any, len(fresh))
	for i, d := range fresh {
		d.Control = control(d.ID, removed)
		// Operators have not acknowledged these.
		if i == 0 {
			for j := range removed {
				d.Incidents = append(d.Incidents, removed[j].Incidents...)
			}
		}
		docs[i] = d
	}

	if _, err := coll.InsertMany(tx, docs); err != nil {
		return fmt.Errorf("writing the watcher documents: %w", err)
	}
	return nil
}

// removeHeld deletes the documents and returns them as they were at that moment.
func removeHeld(tx context.Context, coll *mongo.Collection, docs []Document) ([]Document, error) {
	var removed []Document
	for _, d := range docs {
		var last Document
		// The filter names the owner: another process must not lose a lease that it has acquired since.
		err := coll.FindOneAndDelete(tx, bson.D{
			{Key: "_id", Value: d.ID}, {Key: "owner", Value: d.Owner}, {Key: "epoch", Value: d.Epoch},
		}).Decode(&last)
		if errors.Is(err, mongo.ErrNoDocuments) {
			return nil, fmt.Errorf("%w: %s", ErrNotHeld, d.ID)
		}
		if err != nil {
			return nil, fmt.Errorf("removing watcher document %s: %w", d.ID, err)
		}

		// The new documents could not continue the sweep of an old document.
		if last.Gap != nil {
			return nil, fmt.Errorf("%w: %s; wait until the sweep is done", errSweepRequested, d.ID)
		}
		removed = append(removed, last)
	}
	return removed, nil
}

// EndTransactions ends the transactions that a killed owner left open on a document
// whose lease has expired. Otherwise the document cannot be written until the server ends them, after a
// minute. If the lease has not expired, EndTransactions does nothing.
func EndTransactions(ctx context.Context, coll *mongo.Collection, id string) error {
	// The caller's read concern suffices: a majority read could not see more.
	document, now, err := readDocument(ctx, coll, id)
	if err != nil {
		return err
	}

	if document.Owner != "" && document.ExpiresAt.After(now) {
		return nil
	}
	return mongodb.KillSessions(ctx, coll.Database().Client(), document.openSessions())
}
