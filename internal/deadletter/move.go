package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/store"
)

// Result counts what a move did.
type Result struct {
	Moved   int // letters that are new
	Known   int // letters that were there already
	Deleted int // envelopes that left the outbox; fewer than letters where some were gone
	Chunked int // letters that are stored in chunks
}

// errOutside says that a Fencer ran its function without a transaction.
var errOutside = errors.New("dead letters are moved in a transaction only")

// Move writes the letters and deletes their envelopes, in the order given, in as many fenced transactions as the bounds
// ask for. Each is majority committed before the next begins. On an error those counted are moved, and the same call
// may be made again with all of them. Their collections are entered in `dirty` with it, because the stream may bring their events once
// more (N15). A letter that cannot be written at all is an error before anything is.
func Move(ctx context.Context, f store.Fencer, letters []Letter) (Result, error) {
	var total Result
	if len(letters) == 0 {
		return total, nil
	}
	rest := make([]prepared, len(letters))
	for i, l := range letters {
		p, err := prepare(l)
		if err != nil {
			return total, err
		}
		rest[i] = p
	}
	var now time.Time
	for p := newPace(); len(rest) > 0; {
		part := rest[:take(rest, p.n)]
		if err := chunks(ctx, f, part); err != nil {
			return total, err
		}
		var got Result
		var began time.Time // of the last attempt: the wait for the turn is not the server's
		err := store.FencedSoon(ctx, f, dirty(part), len(part), func(tx context.Context) (err error) {
			s := mongo.SessionFromContext(tx)
			if s == nil {
				return errOutside
			}
			if now.IsZero() { // outside the transaction, which runs no hello
				if now, err = store.ServerTime(ctx, s.Client()); err != nil {
					return err
				}
			}
			for i := range part {
				part[i].stamp(now)
			}
			began = time.Now()
			got, err = write(tx, s.Client(), part)
			return err
		})
		if errors.Is(err, store.ErrSlow) {
			p.never(len(part))
			continue
		}
		if err != nil {
			return total, fmt.Errorf("moving %d of %d dead letters: %w", len(part), len(letters), err)
		}
		p.took(time.Since(began), len(part))
		total.add(got)
		rest = rest[len(part):]
	}
	return total, nil
}

func (r *Result) add(o Result) {
	r.Moved += o.Moved
	r.Known += o.Known
	r.Deleted += o.Deleted
	r.Chunked += o.Chunked
}

// take is how many letters, at least one and at most limit, fit one transaction.
func take(rest []prepared, limit int) int {
	bytes := 0
	for i := range rest {
		if bytes += rest[i].size(); i == limit || i > 0 && bytes > MaxBytes {
			return i
		}
	}
	return len(rest)
}

// batch is what one transaction does to one outbox collection.
type batch struct {
	outbox, dead *mongo.Collection
	upserts      []mongo.WriteModel
	first        bson.A // ids of envelopes in their first delivery
	shared       bson.A // likewise, but they stay if they wait for other topics
	again        bson.A // conditions on the others
}

// write is the body of one transaction.
func write(tx context.Context, client *mongo.Client, part []prepared) (Result, error) {
	var r Result
	for _, b := range batches(client, part) {
		// Ordered: two letters of one id, a record refused by each of two topics, are one letter.
		res, err := b.dead.BulkWrite(tx, b.upserts)
		if err != nil {
			return Result{}, store.Refusal(err, "writing to "+store.Namespace(b.dead), "find, insert and update", store.Namespace(b.dead))
		}
		crash.At("mid-exception-write")
		del, err := b.outbox.DeleteMany(tx, bson.D{{Key: "$or", Value: b.conditions()}})
		if err != nil {
			return Result{}, store.Refusal(err, "removing dead envelopes from "+store.Namespace(b.outbox), "remove", store.Namespace(b.outbox))
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

// batches sorts the letters by collection, in the order in which they come.
func batches(client *mongo.Client, part []prepared) []*batch {
	var order []*batch
	byNS := make(map[string]*batch)
	for i := range part {
		p := &part[i]
		b := byNS[p.id.NS]
		if b == nil {
			db := client.Database(p.db)
			b = &batch{outbox: db.Collection(p.coll), dead: db.Collection(Collection(p.coll))}
			byNS[p.id.NS] = b
			order = append(order, b)
		}
		b.upserts = append(b.upserts, p.upsert())
		switch {
		case p.id.Delivery == 0 && p.shared:
			b.shared = append(b.shared, p.id.ID)
		case p.id.Delivery == 0:
			b.first = append(b.first, p.id.ID)
		default:
			b.again = append(b.again, bson.D{{Key: "_id", Value: p.id.ID}, {Key: "delivery", Value: p.id.Delivery}})
		}
	}
	return order
}

// conditions match the envelopes in the deliveries that died: one that was requeued meanwhile is not ours to delete.
func (b *batch) conditions() bson.A {
	all := b.again
	fresh := func(ids bson.A, and ...bson.E) {
		if len(ids) > 0 {
			all = append(all, append(bson.D{
				{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}},
				{Key: "delivery", Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$gt", Value: 0}}}}},
			}, and...))
		}
	}
	fresh(b.first)
	fresh(b.shared, bson.E{Key: "state", Value: nil})
	return all
}

// upsert writes the letter unless it is there. By an operator, not by a pipeline: a malformed envelope may repeat a
// field, and only the plain operators keep its bytes.
func (p *prepared) upsert() mongo.WriteModel {
	return mongo.NewUpdateOneModel().SetUpsert(true).
		SetFilter(bson.D{{Key: "_id", Value: p.id}}).
		SetUpdate(bson.D{{Key: "$setOnInsert", Value: p.dead.fields()}})
}

// fields are the letter's without _id, which an upsert takes from its filter.
func (d *Dead) fields() bson.D {
	out := bson.D{
		{Key: "size", Value: d.Size},
		{Key: "class", Value: d.Class},
		{Key: "reason", Value: d.Reason},
		{Key: "source", Value: d.Source},
		{Key: "attempts", Value: d.Attempts},
		{Key: "firstFailure", Value: d.FirstFailure},
		{Key: "lastFailure", Value: d.LastFailure},
		{Key: "movedAt", Value: d.MovedAt},
	}
	if d.Chunks > 0 {
		out = append(out, bson.E{Key: "chunks", Value: d.Chunks})
	} else {
		out = append(out, bson.E{Key: "envelope", Value: d.Envelope})
	}
	if d.Partition != nil {
		out = append(out, bson.E{Key: "partition", Value: *d.Partition})
	}
	for _, f := range []struct{ name, value string }{
		{"topic", d.Topic}, {"pos", d.Pos}, {"replayOf", d.ReplayOf}, {"type", d.Type}, {"aggregatetype", d.AggregateType}, {"key", d.Key},
	} {
		if f.value != "" {
			out = append(out, bson.E{Key: f.name, Value: f.value})
		}
	}
	return out
}
