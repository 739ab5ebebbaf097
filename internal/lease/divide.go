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

	"github.com/outrelay/outrelay/internal/record"
)

// Merge makes the documents of those ids, of a watcher that is divided anew, of those that it had (N28). All of them start where the
// least of the old ones is, know what each of the others had passed, count the records of all old senders, and read back
// from the least of their offsets. Their epochs go on above all of the old ones, so that what those have claimed can be
// taken over. Instances are new, and with them the transactional ids.
//
// old are the documents as their acquisition returned them, each drained and with its senders fenced; senders are what is
// left of those, for the read-back.
func Merge(ids []string, old []Document, senders []record.Sender, pos func(Document) string) []Document {
	least := slices.MinFunc(old, func(a, b Document) int { return a.Position().Compare(b.Position()) })
	all := Document{
		Token: least.Token, ClusterTime: least.ClusterTime, Collections: least.Collections, PipelineHash: least.PipelineHash,
		ReplicaSetID: least.ReplicaSetID, StartedAt: least.StartedAt, SenderList: senderEntries(senders), ExpiresAt: time.UnixMilli(0),
	}
	offsets := map[string][]int64{}
	for _, d := range old {
		all.Epoch, all.Seq, all.Fence = max(all.Epoch, d.Epoch), max(all.Seq, d.Seq), max(all.Fence, d.Fence)
		if d.StartedAt.Before(all.StartedAt) {
			all.StartedAt = d.StartedAt
		}
		for _, ns := range d.Dirty {
			if !slices.Contains(all.Dirty, ns) {
				all.Dirty = append(all.Dirty, ns)
			}
		}
		offsets = lowerOffsets(offsets, d.OffsetMap())
		all.Passed = append(all.Passed, d.Passed...)
		all.Passed = append(all.Passed, Passed{Part: d.ID[strings.LastIndexByte(d.ID, '/')+1:], Pos: pos(d)})
	}
	all.Offsets = sortedOffsets(offsets)
	slices.Sort(all.Dirty)
	at := pos(least)
	all.Passed = slices.DeleteFunc(all.Passed, func(p Passed) bool { return p.Pos <= at })
	slices.SortFunc(all.Passed, func(a, b Passed) int { return slices.Compare([]string{a.Part, a.Pos}, []string{b.Part, b.Pos}) })
	all.Passed = slices.Compact(all.Passed)
	out := make([]Document, len(ids))
	for i, id := range ids {
		out[i] = all
		out[i].ID, out[i].Instance = id, uuid.NewString()
		out[i].SenderList = slices.Clone(all.SenderList)
	}
	return out
}

// Introduced adds the first sender of a document that Merge has made: nobody has sent with it, and the first owner can write
// its marker.
func (d *Document) Introduced(s record.Sender) {
	d.SenderList = append(d.SenderList, senderEntries([]record.Sender{s})...)
}

// lowerOffsets lays b beside a, per partition. One that has no offset was never written by that slot (N9).
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

// ErrNotHeld says that a document that was to be replaced has another owner, or is gone.
var ErrNotHeld = errors.New("a watcher document is not held any more")

// ErrOrdered says that an operator has ordered a sweep for a document that was to be replaced.
var ErrOrdered = errors.New("a sweep was ordered meanwhile")

// Replace puts documents in the place of others, each as its acquisition returned it, in the transaction of tx. control is what
// operators ask of a new one, given the old ones as they are now. What others than the owner have put on the list of collections with exceptions since the
// acquisition (N17), the new documents have, too.
func Replace(tx context.Context, coll *mongo.Collection, old, fresh []Document, control func(id string, old []Document) Control) error {
	var dirty []string
	var removed []Document
	for _, d := range old {
		var last Document
		err := coll.FindOneAndDelete(tx, bson.D{{Key: "_id", Value: d.ID}, {Key: "owner", Value: d.Owner}, {Key: "epoch", Value: d.Epoch}}).Decode(&last)
		switch {
		case errors.Is(err, mongo.ErrNoDocuments):
			return fmt.Errorf("%w: %s", ErrNotHeld, d.ID)
		case err != nil:
			return fmt.Errorf("removing watcher document %s: %w", d.ID, err)
		case last.Gap != nil:
			return fmt.Errorf("%w: %s; let it run first", ErrOrdered, d.ID)
		}
		dirty, removed = append(dirty, last.Dirty...), append(removed, last)
	}
	docs := make([]any, len(fresh))
	for i := range fresh {
		d := fresh[i]
		doc := bson.D{
			{Key: "_id", Value: d.ID},
			{Key: "owner", Value: nil},
			{Key: "epoch", Value: d.Epoch},
			{Key: "expiresAt", Value: d.ExpiresAt},
			{Key: "seq", Value: d.Seq},
			{Key: "fence", Value: d.Fence},
			{Key: "clusterTime", Value: d.ClusterTime},
			{Key: "pipelineHash", Value: d.PipelineHash},
			{Key: "collections", Value: d.Collections},
			{Key: "offsets", Value: d.Offsets},
			{Key: "senders", Value: d.SenderList},
			{Key: "generation", Value: 0},
			{Key: "instance", Value: d.Instance},
			{Key: "startedAt", Value: d.StartedAt},
		}
		add := func(name string, v any, there bool) {
			if there {
				doc = append(doc, bson.E{Key: name, Value: v})
			}
		}
		add("token", d.Token, len(d.Token) > 0)
		all := slices.Compact(slices.Sorted(slices.Values(slices.Concat(d.Dirty, dirty))))
		add("dirty", all, len(all) > 0)
		add("passed", d.Passed, len(d.Passed) > 0)
		add("replicaSetId", d.ReplicaSetID, d.ReplicaSetID != "")
		asked := control(d.ID, removed)
		add("control", asked, !asked.equal(Control{}))
		docs[i] = doc
	}
	if _, err := coll.InsertMany(tx, docs); err != nil {
		return fmt.Errorf("writing the watcher documents: %w", err)
	}
	return nil
}

// EndTransactions ends the transactions that an owner that was killed, a command or the API has left open, once the lease has
// expired: until the server does that by itself, after a minute, nobody can write to the document. A document that is owned is left alone.
func EndTransactions(ctx context.Context, coll *mongo.Collection, id string) error {
	d, now, err := readDocument(ctx, coll, id) // a majority read could not see more
	if err != nil {
		return err
	}
	if d.Owner != "" && d.ExpiresAt.After(now) {
		return nil
	}
	return killSessions(ctx, coll.Database().Client(), d.openSessions())
}
