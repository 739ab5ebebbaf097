package deadletter

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Result counts the effects of a move.
type Result struct {
	Moved   int // new letters
	Known   int // letters that existed already
	Deleted int // envelopes removed from the outbox; fewer than letters if some were already gone
	Chunked int // letters stored in chunks
}

// Move writes the letters and removes their envelopes from the outbox, in the given order. It uses
// as many fenced transactions as the bounds require. Each is majority committed before the next one
// begins. The transaction also adds the outboxes to `dirty`, because the stream may repeat the
// events (N15). size is the size of the transactions: see [mongodb.Parts].
//
// Move returns an error before it writes anything if one of the letters cannot be stored. On any
// other error the counted letters are moved, and the caller may repeat the call with all letters.
// Move blocks while the lease is suspended.
func Move(ctx context.Context, f mongodb.Fencer, letters []Letter, size *mongodb.PartSize) (total Result, err error) {
	prepared := make([]preparedLetter, len(letters))
	for i, l := range letters {
		if prepared[i], err = prepareLetter(l); err != nil {
			return total, err
		}
	}

	// A process may die in between. Chunks without a letter do no harm, but a letter without its
	// chunks cannot be read.
	if err := writeChunks(ctx, f, prepared); err != nil {
		return total, err
	}

	var now time.Time
	var moved Result
	write := func(tx context.Context, client *mongo.Client, part []preparedLetter) (err error) {
		// A transaction cannot run hello, so this reads the time outside of it.
		if now.IsZero() {
			if now, err = mongodb.ServerTime(ctx, client); err != nil {
				return err
			}
		}
		for i := range part {
			part[i].setTimes(now)
		}

		moved, err = writeLetters(tx, client, part)
		return err
	}
	err = mongodb.WriteInParts(ctx, f, prepared, mongodb.Parts[preparedLetter]{
		Doing:    fmt.Sprintf("moving %d dead letters", len(letters)),
		PartSize: size,
		Size:     (*preparedLetter).estimateSize,
		Dirty:    namespacesToMarkDirty,
		Write:    write,
		Written:  func() { total.addResult(moved) },
	})
	return total, err
}

func (r *Result) addResult(o Result) {
	r.Moved += o.Moved
	r.Known += o.Known
	r.Deleted += o.Deleted
	r.Chunked += o.Chunked
}

// collectionBatch contains the writes of one transaction to one outbox and its dead letters.
type collectionBatch struct {
	outbox, dead     *mongo.Collection
	upserts          []mongo.WriteModel
	firstDeliveries  bson.A // ids of envelopes in their first delivery
	sharedDeliveries bson.A // the same, but these stay if they wait for other topics
	laterDeliveries  bson.A // filters for the other envelopes
}

// writeLetters is the body of one transaction.
func writeLetters(tx context.Context, client *mongo.Client, part []preparedLetter) (Result, error) {
	var r Result
	for _, b := range groupByCollection(client, part) {
		// The bulk write is ordered: two letters with one id, for a record that two topics
		// rejected, become one letter.
		res, err := b.dead.BulkWrite(tx, b.upserts)
		if err != nil {
			return Result{}, mongodb.Refusal(err, "writing to "+mongodb.Namespace(b.dead), "find, insert and update", mongodb.Namespace(b.dead))
		}
		crash.At("mid-exception-write")

		del, err := b.outbox.DeleteMany(tx, bson.D{{Key: "$or", Value: b.deleteConditions()}})
		if err != nil {
			return Result{}, mongodb.Refusal(err, "removing dead envelopes from "+mongodb.Namespace(b.outbox), "remove", mongodb.Namespace(b.outbox))
		}

		r.Moved += int(res.UpsertedCount)
		r.Known += int(res.MatchedCount)
		r.Deleted += int(del.DeletedCount)
	}

	for i := range part {
		if part[i].dead.Chunks > 0 {
			r.Chunked++
		}
	}
	return r, nil
}

// groupByCollection groups the letters by collection, in the order in which the collections first
// occur.
func groupByCollection(client *mongo.Client, part []preparedLetter) []*collectionBatch {
	var batches []*collectionBatch
	byNS := make(map[string]*collectionBatch)
	for i := range part {
		p := &part[i]
		b := byNS[p.id.NS]
		if b == nil {
			b = &collectionBatch{
				outbox: outboxes.CollectionOf(client, p.id.NS),
				dead:   outboxes.CollectionOf(client, Collection(p.id.NS)),
			}
			byNS[p.id.NS] = b
			batches = append(batches, b)
		}

		b.upserts = append(b.upserts, p.upsertModel())
		switch {
		case p.id.Delivery > 0:
			// The outbox may contain a later delivery of the envelope by now.
			b.laterDeliveries = append(b.laterDeliveries, bson.D{
				{Key: "_id", Value: p.id.ID},
				{Key: "delivery", Value: p.id.Delivery},
			})
		case p.keepIfWaiting:
			b.sharedDeliveries = append(b.sharedDeliveries, p.id.ID)
		default:
			b.firstDeliveries = append(b.firstDeliveries, p.id.ID)
		}
	}
	return batches
}

// deleteConditions returns filters that match the envelopes with the deliveries that died. An
// envelope that was requeued since then has a later delivery, and must stay.
func (b *collectionBatch) deleteConditions() bson.A {
	conditions := b.laterDeliveries
	addFirst := func(ids bson.A, and ...bson.E) {
		if len(ids) == 0 {
			return
		}
		condition := bson.D{
			{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}},
			{Key: "delivery", Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$gt", Value: 0}}}}},
		}
		conditions = append(conditions, append(condition, and...))
	}

	addFirst(b.firstDeliveries)
	addFirst(b.sharedDeliveries, bson.E{Key: "state", Value: nil})
	return conditions
}

// upsertModel returns the write that stores the letter unless it exists. The filter sets its id. It uses an operator
// instead of a pipeline: a malformed envelope may repeat a field, and only plain operators keep its
// bytes.
func (p *preparedLetter) upsertModel() mongo.WriteModel {
	return mongo.NewUpdateOneModel().SetUpsert(true).
		SetFilter(bson.D{{Key: "_id", Value: p.id}}).
		SetUpdate(bson.D{{Key: "$setOnInsert", Value: p.dead.Content}})
}
